"""The target in vLLM, in this process; vLLM is no dependency of the project and is installed by whoever uses it."""

from __future__ import annotations

from collections.abc import Generator
from importlib.util import find_spec
from typing import Any

from data_gen.engines.base import (
    BadCompletionError,
    Batch,
    Completion,
    Engine,
    Finished,
    Rejected,
    SamplingParams,
    Source,
    check_completion,
)
from specvocab_model.config import ConfigError, TargetConfig
from specvocab_model.target_files import resolve_model


class VllmEngine(Engine):
    """A thin layer over the engine of ``vllm.LLM``, which schedules the prompts itself."""

    def __init__(self, target: TargetConfig, *, vocab_size: int, max_context: int, **arguments: Any) -> None:
        """
        Args:
            max_context: tokens that a prompt and its completion may have together.
            arguments: further ones of ``vllm.LLM``.

        Raises:
            ConfigError: vLLM is not installed, or the target is a GGUF file.
        """
        if find_spec("vllm") is None:
            raise ConfigError("generation.engine='vllm' needs vLLM: `pip install vllm`, or start "
                              "`vllm serve` elsewhere and set generation=server")
        if target.gguf_file:
            raise ConfigError("generation.engine='vllm' reads no target.gguf_file; use the transformers engine")
        import vllm  # optional, and slow to import

        self.vocab_size = vocab_size
        self._vllm = vllm
        self._num_asked = 0
        self._llm = vllm.LLM(
            model=str(resolve_model(target)), dtype=target.dtype, max_model_len=max_context, seed=0,
            generation_config="vllm",  # not the model's own, whose penalties would bend the distribution
            **arguments,
        )

    def stream(self, source: Source, params: SamplingParams) -> Generator[Finished, None, None]:
        """See ``Engine.stream``."""
        engine = self._llm.llm_engine
        room = engine.vllm_config.scheduler_config.max_num_seqs
        asked: dict[str, tuple[Batch, int]] = {}
        try:
            while True:
                while len(asked) < room and (batch := source()) is not None:
                    for index, prompt in enumerate(batch.prompts):
                        self._num_asked += 1
                        asked[str(self._num_asked)] = (batch, index)
                        engine.add_request(str(self._num_asked), {"type": "token", "prompt_token_ids": prompt},
                                           self._sampling(params, (batch.seed + index) % 2**63))
                if not asked:
                    return
                for output in engine.step():
                    if output.finished:
                        batch, index = asked.pop(output.request_id)
                        yield batch, index, self._completion(batch.prompts[index], output, params)
        finally:
            engine.abort_request(list(asked))

    def _sampling(self, params: SamplingParams, seed: int) -> Any:
        return self._vllm.SamplingParams(
            max_tokens=params.max_new_tokens, temperature=params.temperature, top_k=params.top_k or -1,
            top_p=params.top_p, stop_token_ids=list(params.stop_token_ids), detokenize=False,
            ignore_eos=True,  # it stops at stop_token_ids alone, as the other engines do
            seed=seed if params.temperature > 0 else None,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, prompt: list[int], output: Any, params: SamplingParams) -> Completion | Rejected:
        if list(output.prompt_token_ids) != prompt:
            return Rejected("no valid completion", "vLLM saw another prompt")
        written = output.outputs[0]
        try:
            return check_completion(Completion(list(written.token_ids), written.finish_reason), params, self.vocab_size)
        except BadCompletionError as error:
            return Rejected("no valid completion", str(error))

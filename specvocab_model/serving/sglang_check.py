"""A checkpoint in the installed SGLang, for ``scripts/serve_check.py``: its loader and models, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.bootstrap import init_parallel_runtime
from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    resolve_spec_aux_hidden_state_config,
)
from sglang.srt.model_loader import get_model
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.pp_draft_embedding import resolve_draft_embed_and_head
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.network import get_free_port
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specvocab_model.serving.check import ROWS, Served

# Chains of drafts are known to no other attention of SGLang's on a CPU. Left to itself, its cache takes all memory.
CPU_ENGINE = {"device": "cpu", "prefill_attention_backend": "intel_amx", "decode_attention_backend": "intel_amx",
              "max_total_tokens": 16384, "max_running_requests": 16}


class SGLangDraft:
    """See ``check.ServedDraft``. Holds SGLang's process-wide state until it is closed: one at a time in a process.

    Args:
        folder: the checkpoint.
        target: folder or hub id of its target.
        dtype: as SGLang's ``--dtype``.
        num_draft_tokens: length of a chain.
        max_model_len: as SGLang's ``--context-length``.
        rank, num_ranks, dist_port: of tensor parallelism; every rank is a process with one of these objects.
    """

    name = f"SGLang {version('sglang')}"

    def __init__(self, folder: Path, target: str, *, dtype: str, num_draft_tokens: int, max_model_len: int,
                 rank: int = 0, num_ranks: int = 1, dist_port: int | None = None) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._arguments: dict[str, Any] = {
            "model_path": target,
            "dtype": dtype,
            "context_length": max_model_len,
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(folder),
            "speculative_num_steps": num_draft_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": num_draft_tokens + 1,
        }
        load_plugins()
        arguments = ServerArgs(**self._arguments, device=device, tp_size=num_ranks, attention_backend="torch_native")
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
        init_parallel_runtime(server_args=arguments, device=device, dist_port=dist_port or get_free_port())
        with ExitStack() as undo:
            undo.callback(self.close)
            self._load(arguments, folder, target, device)
            undo.pop_all()

    def _load(self, arguments: ServerArgs, folder: Path, target: str, device: str) -> None:
        def load(path: str, is_draft_model: bool) -> tuple[ModelConfig, Any]:
            config = ModelConfig.from_server_args(arguments, model_path=path, is_draft_model=is_draft_model)
            return config, get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig(device))

        config, self.target = load(target, False)
        self.draft = load(str(folder), True)[1]
        captured = resolve_spec_aux_hidden_state_config(
            server_args=arguments, model_config=config, spec_algorithm=SpeculativeAlgorithm.EAGLE3,
            is_draft_worker=False)
        self.target.set_eagle3_layers_to_capture(captured.eagle_aux_hidden_state_layer_ids)
        embed, head = resolve_draft_embed_and_head(
            target_model=self.target, draft_model=self.draft, model_path=target, revision=None,
            load_config=LoadConfig())
        if self.draft.load_lm_head_from_target:
            self.draft.set_embed_and_head(embed, head)
        else:
            self.draft.set_embed(embed)
        self.device = embed.device

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.target.model.layers_to_capture)

    def target_output(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Features [T, 3d] and logits [T, V] that SGLang's target gives for one text, int64 [T]."""
        output = self._forward(self.target, input_ids, _CausalAttention())
        return output.hidden_states, output.next_token_logits

    def logits(self, features: Tensor, next_ids: Tensor) -> Tensor:
        return self.chain(features, next_ids, [])[0]

    def chain(self, features: Tensor, next_ids: Tensor, drafts: Sequence[int]) -> list[Tensor]:
        """``logits``, then [1, V] after each of ``drafts``, which follow the last position, as a chain's steps do.

        Rows are by target id: a reduced head's stand where ``d2t`` puts them, −inf elsewhere.
        """
        attention, texts = _CausalAttention(), []
        parts = zip(next_ids.split(ROWS), features.to(next(self.draft.parameters())).split(ROWS), strict=True)
        for number, (ids, part) in enumerate(parts):
            output = self._forward(self.draft, ids, attention, part, start=number * ROWS)
            texts.append(self._dense(output.next_token_logits, features.device))
        logits = [torch.cat(texts)]
        for step, token in enumerate(drafts):
            output = self._forward(self.draft, next_ids.new_tensor([token]), attention, output.hidden_states[-1:],
                                   start=len(next_ids) + step)
            logits.append(self._dense(output.next_token_logits, features.device))
        return logits

    def serve(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Served:
        on_cpu = CPU_ENGINE if self.device.type == "cpu" else {}
        self.close()
        from sglang import Engine  # starts processes of its own

        engine = Engine(**self._arguments | on_cpu)
        try:
            outputs = engine.generate(input_ids=[list(prompt) for prompt in prompts],
                                      sampling_params={"temperature": 0.0, "max_new_tokens": max_new_tokens})
        finally:
            engine.shutdown()
        return count_drafts(outputs, self._arguments["speculative_num_steps"])

    def close(self) -> None:
        """Free the models, also for other processes, and SGLang's process groups; may be called again."""
        self.target = self.draft = None
        destroy_model_parallel()
        destroy_distributed_environment()
        with suppress(AssertionError):  # there is none left
            torch.distributed.destroy_process_group()
        torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    @torch.no_grad()
    def _forward(self, model: Any, input_ids: Tensor, attention: _CausalAttention, features: Tensor | None = None,
                 start: int = 0) -> LogitsProcessorOutput:
        """SGLang's forward of tokens at the positions from ``start`` on, all scored as those of a decoded batch."""
        ids, length = input_ids.to(self.device), len(input_ids)
        positions = torch.arange(start, start + length, device=self.device)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE, batch_size=length, input_ids=ids, req_pool_indices=torch.zeros_like(ids),
            seq_lens=positions + 1, out_cache_loc=positions, seq_lens_sum=int((positions + 1).sum()),
            positions=positions, capture_hidden_mode=CaptureHiddenMode.FULL,
            spec_info=None if features is None else EagleDraftInput(hidden_states=features.to(self.device)),
        )
        with forward_context(ForwardContext(attn_backend=attention), forward_batch=batch):
            return model.forward(ids, positions, batch)

    def _dense(self, logits: Tensor, device: torch.device) -> Tensor:
        if self.draft.hot_token_id is not None:
            whole = logits.new_full((len(logits), self.draft.config.vocab_size), -torch.inf)
            logits = whole.index_copy_(1, self.draft.hot_token_id.to(logits.device), logits)
        return logits.float().to(device)


def count_drafts(outputs: Sequence[dict[str, Any]], num_draft_tokens: int) -> Served:
    """What SGLang's answers say of their rounds; one that is a single token has had none, and says nothing."""
    rounds, accepted = 0, [0] * num_draft_tokens
    for output in outputs:
        rounds += output["meta_info"].get("spec_verify_ct", 0)
        histogram = output["meta_info"].get("spec_correct_drafts_histogram", ())  # rounds by number of accepted drafts
        for position in range(len(accepted)):
            accepted[position] += sum(histogram[position + 1 :])
    return Served(answers=[output["output_ids"] for output in outputs], num_rounds=rounds,
                  accepted_per_position=accepted)


class _CausalAttention(AttentionBackend):
    """In the place of SGLang's attention, which needs a scheduler and its paged cache; over one text from its start."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, forward_batch: ForwardBatch,
                save_kv_cache: bool = True, **kwargs: Any) -> Tensor:
        """[T, heads * head_dim] or [T, heads, head_dim] each -> [T, num_heads * head_dim]"""
        q, k, v = (x.reshape(len(q), -1, layer.head_dim).transpose(0, 1)[None] for x in (q, k, v))
        if layer.layer_id in self.cache:
            past_k, past_v = self.cache[layer.layer_id]
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        self.cache[layer.layer_id] = k, v
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        output = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=layer.scaling, enable_gqa=True)
        return output[0].transpose(0, 1).flatten(1)

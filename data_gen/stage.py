"""One stage of generation: a list of prompts becomes a folder of rows, on any number of ranks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import PartialState
from tqdm import tqdm

from data_gen.chat import check_template_kwargs, tokenizer_digests
from data_gen.engines import Completion, Engine, Rejected, SamplingParams, build_engine
from data_gen.prompts import Prompt, prompts_digest
from data_gen.shards import Manifest, Row, ShardWriter
from specvocab_model.config import Config, ConfigError
from specvocab_model.target import load_spec_and_tokenizer

MIN_SHARDS = 64  # where there are prompts enough: a rank without a shard has nothing to do
SMALLEST_SHARD = 64  # prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What is to be generated."""

    name: str
    folder: Path
    prompts: list[Prompt]
    encode: Callable[[Prompt], list[int]]  # token ids that the target continues; ValueError for an impossible prompt
    params: SamplingParams
    role: str  # whose words the target writes: "assistant", or "user" when it invents prompts


class StageRunner:
    """Runs stages with one target. The weights are loaded when the first row is missing, and only then."""

    def __init__(self, config: Config, state: PartialState) -> None:
        """
        Raises:
            ConfigError: the target is missing, not supported, has fewer positions than the configuration asks for, or
                a chat template without the configured variables.
        """
        self.config = config
        self.state = state
        self.spec, self.tokenizer = load_spec_and_tokenizer(config.target)
        self._tokenizer_digests = tokenizer_digests(self.tokenizer)
        check_template_kwargs(self.tokenizer, config.target.chat_template_kwargs)
        longest = config.generation.max_prompt_tokens + config.generation.max_new_tokens
        if longest > self.spec.max_position_embeddings:
            raise ConfigError(
                f"generation.max_prompt_tokens + generation.max_new_tokens = {longest} exceeds the "
                f"{self.spec.max_position_embeddings} positions of target.model={config.target.model!r}"
            )

    @cached_property
    def engine(self) -> Engine:
        return build_engine(self.config, self.state.device)

    def report(self, line: str) -> None:
        """Print ``line``, once for all ranks."""
        if self.state.is_main_process:
            print(line, flush=True)

    def run(self, stage: Stage) -> Manifest:
        """Make what is missing of the stage's folder; returns when all ranks are done.

        Raises:
            ConfigError: the folder was made or begun with other settings.
        """
        writer = ShardWriter(
            stage.folder,
            target=self.config.target.model,
            settings=self._settings(stage),
            num_prompts=len(stage.prompts),
            rows_per_shard=rows_per_shard(len(stage.prompts), at_most=self.config.generation.rows_per_shard),
            vocab_size=self.spec.vocab_size,
            stop_token_ids=stage.params.stop_token_ids,
        )
        manifest = writer.open()
        if manifest is not None:
            self.report(f"{stage.name}: {_summary(manifest)}; finished before, in {stage.folder}")
            return self._not_empty(stage, manifest)
        missing = writer.missing_shards()
        # By the shard's own number: ranks that look at different moments see different shards missing.
        mine = [index for index in missing if index % self.state.num_processes == self.state.process_index]
        if mine:
            _ = self.engine  # loaded outside the time that is measured
        self.state.wait_for_everyone()
        start = time.monotonic()
        self._fill(stage, writer, mine)
        self.state.wait_for_everyone()
        seconds = time.monotonic() - start  # of the slowest rank, as the tokens are those of all
        if self.state.is_main_process:
            manifest = writer.finalise()
            num_tokens = sum(manifest.shards[index].num_loss_tokens for index in missing)
            self.report(f"{stage.name}: {_summary(manifest)}; {num_tokens / seconds:.0f} tokens/s, in {stage.folder}")
        self.state.wait_for_everyone()
        manifest = writer.open()
        assert manifest is not None
        return self._not_empty(stage, manifest)

    def _not_empty(self, stage: Stage, manifest: Manifest) -> Manifest:
        """Raises ConfigError if there were prompts and all were too long."""
        if stage.prompts and not manifest.num_rows:
            limit = self.config.generation.max_prompt_tokens
            raise ConfigError(f"all {len(stage.prompts)} {stage.name} prompts have more than "
                              f"generation.max_prompt_tokens={limit} tokens; raise it and remove {stage.folder}")
        return manifest

    def _fill(self, stage: Stage, writer: ShardWriter, mine: list[int]) -> None:
        """Make this rank's missing shards."""
        ranges = [stage.prompts[writer.prompt_range(index)] for index in mine]
        with tqdm(total=sum(map(len, ranges)), desc=stage.name, unit=" prompts", smoothing=0.05,
                  disable=not self.state.is_main_process) as progress:
            for index, prompts in zip(mine, ranges, strict=True):
                writer.write(index, self._rows(stage, prompts, index, progress))

    def _rows(self, stage: Stage, prompts: list[Prompt], shard: int, progress: tqdm) -> list[Row]:
        """The rows of one shard in prompt order; prompts of more than ``max_prompt_tokens`` have none."""
        encoded = [(prompt, _encode(stage, prompt)) for prompt in prompts]
        fitting = [(prompt, ids) for prompt, ids in encoded if len(ids) <= self.config.generation.max_prompt_tokens]
        progress.update(len(prompts) - len(fitting))
        rows: dict[int, Row] = {}
        seed = _shard_seed(self.config.seed, stage.name, shard)
        for index, completion in self.engine.generate([ids for _, ids in fitting], stage.params, seed=seed):
            if isinstance(completion, Rejected):
                raise ConfigError(f"prompt {fitting[index][0].id!r} has no answer ({completion.reason}): "
                                  f"{completion.detail}; remove it, or start again to try it once more")
            rows[index] = self._row(stage, *fitting[index], completion)
            progress.update()
        return [rows[index] for index in range(len(fitting))]

    def _row(self, stage: Stage, prompt: Prompt, prompt_ids: list[int], completion: Completion) -> Row:
        text = str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        return Row(
            id=prompt.id,
            source=prompt.source,
            input_ids=prompt_ids + completion.token_ids,
            loss_mask=[0] * len(prompt_ids) + [1] * len(completion.token_ids),
            finish_reason=completion.finish_reason,
            messages=[*prompt.messages, {"role": stage.role, "content": text}],
        )

    def _settings(self, stage: Stage) -> dict[str, Any]:
        """Everything that decides what the rows are.

        Not ``batch_tokens``, which only moves rounding: whoever runs out of memory may lower it and go on.
        """
        generation = self.config.generation
        return {
            "target": {"fingerprint": self.spec.fingerprint, "dtype": self.config.target.dtype},
            "tokenizer": self._tokenizer_digests,
            "chat_template_kwargs": self.config.target.chat_template_kwargs,
            "engine": generation.engine,
            "sampling": asdict(stage.params),
            "seed": self.config.seed if stage.params.temperature > 0 else None,  # greedy answers have no seed
            "prompts": {
                "sha256": prompts_digest(stage.prompts),
                "count": len(stage.prompts),
                "max_tokens": generation.max_prompt_tokens,
            },
            "rows_per_shard": rows_per_shard(len(stage.prompts), at_most=generation.rows_per_shard),
        }


def rows_per_shard(num_prompts: int, *, at_most: int) -> int:
    """Prompts of one shard: few enough for every rank to get shards, and never below a batch or two.

    Depends on the number of prompts, not of ranks, which must not decide what is in a file.
    """
    return min(at_most, max(-(-num_prompts // MIN_SHARDS), SMALLEST_SHARD))


def _encode(stage: Stage, prompt: Prompt) -> list[int]:
    try:
        return stage.encode(prompt)
    except ValueError as error:
        raise ConfigError(f"prompt {prompt.id!r} of {prompt.source!r}: {error}") from error


def _shard_seed(seed: int, stage: str, shard: int) -> int:
    """A seed for each shard, so that it does not matter which rank makes it, or after which other."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{stage}/{shard}".encode()).digest()[:8]) >> 1  # fits int64


def _summary(manifest: Manifest) -> str:
    too_long = manifest.num_prompts - manifest.num_rows
    shares = ", ".join(f"{reason} {count / max(manifest.num_rows, 1):.0%}"
                       for reason, count in manifest.finish_reasons.items())
    return (f"{manifest.num_rows} rows{f' ({too_long} prompts were too long)' if too_long else ''}, "
            f"{manifest.num_loss_tokens} response tokens; {shares}")

"""One stage of generation: a list of prompts becomes a folder of rows, on any number of ranks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import PartialState
from tqdm import tqdm

from data_gen.answers import Generate, Progress
from data_gen.claims import Claims
from data_gen.engines import Completion, Engine, Rejected, SamplingParams, build_engine
from data_gen.prompts import Prompt
from data_gen.rows import ShardRows, Skipped
from data_gen.shards import REJECTED_FILE, Manifest, ShardWriter
from specvocab_model.chat_template import check_template_kwargs, tokenizer_digests
from specvocab_model.config import Config, ConfigError
from specvocab_model.target import load_spec_and_tokenizer

MIN_SHARDS = 64  # where there are prompts enough: a rank without a shard has nothing to do
SMALLEST_SHARD = 64  # prompts
RowWriter = Callable[[Sequence[Prompt], Generate, Progress], ShardRows]  # makes the rows of a shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What is to be made: the rows of some prompts."""

    name: str
    folder: Path
    prompts: Sequence[Prompt]
    prompts_sha256: str
    write: RowWriter
    params: SamplingParams | None  # None: nothing is generated, so no engine is loaded
    stop_token_ids: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)  # what else decides about the rows
    collected: dict[str, int] = field(default_factory=dict)  # how the prompts were chosen, for the manifest


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
        if config.generation.thinking_share is not None:
            check_template_kwargs(self.tokenizer, {"enable_thinking": True}, "generation.thinking_share")
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
            stop_token_ids=stage.stop_token_ids,
            collected=stage.collected,
        )
        finished_before = writer.open()
        # Another launcher may finish the folder while ranks of this one look, so all of them wait equally often.
        missing = writer.missing_shards()
        if stage.params is not None and self.state.process_index < len(missing):
            _ = self.engine  # loaded outside the time that is measured, and before a shard is claimed
        self.state.wait_for_everyone()
        start = time.monotonic()
        if finished_before is None:
            self._fill(stage, writer)
        self.state.wait_for_everyone()
        seconds = time.monotonic() - start
        if finished_before is not None:
            self.report(f"{stage.name}: {_summary(finished_before)}; finished before, in {stage.folder}")
        elif self.state.is_main_process:  # processes that were started apart all do this, and write the same
            check_rejected_share(writer.skipped(), len(stage.prompts), self.config)
            manifest = writer.finalise()
            num_tokens = sum(manifest.shards[index].num_loss_tokens for index in missing)
            self.report(f"{stage.name}: {_summary(manifest)}; {num_tokens / seconds:.0f} tokens/s, in {stage.folder}")
        self.state.wait_for_everyone()
        finished = writer.open()
        assert finished is not None
        return self._not_empty(stage, finished)

    def _not_empty(self, stage: Stage, manifest: Manifest) -> Manifest:
        """Raises ConfigError if there were prompts and none became a row."""
        if stage.prompts and not manifest.num_rows:
            limits = self.config.generation
            raise ConfigError(f"none of the {len(stage.prompts)} {stage.name} prompts became a row: "
                              f"{_counts(manifest.skipped)} (generation.max_prompt_tokens={limits.max_prompt_tokens}); "
                              f"mend that and remove {stage.folder}")
        return manifest

    def _fill(self, stage: Stage, writer: ShardWriter) -> None:
        """Make missing shards until none is left; other ranks, processes and nodes do so at the same time.

        Raises:
            ConfigError: more prompts were rejected than ``generation.max_rejected_share`` allows.
        """
        with (Claims(writer.folder) as claims,
              tqdm(total=_num_prompts(writer), desc=stage.name, unit=" prompts", smoothing=0.05,
                   disable=not self.state.is_main_process) as progress):
            for index in claims.shards(writer.missing_shards, first=self.state.process_index):
                prompts = stage.prompts[writer.prompt_range(index)]
                shard = self._rows(stage, prompts, index, progress)
                check_rejected_share([*writer.skipped(), *shard.skipped], len(stage.prompts), self.config)
                writer.write(index, shard.rows, shard.skipped)
                progress.n = progress.total - _num_prompts(writer)  # with what the others have made
                progress.refresh()

    def _rows(self, stage: Stage, prompts: Sequence[Prompt], shard: int, progress: tqdm) -> ShardRows:
        """What the prompts of one shard become.

        Raises:
            ConfigError: the engine gave up more of the shard's prompts than ``generation.max_rejected_share`` allows.
                Nothing of it is written, because a later start may have better luck.
        """
        given_up: list[Rejected] = []

        def generate(prompt_ids: list[list[int]], turn: int) -> Iterator[tuple[int, Completion | Rejected]]:
            assert stage.params is not None
            seed = _shard_seed(self.config.seed, stage.name, shard, turn)
            for index, completion in self.engine.generate(prompt_ids, stage.params, seed=seed):
                if isinstance(completion, Rejected):
                    given_up.append(completion)
                yield index, completion

        rows = stage.write(prompts, generate, progress.update)
        share = self.config.generation.max_rejected_share
        if len(given_up) > share * len(prompts):
            raise ConfigError(f"the engine gave up {len(given_up)} of {len(prompts)} prompts, more than "
                              f"generation.max_rejected_share={share}; the last: {given_up[-1].reason} "
                              f"({given_up[-1].detail}). See to it and start again: what is finished is kept")
        return rows

    def _settings(self, stage: Stage) -> dict[str, Any]:
        """Everything that decides what the rows are.

        Not ``batch_tokens``, which moves rounding and, on a CPU, what is drawn for whom: whoever runs out of memory may
        lower it and go on.
        """
        generation = self.config.generation
        made_by: dict[str, Any] = {} if stage.params is None else {
            "engine": generation.engine,
            "sampling": asdict(stage.params),
            "seed": self.config.seed if stage.params.temperature > 0 else None,  # greedy answers have no seed
        }
        return {
            "target": {"fingerprint": self.spec.fingerprint, "dtype": self.config.target.dtype},
            "tokenizer": self._tokenizer_digests,
            "chat_template_kwargs": self.config.target.chat_template_kwargs,
            **made_by,
            **stage.settings,
            "prompts": {
                "sha256": stage.prompts_sha256,
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


def _num_prompts(writer: ShardWriter) -> int:
    """Prompts of the missing shards."""
    ranges = map(writer.prompt_range, writer.missing_shards())
    return sum(prompts.stop - prompts.start for prompts in ranges)


def check_rejected_share(skipped: Sequence[Skipped], num_prompts: int, config: Config) -> None:
    """
    Args:
        skipped: all of a stage so far, whichever process skipped them; those by choice do not count.

    Raises:
        ConfigError: more than ``generation.max_rejected_share`` of all prompts were rejected.
    """
    share = config.generation.max_rejected_share
    rejected = [each for each in skipped if not each.by_choice]
    num_rejected = len({each.id for each in rejected})  # prompts, of which several turns may be rejected
    if num_rejected > share * num_prompts:
        last = rejected[-1]
        raise ConfigError(f"{num_rejected} of {num_prompts} prompts were rejected, more than "
                          f"generation.max_rejected_share={share}; the last is {last.id!r}: {last.reason} "
                          f"({last.detail}). Mend them, or raise the share")


def _shard_seed(seed: int, stage: str, shard: int, turn: int) -> int:
    """A seed for each shard and turn, so that it does not matter which rank makes it, or after which other."""
    name = f"{seed}/{stage}/{shard}" + (f"/{turn}" if turn else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1  # fits int64


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in counts.items())


def _summary(manifest: Manifest) -> str:
    shares = ", ".join(f"{reason} {count / max(manifest.num_rows, 1):.0%}"
                       for reason, count in manifest.finish_reasons.items())
    skipped = f" (skipped: {_counts(manifest.skipped)}; see {REJECTED_FILE})" if manifest.skipped else ""
    return f"{manifest.num_rows} rows{skipped}, {manifest.num_loss_tokens} response tokens; {shares}"

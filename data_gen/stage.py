"""One stage of generation: a list of prompts becomes a folder of rows, on any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import PartialState
from tqdm import tqdm

from data_gen.claims import Claims
from data_gen.engines import Engine, SamplingParams, build_engine
from data_gen.open_shards import POLL_S, OpenShards, RowWriter, check_rejected_share, num_missing_prompts
from data_gen.prompts import Prompt
from data_gen.shards import REJECTED_FILE, Manifest, ShardWriter
from specvocab_model.chat_template import check_template_kwargs, tokenizer_digests
from specvocab_model.config import Config, ConfigError
from specvocab_model.target import load_spec_and_tokenizer

MIN_SHARDS = 64  # where there are prompts enough: a rank without a shard has nothing to do
SMALLEST_SHARD = 64  # prompts


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
        state = self.state
        with (Claims(writer.folder) as claims,
              tqdm(total=num_missing_prompts(writer), desc=stage.name, unit=" prompts", smoothing=0.05,
                   disable=not state.is_main_process) as progress):
            shards = OpenShards(
                self.config, stage=stage.name, prompts=stage.prompts, write=stage.write, writer=writer, claims=claims,
                progress=progress, rank=state.process_index, num_ranks=state.num_processes,
            )
            while writer.missing_shards():
                if not shards.begin():  # others are making what is left; they may die
                    time.sleep(POLL_S)
                    continue
                assert stage.params is not None
                with closing(self.engine.stream(shards.next_batch, stage.params)) as finished:
                    for batch, index, completion in finished:
                        shards.take(batch, index, completion)
                shards.check_answered()

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


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in counts.items())


def _summary(manifest: Manifest) -> str:
    shares = ", ".join(f"{reason} {count / max(manifest.num_rows, 1):.0%}"
                       for reason, count in manifest.finish_reasons.items())
    skipped = f" (skipped: {_counts(manifest.skipped)}; see {REJECTED_FILE})" if manifest.skipped else ""
    return f"{manifest.num_rows} rows{skipped}, {manifest.num_loss_tokens} response tokens; {shares}"

"""Magpie: prompts that the target invents itself (Xu et al. 2024, https://arxiv.org/abs/2406.08464).

Given its chat template up to where a user's words begin, an instruct model writes what a user would say. No data set is
needed, and the questions are of the kind that the target was tuned on. A base model begins texts from BOS instead.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_gen.chat import UserTurn, user_turn
from data_gen.engines import Completion, Rejected, SamplingParams
from data_gen.open_shards import Progress, ShardWork
from data_gen.prompts import Prompt, prompts_digest
from data_gen.rows import Row, ShardRows, Skipped
from data_gen.shards import load_rows
from data_gen.stage import Stage, StageRunner
from specvocab_model.config import ConfigError

MIN_TOKENS = 4  # less is no question


def invent_prompts(runner: StageRunner) -> tuple[list[Prompt], Counter[str]]:
    """Sample ``generation.magpie_prompts`` user turns; as ``invented_prompts`` returns them.

    Raises:
        ConfigError: the chat template does not allow it.
    """
    config = runner.config
    try:
        turn = user_turn(runner.tokenizer, config.target.chat_template_kwargs)
    except ValueError as error:
        raise ConfigError(f"generation.magpie_prompts={config.generation.magpie_prompts}: {error}; "
                          "set it to 0 and give generation.prompt_files") from error
    stage = magpie_stage(runner, turn)
    runner.run(stage)
    return invented_prompts(load_rows(stage.folder), turn, runner.tokenizer)


def magpie_stage(runner: StageRunner, turn: UserTurn) -> Stage:
    """Rows of what the user says, in a folder beside the training data."""
    config = runner.config
    train_path = Path(config.data.train_path)
    prompts = [Prompt(id=f"magpie-{index:07d}", source="magpie", category="magpie", messages=())
               for index in range(config.generation.magpie_prompts)]
    stop_token_ids = turn.stop_token_ids(runner.spec.eos_token_ids)

    return Stage(
        name="magpie",
        folder=train_path.with_name(f"{train_path.name}-magpie"),
        prompts=prompts,
        prompts_sha256=prompts_digest((prompt.id, prompt.digest) for prompt in prompts),
        write=partial(InventionWriter, turn, runner.tokenizer),
        params=SamplingParams(
            max_new_tokens=config.generation.magpie_max_new_tokens,
            stop_token_ids=stop_token_ids,
            temperature=config.generation.magpie_temperature,
        ),
        stop_token_ids=stop_token_ids,
    )


class InventionWriter(ShardWork):
    """Has the target write what a user says first."""

    def __init__(
        self, turn: UserTurn, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], progress: Progress
    ) -> None:
        self.header_ids = turn.header_ids
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.progress = progress
        self._completions: dict[int, Completion | Rejected] = {}

    def ask(self) -> Iterator[list[list[int]]]:
        if not self._completions:
            yield [self.header_ids] * len(self.prompts)

    def take(self, index: int, completion: Completion | Rejected) -> None:
        self._completions[index] = completion
        self.progress()

    def rows(self) -> ShardRows:
        result = ShardRows()
        for index, prompt in enumerate(self.prompts):
            completion = self._completions[index]
            if isinstance(completion, Rejected):
                result.skipped.append(Skipped(id=prompt.id, turn=1, reason=completion.reason,
                                              detail=completion.detail))
            else:
                result.rows.append(self._row(prompt, completion))
        return result

    def _row(self, prompt: Prompt, completion: Completion) -> Row:
        ids = completion.token_ids
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        return Row(
            id=prompt.id,
            source=prompt.source,
            input_ids=self.header_ids + ids,
            loss_mask=[0] * len(self.header_ids) + [1] * len(ids),
            finish_reason=completion.finish_reason,
            messages=[{"role": "user", "content": text}],
        )


def invented_prompts(
    rows: Iterable[dict[str, Any]], turn: UserTurn, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], Counter[str]]:
    """The usable user turns among the rows of a Magpie stage, and how many were dropped for which reason."""
    prompts: list[Prompt] = []
    dropped: Counter[str] = Counter()
    for row in rows:
        words = turn.words(json.loads(row["messages"])[-1]["content"], row["finish_reason"])
        if words is None:
            dropped["unfinished"] += 1
        elif len(tokenizer(words, add_special_tokens=False)["input_ids"]) < MIN_TOKENS:
            dropped["too short"] += 1
        else:
            prompts.append(Prompt(id=row["id"], source="magpie", category="magpie",
                                  messages=({"role": "user", "content": words},)))
    return prompts, dropped

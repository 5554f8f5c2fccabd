"""Prompts that a draft is measured on: not trained on, and short enough to be answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from data_gen.chat import encode_prompt
from data_gen.prompts import Prompt, question
from data_gen.shards import MANIFEST_FILE, load_rows
from specvocab_model.config import Config, ConfigError
from specvocab_model.evaluation import EvalPrompt
from specvocab_model.target import Target


def check_held_out(prompts: Sequence[Prompt], config: Config) -> None:
    """Compare with the conversations of the training data, where they are on this machine.

    Raises:
        ConfigError: a prompt is one that the draft was trained on.
    """
    train_path = config.data.train_path
    if not Path(train_path, MANIFEST_FILE).is_file():
        print(f"data.train_path={train_path} is not here: not checked that the prompts were not trained on")
        return
    trained_on = {question(json.loads(messages)) for messages in load_rows(train_path)["messages"] if messages}
    known = [prompt.id for prompt in prompts if question(prompt.messages) in trained_on]
    if known:
        raise ConfigError(f"{len(known)} of {len(prompts)} prompts of eval.prompts={config.eval.prompts!r} are in the "
                          f"training data {train_path} (first: {known[0]!r}); a fair measure needs others. Data that "
                          "are generated with these eval.prompts leave them out")


def as_tokens(target: Target, prompt: Prompt, config: Config, draft_positions: int) -> EvalPrompt:
    """The prompt as ids, turn by turn.

    Raises:
        ConfigError: the target's chat template refuses the conversation, or the last answer may not fit into the
            positions of target and draft: beyond them nothing is drafted, and the measure would not say so.
    """

    def encode_turn(answers: Sequence[str]) -> list[int]:
        return encode_prompt(target.tokenizer, prompt.conversation(answers), config.target.chat_template_kwargs,
                             prompt.tools)

    try:
        num_tokens = len(encode_turn([""] * (prompt.num_turns - 1)))  # before the first is decoded
    except ValueError as error:
        raise ConfigError(f"prompt {prompt.id!r} cannot be put to {target.spec.name}: {error}") from error
    longest = num_tokens + prompt.num_turns * config.eval.max_new_tokens
    positions = min(target.spec.max_position_embeddings, draft_positions)
    if longest > positions:
        raise ConfigError(f"prompt {prompt.id!r} of {num_tokens} tokens may with {prompt.num_turns} answers of up to "
                          f"eval.max_new_tokens={config.eval.max_new_tokens} need {longest} positions; there are "
                          f"{positions}: leave it out or lower eval.max_new_tokens")
    return EvalPrompt(id=prompt.id, category=prompt.category, num_turns=prompt.num_turns, encode_turn=encode_turn)

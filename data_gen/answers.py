"""Training rows of conversations: the target answers them anew, turn by turn, or their answers are kept.

Either way a turn is two lists of ids, the prompt as the chat template renders it and the response, and one rule makes
rows of the turns of a conversation (``rows_of``). No id is found by searching text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_gen.chat import encode_prompts
from data_gen.engines import Completion, Rejected
from data_gen.filters import repetition
from data_gen.open_shards import Progress, ShardWork
from data_gen.prompts import Message, Prompt, says_something
from data_gen.rows import Row, ShardRows, Skipped
from specvocab_model.chat_template import render
from specvocab_model.config import Config

TOO_LONG = "prompt too long"
ENCODED_AT_ONCE = 32  # prompts: together they take less time, and not so long that a GPU would wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer, and what the target read before it wrote it."""

    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str
    messages: list[Message]  # up to the answer itself


def rows_of(prompt: Prompt, turns: Sequence[Turn]) -> list[Row]:
    """One row for as many turns as continue each other id for id.

    Usually that is the whole conversation. Where the template rewrites what came before (Qwen3 drops earlier thoughts),
    a new row begins with the turn's prompt as the target really reads it, and only its own response is supervised.
    """
    rows: list[Row] = []
    for number, turn in enumerate(turns, start=1):
        row_id, mask = f"{prompt.id}#{number}", []
        if rows and turn.prompt_ids[: len(rows[-1].input_ids)] == rows[-1].input_ids:
            row_id, mask = rows[-1].id, rows.pop().loss_mask
        rows.append(Row(
            id=row_id,
            source=prompt.source,
            input_ids=turn.prompt_ids + turn.response_ids,
            loss_mask=mask + [0] * (len(turn.prompt_ids) - len(mask)) + [1] * len(turn.response_ids),
            finish_reason=turn.finish_reason,
            messages=turn.messages,
        ))
    return [replace(rows[0], id=prompt.id)] if len(rows) == 1 else rows


def template_kwargs(config: Config, prompt_id: str) -> dict[str, Any]:
    """The chat template's variables for one prompt: its id alone decides whether the target thinks."""
    share = config.generation.thinking_share
    if share is None:
        return config.target.chat_template_kwargs
    draw = int.from_bytes(hashlib.sha256(f"thinking {prompt_id}".encode()).digest()[:8]) / 2**64
    return config.target.chat_template_kwargs | {"enable_thinking": draw < share}


class AnswerChecks:
    """The limits of ``generation`` that decide which turns become rows."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self.generation = config.generation
        self.num_tokens = len(tokenizer)

    def prompt(self, prompt_ids: Sequence[int]) -> tuple[str, str] | None:
        """Why a prompt is not put to the target, as (reason, detail)."""
        limit = self.generation.max_prompt_tokens
        if len(prompt_ids) > limit:
            return TOO_LONG, f"{len(prompt_ids)} tokens, at most generation.max_prompt_tokens={limit}"
        return None

    def response(self, response_ids: Sequence[int]) -> tuple[str, str] | None:
        """Why a response is not trained on, as (reason, detail)."""
        generation = self.generation
        if len(response_ids) < generation.min_response_tokens:
            return "answer too short", f"{len(response_ids)} tokens, at least {generation.min_response_tokens}"
        if len(response_ids) > generation.max_new_tokens:
            return "answer too long", f"{len(response_ids)} tokens, at most {generation.max_new_tokens}"
        if generation.max_repetition is not None and (share := repetition(response_ids)) > generation.max_repetition:
            return "repetitive answer", f"{share:.2f} of its n-grams repeat others, at most {generation.max_repetition}"
        return None


@dataclass(slots=True)
class _Conversation:
    """How far one prompt is."""

    prompt: Prompt
    turns: list[Turn] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    skipped: Skipped | None = None  # why it ends before its last turn

    @property
    def goes_on(self) -> bool:
        return self.skipped is None and len(self.turns) < self.prompt.num_turns

    def end(self, reason: str, detail: str, *, by_choice: bool) -> None:
        self.skipped = Skipped(
            id=self.prompt.id, turn=len(self.turns) + 1, reason=reason, detail=detail, by_choice=by_choice
        )


class AnswerWriter(ShardWork):
    """Has the target write every answer of a conversation, each on top of those that it wrote before.

    All first turns are one round, all second ones the next.
    """

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], progress: Progress
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.checks = AnswerChecks(config, tokenizer)
        self.progress = progress
        self.conversations = [_Conversation(prompt) for prompt in prompts]
        self._asked: list[tuple[_Conversation, list[int]]] = []

    def ask(self) -> Iterator[list[list[int]]]:
        going_on = [conversation for conversation in self.conversations if conversation.goes_on]
        self._asked = []
        for start in range(0, len(going_on), ENCODED_AT_ONCE):
            part = going_on[start : start + ENCODED_AT_ONCE]
            asked = list(self._encoded(part))
            for _ in range(len(part) - len(asked)):
                self.progress()
            self._asked += asked
            yield [ids for _, ids in asked]

    def take(self, index: int, completion: Completion | Rejected) -> None:
        conversation, ids = self._asked[index]
        self._take(conversation, ids, completion)
        if not conversation.goes_on:
            self.progress()

    def rows(self) -> ShardRows:
        return ShardRows(
            rows=[row for conversation in self.conversations for row in rows_of(conversation.prompt,
                                                                                conversation.turns)],
            skipped=[each.skipped for each in self.conversations if each.skipped is not None],
        )

    def _encoded(self, conversations: Sequence[_Conversation]) -> Iterator[tuple[_Conversation, list[int]]]:
        """The conversations with the ids of their next prompts; those that end here are left out."""
        for (kwargs, tools), group in groupby(conversations, lambda each: (
                template_kwargs(self.config, each.prompt.id), each.prompt.tools)):
            alike = list(group)
            messages = [each.prompt.conversation(each.answers) for each in alike]
            for conversation, ids in zip(alike, encode_prompts(self.tokenizer, messages, kwargs, tools), strict=True):
                if isinstance(ids, ValueError):
                    conversation.end("refused by the chat template", str(ids), by_choice=False)
                elif problem := self.checks.prompt(ids):
                    conversation.end(*problem, by_choice=True)
                else:
                    yield conversation, ids

    def _take(self, conversation: _Conversation, prompt_ids: list[int], completion: Completion | Rejected) -> None:
        if isinstance(completion, Rejected):
            conversation.end(completion.reason, completion.detail, by_choice=False)
            return
        ids = completion.token_ids
        if unknown := [token for token in ids if token >= self.checks.num_tokens]:
            conversation.end("id beyond the tokenizer", f"{unknown[0]}, of {self.checks.num_tokens} tokens",
                             by_choice=False)
            return
        if problem := self.checks.response(ids):
            conversation.end(*problem, by_choice=True)
            return
        # As servers decode it. What the tokenizer's "clean up" would make of it is not what the target wrote.
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        asked = conversation.prompt.conversation(conversation.answers)
        conversation.turns.append(Turn(
            prompt_ids=prompt_ids,
            response_ids=ids,
            finish_reason=completion.finish_reason,
            messages=[*asked, {"role": "assistant", "content": text}],
        ))
        conversation.answers.append(text)
        if completion.finish_reason == "length" and conversation.goes_on:
            conversation.end("answer cut", "later turns would stand on half an answer", by_choice=True)


class AnswerKeeper(ShardWork):
    """Takes the answers that a conversation already has, with masks from the boundaries of the chat template."""

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int],
        prompts: Sequence[Prompt], progress: Progress,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.stop_token_ids = frozenset(stop_token_ids)
        self.checks = AnswerChecks(config, tokenizer)
        self.prompts = prompts
        self.progress = progress

    def rows(self) -> ShardRows:
        result = ShardRows()
        for prompt in self.prompts:
            turns, skipped = self.turns(prompt)
            result.rows += rows_of(prompt, turns)
            result.skipped += skipped
            self.progress()
        return result

    def turns(self, prompt: Prompt) -> tuple[list[Turn], list[Skipped]]:
        """The answers whose place in the rendered conversation is certain, and what is wrong with the others."""
        turns: list[Turn] = []
        skipped: list[Skipped] = []
        messages = prompt.messages
        asked = False
        number = 0
        for place, message in enumerate(messages):
            asked = asked or message["role"] == "user"
            if not asked or not says_something(message):
                continue
            number += 1
            try:
                prompt_ids, response_ids = self._split(prompt, messages[: place + 1])
            except ValueError as error:
                skipped.append(Skipped(id=prompt.id, turn=number, reason="mask not exact", detail=str(error)))
                continue
            if problem := self.checks.prompt(prompt_ids) or self.checks.response(response_ids):
                reason, detail = problem
                skipped.append(Skipped(id=prompt.id, turn=number, reason=reason, detail=detail, by_choice=True))
                continue
            turns.append(Turn(prompt_ids=prompt_ids, response_ids=response_ids, finish_reason="stop",
                              messages=list(messages[: place + 1])))
        return turns, skipped

    def _split(self, prompt: Prompt, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Ids in front of the last message, and those of it that the target would write: up to its stop token.

        Raises:
            ValueError: the template refuses the messages, or does not say where the answer begins or ends.
        """
        kwargs = template_kwargs(self.config, prompt.id)
        prompt_ids = render(self.tokenizer, messages[:-1], kwargs, tools=prompt.tools)
        whole = render(self.tokenizer, messages, kwargs, tools=prompt.tools, continued=False)
        if whole[: len(prompt_ids)] != prompt_ids:
            raise ValueError("the ids in front of the answer change when the answer is there")
        rest = whole[len(prompt_ids) :]
        stops = [place for place, token in enumerate(rest) if token in self.stop_token_ids]
        if len(stops) != 1:
            raise ValueError(f"{len(stops)} stop tokens in and after the answer, expected one")
        return prompt_ids, rest[: stops[0] + 1]

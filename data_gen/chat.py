"""Conversations as token ids, and what a target's chat template says about where a user's turn begins and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_gen.prompts import Message
from specvocab_model.chat_template import check_template_kwargs, render, render_all

SENTINEL = "specvocab-user-content"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTurn:
    """The template around the content of a first user message."""

    header_ids: list[int]  # everything in front of it, a default system message included
    end_text: str  # what stands right after it: a special token, or the line that names the next speaker
    end_token_id: int | None  # the id of that special token; None where the end is ordinary text

    def stop_token_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Where to stop a continuation of ``header_ids``. Ordinary text stops nothing: it is cut by ``words``."""
        own = () if self.end_token_id is None else (self.end_token_id,)
        return tuple(dict.fromkeys((*own, *eos_token_ids)))

    def words(self, text: str, finish_reason: str) -> str | None:
        """What the user says in ``text``, a continuation of ``header_ids``; None if its end was not reached."""
        words, end, _ = text.partition(self.end_text)
        return words.strip() if end or finish_reason == "stop" else None


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins.

    Without a chat template (a base model) it is plain text that the target goes on with: the contents, a blank line
    between each two, behind BOS if the tokenizer puts one in front of a text.

    Args:
        template_kwargs: variables of the chat template (``target.chat_template_kwargs``).
        tools: definitions of the tools that the assistant may call.

    Raises:
        ValueError: the chat template refuses the conversation, does not know one of the variables, or is missing where
            tools have to be described.
    """
    check_template_kwargs(tokenizer, template_kwargs or {})
    if tokenizer.chat_template is None:
        if tools:
            raise ValueError("tools are described by a chat template, and this tokenizer has none")
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    return render(tokenizer, messages, template_kwargs, tools=tools)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Message]],
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[list[int] | ValueError]:
    """``encode_prompt`` of each conversation, together; where it is refused, the error that says why."""
    if tokenizer.chat_template is not None:
        with suppress(ValueError):  # of any of them; which one, and why, is found below
            check_template_kwargs(tokenizer, template_kwargs or {})
            return list(render_all(tokenizer, conversations, template_kwargs, tools=tools))
    encoded: list[list[int] | ValueError] = []
    for messages in conversations:
        try:
            encoded.append(encode_prompt(tokenizer, messages, template_kwargs, tools))
        except ValueError as error:
            encoded.append(error)
    return encoded


def user_turn(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> UserTurn:
    """What surrounds a user's words in the chat template, found by rendering a sentinel in their place.

    A model that continues ``header_ids`` invents what a user would say (Magpie, Xu et al. 2024,
    https://arxiv.org/abs/2406.08464). Without a template (a base model) it begins a text after BOS, and the first line
    is taken for what is to be continued.

    Raises:
        ValueError: there is neither a template nor a BOS, the template does not keep the user's words as they are, or
            nothing in it ends the turn.
    """
    if tokenizer.chat_template is None:
        beginning = tokenizer("")["input_ids"]
        if not beginning:
            raise ValueError("inventing prompts needs a chat template, or a BOS that a text begins with, and this "
                             "tokenizer has neither")
        return UserTurn(header_ids=beginning, end_text="\n", end_token_id=None)
    rendered = render(tokenizer, [{"role": "user", "content": SENTINEL}], template_kwargs, tokenize=False)
    parts = rendered.split(SENTINEL)
    if len(parts) != 2:
        raise ValueError(f"the chat template shows a user's words {len(parts) - 1} times instead of once")
    # A space in front of the content belongs to the content's first token ("[INST] Hello" is "[INST]", " Hello").
    header = tokenizer(parts[0].rstrip(" "), add_special_tokens=False)["input_ids"]
    footer = parts[1].strip()
    if not footer:
        raise ValueError(f"the chat template ends a user turn with {parts[1]!r}: nothing tells where the answer begins")
    first = tokenizer(footer, add_special_tokens=False)["input_ids"][0]
    if first in tokenizer.added_tokens_decoder:
        return UserTurn(header_ids=header, end_text=tokenizer.added_tokens_decoder[first].content, end_token_id=first)
    return UserTurn(header_ids=header, end_text=footer.splitlines()[0], end_token_id=None)

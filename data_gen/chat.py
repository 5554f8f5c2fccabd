"""Conversations as token ids, and what a target's chat template says about where a user's turn begins and ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data_gen.prompts import Message

SENTINEL = "specvocab-user-content"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTurn:
    """The template around the content of a first user message."""

    header_ids: list[int]  # everything in front of it, a default system message included
    end_token_id: int  # the special token right after it


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins.

    A tokenizer without a chat template (a base model) gets the contents as plain text, and adds BOS if it does so.

    Raises:
        ValueError: the chat template refuses the conversation.
    """
    if tokenizer.chat_template is None:
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    try:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses roles {[message['role'] for message in messages]}: "
                         f"{error}") from error
    return cast(list[int], ids)


def user_turn(tokenizer: PreTrainedTokenizerBase) -> UserTurn:
    """What surrounds a user's words in the chat template, found by rendering a sentinel in their place.

    A model that continues ``header_ids`` invents what a user would say (Magpie, Xu et al. 2024,
    https://arxiv.org/abs/2406.08464).

    Raises:
        ValueError: there is no template, it does not keep the user's words as they are, or it ends the turn with
            ordinary text, which a user might write as well.
    """
    if tokenizer.chat_template is None:
        raise ValueError("inventing user turns needs a chat template, and this tokenizer has none")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": SENTINEL}], tokenize=False)
    parts = cast(str, rendered).split(SENTINEL)
    if len(parts) != 2:
        raise ValueError(f"the chat template shows a user's words {len(parts) - 1} times instead of once")
    # A space in front of the content belongs to the content's first token ("[INST] Hello" is "[INST]", " Hello").
    header = tokenizer(parts[0].rstrip(" "), add_special_tokens=False)["input_ids"]
    footer = tokenizer(parts[1], add_special_tokens=False)["input_ids"]
    if not footer or footer[0] not in tokenizer.added_tokens_decoder:
        raise ValueError(f"the chat template ends a user turn with {parts[1]!r}, not with a special token")
    return UserTurn(header_ids=header, end_token_id=footer[0])


def tokenizer_digests(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Hashes of the vocabulary and of the chat template, which any version of the libraries computes alike."""
    parts: dict[str, Any] = {
        "vocabulary_sha256": tokenizer.get_vocab(),
        "chat_template_sha256": tokenizer.chat_template,
    }
    return {name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest() for name, part in parts.items()}

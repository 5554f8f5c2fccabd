"""What a target's chat template makes of a conversation: the ids that the served model sees."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from specvocab_model.config import ConfigError

TODAY = date(2026, 1, 1)  # for templates that write the date: the same data tomorrow, and on the other side of midnight
PROBE = ({"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello to you."},
         {"role": "user", "content": "How are you?"})


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    continued: bool = True,
    tokenize: bool = True,
) -> Any:
    """A conversation as the template writes it: ids, or text if not ``tokenize``.

    Args:
        template_kwargs: variables of the chat template (``target.chat_template_kwargs``).
        tools: definitions of the tools that the assistant may call.
        continued: end where an answer of the assistant begins.

    Raises:
        ValueError: the chat template refuses the conversation.
    """
    try:
        return _apply(tokenizer, list(messages), template_kwargs, tools, continued, tokenize)
    except (TemplateError, TypeError) as error:  # the second: a template that expects another kind of value
        raise ValueError(f"the chat template refuses roles {[message['role'] for message in messages]}: "
                         f"{error}") from error


def render_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[list[int]]:
    """The ids of what ``render`` makes of each conversation, tokenised together, which takes half the time.

    Raises:
        ValueError: the chat template refuses one of them; ``render`` says why.
    """
    if not all(conversations):
        raise ValueError("a conversation is empty")
    try:
        return _apply(tokenizer, [list(messages) for messages in conversations], template_kwargs, tools, True, True)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses a conversation: {error}") from error


def _apply(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Any], template_kwargs: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]], continued: bool, tokenize: bool,
) -> Any:
    definitions: list[Any] | None = list(tools) or None
    return tokenizer.apply_chat_template(
        conversation, tools=definitions, tokenize=tokenize, add_generation_prompt=continued,
        chat_template=_dated(tokenizer.get_chat_template(tools=definitions)), return_dict=False,
        **(template_kwargs or {}),
    )


def _dated(chat_template: str) -> str:
    """The template with ``TODAY`` where it asks for the date (``strftime_now('%d %B %Y')``)."""
    return re.sub(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""", lambda call: repr(TODAY.strftime(call[2])), chat_template)


def check_template_kwargs(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any], setting: str = "target.chat_template_kwargs"
) -> None:
    """
    Args:
        setting: where the variables come from, for the error message.

    Raises:
        ConfigError: the chat template never mentions one of the variables; rendering would ignore it.
    """
    for name in template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template or "")):
            raise ConfigError(f"{setting} sets {name!r}, which the target's chat template never reads; "
                              "remove it, or look for its right name in the template")


def renders_alike(
    tokenizer: PreTrainedTokenizerBase, first: Mapping[str, Any] | None, second: Mapping[str, Any] | None
) -> bool:
    """Whether two sets of template variables give the same ids for a conversation that waits for an answer."""
    if tokenizer.chat_template is None:
        return True
    return render(tokenizer, PROBE, first) == render(tokenizer, PROBE, second)


def tokenizer_digests(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Hashes of the vocabulary and of the chat template, which any version of the libraries computes alike."""
    parts: dict[str, Any] = {
        "vocabulary_sha256": tokenizer.get_vocab(),
        "chat_template_sha256": tokenizer.chat_template,
    }
    return {name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest() for name, part in parts.items()}

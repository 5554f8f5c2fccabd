"""Prompts: what the target is asked, read from jsonl files.

A line is one of

    {"messages": [{"role": "user", "content": "..."}, ...]}
    {"prompt": "..."}
    {"question_id": 81, "category": "writing", "turns": ["...", "..."]}      Spec-Bench, MT-Bench

with ``id``, ``source`` and ``category`` as optional extras of each. Imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specvocab_model.config import ConfigError

Message = dict[str, str]  # {"role": ..., "content": ...}
ROLES = ("system", "user", "assistant")
ID_DIGITS = 16  # 64 bits: no two of a billion prompts are likely to share an id


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A conversation whose next message is the target's."""

    id: str
    source: str
    category: str
    messages: tuple[Message, ...]  # ends with a user message; earlier assistant messages are context
    follow_ups: tuple[str, ...] = ()  # what the user says after each further answer

    @property
    def num_turns(self) -> int:
        return 1 + len(self.follow_ups)

    @property
    def digest(self) -> str:
        """Hash of what is asked, whatever the prompt is called."""
        asked = json.dumps([self.messages, self.follow_ups], ensure_ascii=False)
        return hashlib.sha256(asked.encode(errors="surrogatepass")).hexdigest()

    def conversation(self, answers: Sequence[str] = ()) -> list[Message]:
        """The messages in front of turn ``len(answers)``, given the answers to the turns before it."""
        messages = list(self.messages)
        for answer, follow_up in zip(answers, self.follow_ups, strict=False):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
        return messages


def load_prompts(path: Path | str, limit: int | None = None) -> list[Prompt]:
    """Read a jsonl file; empty lines are skipped.

    Args:
        limit: read only so many prompts from its start.

    Raises:
        ConfigError: the file is missing or empty, or a line is no prompt; names the file and the line.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no prompt file {str(path)!r} (relative to {Path.cwd()})")
    prompts: list[Prompt] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if len(prompts) == limit:
                break
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    prompts.append(parse_prompt(json.loads(text), source=path.stem))
            except ValueError as error:  # the base of decoding and JSON errors too
                raise ConfigError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts


def parse_prompt(record: Any, source: str) -> Prompt:
    """Make a prompt of one decoded line.

    Args:
        source: where the record comes from, unless it says so itself.

    Raises:
        ValueError: the record is none of the known forms.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {type(record).__name__}")
    messages, follow_ups = _conversation(record)
    source = str(record.get("source", source))
    prompt = Prompt(
        id="",
        source=source,
        category=str(record.get("category", source)),
        messages=tuple(messages),
        follow_ups=tuple(follow_ups),
    )
    given = record.get("id", record.get("question_id"))
    prompt = replace(prompt, id=prompt.digest[:ID_DIGITS] if given is None else str(given))
    json.dumps(asdict(prompt), ensure_ascii=False).encode()  # half of a surrogate pair is no text: ValueError
    return prompt


def _conversation(record: dict[str, Any]) -> tuple[list[Message], list[str]]:
    forms = [key for key in ("messages", "prompt", "turns") if key in record]
    if len(forms) != 1:
        raise ValueError(f"expected exactly one of the keys messages, prompt and turns, got {sorted(record)}")
    if forms == ["messages"]:
        return _messages(record["messages"]), []
    turns = record["turns"] if forms == ["turns"] else [record["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{forms[0]} must hold non-empty text")
    return [{"role": "user", "content": turns[0]}], turns[1:]


def _messages(messages: Any) -> list[Message]:
    """Check ``messages`` and cut them after the last user message: the answer is to be the target's own."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of objects")
    for number, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise ValueError(f"messages[{number}] has role {message.get('role')!r}; known are {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"messages[{number}] has no text as content")
        if message["role"] == "user" and not message["content"].strip():
            raise ValueError(f"messages[{number}] is an empty user message")
    user_turns = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not user_turns:
        raise ValueError("messages has no user message")
    asked = messages[: user_turns[-1] + 1]
    return [{"role": message["role"], "content": message["content"]} for message in asked]


def unique_prompts(prompts: Iterable[Prompt]) -> tuple[list[Prompt], int]:
    """Drop prompts that ask the same as an earlier one; returns the others and how many were dropped.

    Raises:
        ConfigError: two different prompts have the same id.
    """
    digests: set[str] = set()
    kept: dict[str, Prompt] = {}
    num_dropped = 0
    for prompt in prompts:
        digest = prompt.digest
        if digest in digests:
            num_dropped += 1
            continue
        if prompt.id in kept:
            other = kept[prompt.id]
            raise ConfigError(f"two different prompts have the id {prompt.id!r} (sources {other.source!r} and "
                              f"{prompt.source!r}); ids must differ, or leave them out")
        digests.add(digest)
        kept[prompt.id] = prompt
    return list(kept.values()), num_dropped


def question(messages: Iterable[Message]) -> str:
    """What the user says in a conversation, whatever its case and white space, and whatever else is said."""
    said = (message["content"] for message in messages if message["role"] == "user")
    return "\n".join(" ".join(text.casefold().split()) for text in said)


def hold_out(prompts: Sequence[Prompt], evaluation: Iterable[Prompt]) -> tuple[list[Prompt], int]:
    """Drop prompts that ask what the first turn of an evaluation prompt asks; returns the others and how many."""
    held_out = {question(prompt.messages) for prompt in evaluation}
    kept = [prompt for prompt in prompts if question(prompt.messages) not in held_out]
    return kept, len(prompts) - len(kept)


def split_prompts(prompts: Iterable[Prompt], validation_fraction: float) -> tuple[list[Prompt], list[Prompt]]:
    """Split into training and validation prompts.

    The hash of its id alone decides about a prompt, so adding or removing others never moves it to the other side.
    """
    train: list[Prompt] = []
    validation: list[Prompt] = []
    for prompt in prompts:
        draw = int.from_bytes(hashlib.sha256(prompt.id.encode()).digest()[:8]) / 2**64  # uniform in [0, 1)
        (validation if draw < validation_fraction else train).append(prompt)
    return train, validation


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Hash of a list of prompts: of what they ask, their ids and their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{len(prompt.id)} {prompt.id} {prompt.digest}\n".encode())
    return digest.hexdigest()

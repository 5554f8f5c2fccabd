"""Prompts: what the target is asked, made from the records of a prompt file or data set.

A record is one of

    {"messages": [{"role": "user", "content": "..."}, ...]}                   chats, with "tools" if there are any
    {"conversations": [{"from": "human", "value": "..."}, ...]}               ShareGPT
    {"question_id": 81, "category": "writing", "turns": ["...", "..."]}       Spec-Bench, MT-Bench
    {"instruction": "...", "input": "...", "output": "..."}                   Alpaca
    {"prompt": "..."}                                                         with "response" or "completion" if known

with ``id``, ``source``, ``category`` and ``system`` (what a system message would say) as optional extras of each.
Imports neither torch nor transformers.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from specvocab_model.config import ConfigError

Message = dict[str, Any]  # {"role": ..., "content": ...}; tool calls and results have more
ID_DIGITS = 16  # 64 bits: no two of a billion prompts are likely to share an id
ROLES = {  # what the roles are called in other people's files
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool",
}
OPTIONAL_KEYS = ("name", "reasoning_content", "tool_call_id", "tool_calls")  # of a message
LONGEST_LINE = 64 * 2**20  # bytes; a line of more is no record but a damaged file, and should not fill the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A conversation with gaps where the target speaks."""

    id: str
    source: str
    category: str
    messages: tuple[Message, ...]  # what stands in front of its first answer
    follow_ups: tuple[tuple[Message, ...], ...] = ()  # what stands between one answer and the next
    tools: tuple[dict[str, Any], ...] = ()  # definitions, as the chat template takes them

    @property
    def num_turns(self) -> int:
        return 1 + len(self.follow_ups)

    @property
    def digest(self) -> str:
        """Hash of what is asked, whatever the prompt is called."""
        asked = [self.messages, self.follow_ups, *([self.tools] if self.tools else [])]
        return hashlib.sha256(json.dumps(asked, ensure_ascii=False).encode(errors="surrogatepass")).hexdigest()

    def conversation(self, answers: Sequence[str] = ()) -> list[Message]:
        """The messages in front of turn ``len(answers)``, given the answers to the turns before it."""
        messages = list(self.messages)
        for answer, follow_up in zip(answers, self.follow_ups, strict=False):
            messages += [{"role": "assistant", "content": answer}, *follow_up]
        return messages


def load_prompts(path: Path | str, limit: int | None = None) -> list[Prompt]:
    """Read a jsonl file of which every line must be a prompt; empty lines are skipped.

    Args:
        limit: read only so many prompts from its start.

    Raises:
        ConfigError: the file is missing or empty, or a line is no prompt; names the file and the line.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    for where, line in read_lines(path):
        if len(prompts) == limit:
            break
        try:
            prompts.append(parse_prompt(decode_line(line), source=path.stem))
        except ValueError as error:  # the base of decoding and JSON errors too
            raise ConfigError(f"{where}: {error}") from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file that are not empty, each with where it stands; a byte order mark is left out.

    Of a line longer than ``LONGEST_LINE`` comes so much that ``decode_line`` refuses it.

    Raises:
        ConfigError: there is no such file, or it cannot be read to its end.
    """
    if not path.is_file():
        raise ConfigError(f"there is no prompt file {str(path)!r} (relative to {Path.cwd()})")
    number = 0
    try:
        with opened(path) as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                rest = line
                while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
                    rest = file.readline(LONGEST_LINE + 1)
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield f"{path}, line {number}", line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read after {number} lines: {error or type(error).__name__}") from error


def opened(path: Path) -> BinaryIO | gzip.GzipFile:
    """A file for reading, unpacked where its name ends in .gz."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def decode_line(line: bytes) -> Any:
    """
    Raises:
        ValueError: the line is too long, not UTF-8, or not JSON.
    """
    if len(line) > LONGEST_LINE:
        raise ValueError(f"longer than {LONGEST_LINE} bytes")
    try:
        return json.loads(line.decode().strip())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_prompt(record: Any, source: str, *, keep: bool = False) -> Prompt:
    """Make a prompt of one decoded record.

    Args:
        source: where the record comes from, unless it says so itself.
        keep: keep the record's answers as context that ends with the last of them, instead of leaving gaps in their
            places.

    Raises:
        ValueError: the record is none of the known forms.
    """
    try:
        return _parsed(record, source, keep=keep)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _parsed(record: Any, source: str, *, keep: bool) -> Prompt:
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {type(record).__name__}")
    if None in record:  # csv.DictReader puts there what lies beyond the last column
        raise ValueError(f"more cells than columns: {record[None]}; quote cells that hold commas")
    turns = _whole_conversation(_conversation(record)) if keep else _with_gaps(_conversation(record))
    source = str(record.get("source") or source)
    prompt = Prompt(
        id="",
        source=source,
        category=str(record.get("category") or source),
        messages=tuple(turns[0]),
        follow_ups=tuple(map(tuple, turns[1:])),
        tools=tuple(_tools(record.get("tools"))),
    )
    given = next((record[key] for key in ("id", "question_id") if record.get(key) not in (None, "")), None)
    try:
        prompt = replace(prompt, id=prompt.digest[:ID_DIGITS] if given is None else str(given))
        json.dumps(asdict(prompt), ensure_ascii=False).encode()  # half of a surrogate pair is no text: ValueError
    except TypeError as error:
        raise ValueError(f"holds what JSON cannot: {error}") from error
    return prompt


def _conversation(record: dict[str, Any]) -> list[Message]:
    """All messages of a record, in the roles and keys that chat templates know."""
    for key, read in FORMS.items():  # columns of a table that the row does not use are null
        if record.get(key) is not None:
            messages = read(record[key], record)
            return messages if messages[0]["role"] == "system" else [*_system(record.get("system")), *messages]
    raise ValueError(f"expected one of the keys {', '.join(FORMS)}, got {sorted(map(str, record))}")


def _system(words: Any) -> list[Message]:
    if not isinstance(words, str | None):
        raise ValueError("system must be text")
    return [{"role": "system", "content": words}] if words and words.strip() else []


def _turns(turns: Any) -> list[Message]:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError("turns must hold non-empty text")
    messages: list[Message] = []
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
    return messages[:-1]


def _asked(words: Any, more: Any, answer: Any) -> list[Message]:
    if not all(isinstance(text, str) for text in (words, more or "", answer or "")) or not words.strip():
        raise ValueError("prompt, or instruction, input and output, must hold non-empty text")
    asked = f"{words}\n\n{more}" if more and more.strip() else words
    answered = [{"role": "assistant", "content": answer}] if answer else []
    return [{"role": "user", "content": asked}, *answered]


def _messages(messages: Any) -> list[Message]:
    """Checked messages; a JSON list in a CSV cell is read as well."""
    if isinstance(messages, str):
        messages = json.loads(messages)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of objects")
    checked = [_message(number, message) for number, message in enumerate(messages)]
    if not any(message["role"] == "user" for message in checked):
        raise ValueError("messages has no user message")
    return checked


def _message(number: int, message: dict[str, Any]) -> Message:
    role = message.get("role") or message.get("from")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"messages[{number}] has role {role!r}; known are {', '.join(ROLES)}")
    role = ROLES[role]
    content = message.get("content") if message.get("content") is not None else message.get("value")
    if isinstance(content, list):
        content = _text_of_parts(number, content)
    if content is None and role == "assistant":  # it called a tool, or said nothing
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"messages[{number}] has no text as content")
    if role == "user" and not content.strip():
        raise ValueError(f"messages[{number}] is an empty user message")
    optional = {key: message[key] for key in OPTIONAL_KEYS if message.get(key)}
    if "tool_calls" in optional:
        if not isinstance(optional["tool_calls"], list):
            raise ValueError(f"messages[{number}] has tool calls that are no list")
        optional["tool_calls"] = [_tool_call(number, call) for call in optional["tool_calls"]]
    return {"role": role, "content": content, **optional}


def _text_of_parts(number: int, parts: list[Any]) -> str:
    """The text of ``[{"type": "text", "text": ...}, ...]``, one part a line as servers join them."""
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
               for part in parts):
        raise ValueError(f"messages[{number}] has content that is not text")
    return "\n".join(part["text"] for part in parts)


def _tool_call(number: int, call: Any) -> dict[str, Any]:
    """A call with its arguments as an object, as servers hand it to the template; clients write them as JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"messages[{number}] has a tool call without a function's name")
    if isinstance(function.get("arguments"), str):
        function = {**function, "arguments": json.loads(function["arguments"] or "{}")}
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}


def _tools(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, str):
        tools = json.loads(tools) if tools.strip() else []
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools must be a list of objects")
    return tools


FORMS: dict[str, Callable[[Any, dict[str, Any]], list[Message]]] = {  # of (the key's value, the record)
    "messages": lambda messages, _: _messages(messages),
    "conversations": lambda messages, _: _messages(messages),
    "turns": lambda turns, _: _turns(turns),
    "instruction": lambda words, record: _asked(words, record.get("input"), record.get("output")),
    "prompt": lambda words, record: _asked(words, None, record.get("response") or record.get("completion"))
    if isinstance(words, str) else _messages(words),
}
COLUMNS = (*FORMS, "system", "input", "output", "response", "completion", "tools", "id", "question_id", "source",
           "category")


def _with_gaps(messages: list[Message]) -> list[list[Message]]:
    """Cut a conversation where an assistant speaks; what it said there is left out, for the target to write.

    Two things that it said stay: a call that a recorded tool result answers, because another call would have another
    result, and a greeting in front of the first question. After the last question or result the target always speaks.
    """
    turns: list[list[Message]] = [[]]
    asked = False
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        asked = asked or message["role"] == "user"
        is_answered_call = following is not None and following["role"] == "tool"
        if message["role"] != "assistant" or not asked or is_answered_call:
            turns[-1].append(message)
        elif turns[-1]:
            turns.append([])
    return turns if turns[-1] else turns[:-1]


def _whole_conversation(messages: list[Message]) -> list[list[Message]]:
    """A conversation as it is, up to the last thing that the assistant says."""
    last = max((number for number, message in enumerate(messages) if says_something(message)), default=None)
    if last is None:
        raise ValueError("no message of the assistant says anything")
    return [messages[: last + 1]]


def says_something(message: Message) -> bool:
    """Whether it is an assistant's message with words or tool calls."""
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def question(messages: Iterable[Message]) -> str:
    """What the user says before the first answer, whatever its case and white space, and whatever else is said."""
    said: list[str] = []
    for message in messages:
        if message["role"] == "assistant" and said:
            break
        if message["role"] == "user":
            said.append(" ".join(message["content"].casefold().split()))
    return "\n".join(said)


def is_validation(prompt_id: str, validation_fraction: float) -> bool:
    """Whether the prompt of this id is held back for validation.

    The hash of its id alone decides about a prompt, so adding or removing others never moves it to the other side.
    """
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8]) / 2**64 < validation_fraction


def prompts_digest(ids_and_digests: Iterable[tuple[str, str]]) -> str:
    """Hash of a list of prompts, given as (id, digest): of what they ask, their ids and their order."""
    digest = hashlib.sha256()
    for prompt_id, asked in ids_and_digests:
        digest.update(f"{len(prompt_id)} {prompt_id} {asked}\n".encode())
    return digest.hexdigest()

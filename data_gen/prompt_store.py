"""Prompts on disk: chosen once, memory-mapped by every rank, so that half a million of them fit anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import overload

import pyarrow as pa

from data_gen.files import appearing_whole
from data_gen.prompts import Prompt, prompts_digest

BATCH = 1024  # prompts
SCHEMA = pa.schema([(name, pa.large_string()) for name in (
    "id", "source", "category", "messages", "follow_ups", "tools", "digest")])


class PromptStore(Sequence[Prompt]):
    """The prompts of a file that ``prompt_writer`` wrote."""

    def __init__(self, path: Path) -> None:
        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()

    def __len__(self) -> int:
        return self._table.num_rows

    @overload
    def __getitem__(self, key: int) -> Prompt: ...
    @overload
    def __getitem__(self, key: slice) -> list[Prompt]: ...
    def __getitem__(self, key: int | slice) -> Prompt | list[Prompt]:
        if isinstance(key, int):
            return self[key : key + 1 or None][0]
        start, stop, step = key.indices(len(self))
        assert step == 1
        return [_prompt(record) for record in self._table.slice(start, max(stop - start, 0)).to_pylist()]

    def __iter__(self) -> Iterator[Prompt]:
        for start in range(0, len(self), BATCH):
            yield from self[start : start + BATCH]

    @property
    def digest(self) -> str:
        """As ``prompts_digest`` computes it."""
        columns = [self._table[name].chunks for name in ("id", "digest")]
        return prompts_digest((pair[0].as_py(), pair[1].as_py()) for chunks in zip(*columns, strict=True)
                              for pair in zip(*chunks, strict=True))


@contextmanager
def prompt_writer(path: Path) -> Iterator[Callable[[Prompt], None]]:
    """Write a store: yields what takes the prompts one by one; the file appears when the context ends without error."""
    batch: list[dict[str, str]] = []

    def flush() -> None:
        writer.write_batch(pa.RecordBatch.from_pylist(batch, SCHEMA))
        batch.clear()

    def add(prompt: Prompt) -> None:
        batch.append(_record(prompt))
        if len(batch) == BATCH:
            flush()

    with appearing_whole(path) as file, pa.ipc.new_file(file, SCHEMA) as writer:
        yield add
        flush()


def _record(prompt: Prompt) -> dict[str, str]:
    lists = {"messages": prompt.messages, "follow_ups": prompt.follow_ups, "tools": prompt.tools}
    return {
        "id": prompt.id, "source": prompt.source, "category": prompt.category, "digest": prompt.digest,
        **{name: json.dumps(value, ensure_ascii=False) for name, value in lists.items()},
    }


def _prompt(record: dict[str, str]) -> Prompt:
    return Prompt(
        id=record["id"],
        source=record["source"],
        category=record["category"],
        messages=tuple(json.loads(record["messages"])),
        follow_ups=tuple(map(tuple, json.loads(record["follow_ups"]))),
        tools=tuple(json.loads(record["tools"])),
    )

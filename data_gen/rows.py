"""One training sequence, and what must hold of it whichever engine wrote it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

FINISH_REASONS = ("stop", "length")
SKIPPED_KEY = b"skipped"  # of a shard's metadata
SCHEMA = pa.schema([
    ("id", pa.string()),
    ("source", pa.string()),
    ("input_ids", pa.list_(pa.int32())),
    ("loss_mask", pa.list_(pa.int8())),  # 1: the target wrote this token
    ("num_loss_tokens", pa.int32()),
    ("finish_reason", pa.string()),
    ("messages", pa.string()),  # JSON, for people to read; never tokenised again
])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training sequence."""

    id: str
    source: str
    input_ids: list[int]  # [T]
    loss_mask: list[int]  # [T], 1 where the target wrote the token, its final stop token included
    finish_reason: str  # of the last response: "stop": ends in a stop token; "length": cut
    messages: list[dict[str, Any]] | None = None

    @property
    def num_loss_tokens(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """What became no row: a line, a prompt, or a conversation from one of its turns on."""

    id: str  # of the prompt, or where it stands: "chat.jsonl, line 3"
    reason: str  # few and fixed, to count by
    detail: str = ""
    turn: int = 0  # 0: all of it; k: the answers before the k-th are kept
    by_choice: bool = False  # left out by a limit that was set; else it counts towards generation.max_rejected_share


@dataclass(slots=True)
class ShardRows:
    """What the prompts of one shard became."""

    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def table_of(rows: Sequence[Row], skipped: Sequence[Skipped] = ()) -> pa.Table:
    """Rows as an arrow table of ``SCHEMA``; what was skipped travels in its metadata, so that neither is without the
    other."""
    columns = {  # rows as dictionaries (asdict, from_pylist) take 17 times as long
        "id": [row.id for row in rows],
        "source": [row.source for row in rows],
        "input_ids": [row.input_ids for row in rows],
        "loss_mask": [row.loss_mask for row in rows],
        "num_loss_tokens": [row.num_loss_tokens for row in rows],
        "finish_reason": [row.finish_reason for row in rows],
        "messages": [None if row.messages is None else json.dumps(row.messages, ensure_ascii=False) for row in rows],
    }
    table = pa.Table.from_pydict(columns, SCHEMA)
    if not skipped:
        return table
    return table.replace_schema_metadata({SKIPPED_KEY: json.dumps([asdict(each) for each in skipped])})


def skipped_in(schema: pa.Schema) -> list[Skipped]:
    """What ``table_of`` was given beside the rows."""
    return [Skipped(**each) for each in json.loads((schema.metadata or {}).get(SKIPPED_KEY, b"[]"))]


def validate_rows(rows: Sequence[Row], *, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
    """Refuse rows that no engine can have produced. Looks at all of them at once, which takes a fraction of the time.

    Raises:
        ValueError: naming the first such row, and the first rule that it breaks.
    """
    wrong = np.array([len(row.loss_mask) != len(row.input_ids) or row.finish_reason not in FINISH_REASONS
                      for row in rows], dtype=bool)
    kept = [row for row, is_wrong in zip(rows, wrong, strict=True) if not is_wrong]
    ids, lengths = _flat([row.input_ids for row in kept])
    mask, _ = _flat([row.loss_mask for row in kept])
    row_of = np.repeat(np.flatnonzero(~wrong), lengths)
    is_first, is_marked = np.diff(row_of, prepend=-1) > 0, mask != 0
    goes_on = is_marked & np.append(is_marked[1:] & ~is_first[1:], False)  # the next token of the row is marked too
    is_stop = np.isin(ids, list(stop_token_ids))
    breaks_a_rule = (mask < 0) | (mask > 1) | (ids < 0) | (ids >= vocab_size) | (is_first & is_marked) | (
        goes_on & is_stop)
    ends_in_stop = np.full(len(rows), -1)  # whether the last marked token is one; none is marked
    ends_in_stop[row_of[is_marked]] = is_stop[is_marked]  # of several the last
    wrong |= ends_in_stop != [row.finish_reason == "stop" for row in rows]
    wrong[row_of[breaks_a_rule]] = True
    for index in np.flatnonzero(wrong).tolist():
        validate_row(rows[index], vocab_size=vocab_size, stop_token_ids=stop_token_ids)


def validate_row(row: Row, *, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
    """Refuse a row that no engine can have produced.

    Raises:
        ValueError: naming the row and the rule.
    """
    ids, mask = row.input_ids, row.loss_mask
    marked = [token for token, keep in zip(ids, mask, strict=False) if keep]
    stops_inside = [token for (token, keep), (_, next_keep) in pairwise(zip(ids, mask, strict=False))
                    if keep and next_keep and token in stop_token_ids]
    rules = {
        f"loss_mask has {len(mask)} entries for {len(ids)} ids": len(mask) == len(ids),
        "loss_mask holds something else than 0 and 1": set(mask) <= {0, 1},
        "no token is marked in loss_mask": bool(marked),
        "the first token is marked in loss_mask, but nothing predicts it": not mask or not mask[0],
        f"an id lies outside [0, {vocab_size})": all(0 <= token < vocab_size for token in ids),
        f"finish_reason {row.finish_reason!r} is none of {FINISH_REASONS}": row.finish_reason in FINISH_REASONS,
        f"finish_reason is {row.finish_reason!r}, but the last response token is {marked[-1:]} with stop tokens "
        f"{sorted(stop_token_ids)}": bool(marked) and (marked[-1] in stop_token_ids) == (row.finish_reason == "stop"),
        f"stop tokens {stops_inside} lie inside a response": not stops_inside,
    }
    for what_is_wrong, holds in rules.items():
        if not holds:
            raise ValueError(f"row {row.id!r}: {what_is_wrong}")


def _flat(lists: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of some lists, one after another, and how many each has, both int64."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return np.fromiter(chain.from_iterable(lists), np.int64, lengths.sum()), lengths

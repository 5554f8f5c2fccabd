"""Static caches: tensors that never move, written at columns that the device knows.

A column holds what was computed at that place of the text; behind the verified text it holds leftovers, which no mask
shows and which the next round writes over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from specvocab_model.compiled_layers import InPlaceCache
from specvocab_model.engine.attention import attend


@dataclass(slots=True)
class Cursor:
    """Where the next forward writes, for all layers."""

    columns: Tensor  # int64 [B, T]
    width: int = 0  # columns that attention looks at


def write(stored: Tensor, columns: Tensor, states: Tensor) -> None:
    """Put ``states`` [B, H, T, D] into ``columns`` [B, T] of ``stored`` [B, H, C, D], in place."""
    rows = torch.arange(len(columns), device=columns.device)[:, None]
    stored[rows, :, columns] = states.transpose(1, 2)


class StaticLayer(CacheLayerMixin):
    """Keys and values of one of the target's layers, views [B, H, C, D] of the cache's one tensor."""

    def __init__(self, cursor: Cursor, keys: Tensor, values: Tensor, *, is_sliding: bool) -> None:
        super().__init__()
        self.cursor, self.keys, self.values = cursor, keys, values
        self.is_initialized, self.is_sliding = True, is_sliding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to be done."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple:
        """Write those of new tokens [B, H, T, D] to the cursor's columns; returns all in use, each [B, H, width, D]."""
        assert self.keys is not None and self.values is not None
        write(self.keys, self.cursor.columns, key_states)
        write(self.values, self.cursor.columns, value_states)
        return self.keys[:, :, : self.cursor.width], self.values[:, :, : self.cursor.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cursor.width, 0

    def get_seq_length(self) -> int:
        return 0  # positions and masks are always given

    def get_max_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2]


class StaticCache(InPlaceCache):
    """The target's keys and values, [2 * layers, B, H, C, D] in one tensor, so that all layers move at once."""

    def __init__(
        self, sliding: list[bool], *, batch_size: int, num_heads: int, num_columns: int, head_dim: int, like: Tensor
    ) -> None:
        """
        Args:
            sliding: for each layer, whether its window slides. The mask says what it sees; nothing is forgotten.
            like: of the dtype and on the device wanted.
        """
        self.stored = like.new_zeros(2 * len(sliding), batch_size, num_heads, num_columns, head_dim)
        self.cursor = Cursor(torch.zeros(batch_size, 1, dtype=torch.int64, device=like.device))
        super().__init__([
            StaticLayer(self.cursor, self.stored[2 * i], self.stored[2 * i + 1], is_sliding=is_sliding)
            for i, is_sliding in enumerate(sliding)
        ])

    def compact(self, sources: Tensor, lengths: Tensor) -> None:
        """Move the columns ``sources`` [B, R] of all layers to ``lengths`` [B] and those after it, in order."""
        index = sources[None, :, None, :, None].expand(len(self.stored), -1, self.stored.shape[2], -1,
                                                       self.stored.shape[4])
        moved = self.stored.gather(3, index)  # a copy: sources and destinations overlap
        places = lengths[:, None] + torch.arange(sources.shape[1], device=sources.device)
        self.stored.scatter_(3, places[None, :, None, :, None].expand_as(index), moved)


@dataclass(slots=True)
class DraftStore:
    """The draft's keys and values, each [B, H, C, D]."""

    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class DraftMemory:
    """One pass of the draft's layer over a ``DraftStore`` (``attention.Memory``)."""

    store: DraftStore
    columns: Tensor  # int64 [B, T], where it writes
    mask: Tensor  # of ``attention.additive``, for the draft's groups
    width: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``query`` [B, T, H, D], ``key`` and ``value`` [B, T, H_kv, D] -> [B, T, H, D]."""
        write(self.store.keys, self.columns, key.transpose(1, 2))
        write(self.store.values, self.columns, value.transpose(1, 2))
        keys, values = self.store.keys[:, :, : self.width], self.store.values[:, :, : self.width]
        return attend(query.transpose(1, 2), keys, values, self.mask).transpose(1, 2)

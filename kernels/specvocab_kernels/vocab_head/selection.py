"""Which ids become candidates, as a rule on approximate logits, and the order in which ``vocab_proj`` is stored for it.

Both rules break ties by the lowest id, count NaN as larger than every number (so that it shows in the exact logits
instead of passing unseen), and return distinct ids in ``[0, V)`` whatever the scores are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SELECTED = torch.iinfo(torch.int32).min  # below the key of every score, -inf included


@dataclass(frozen=True, slots=True)
class ExactSelection:
    """The ``num_candidates`` largest approximate logits, as ``torch.topk`` finds them.

    Args:
        vocab_size: ``V``.
        num_candidates: candidates a row; more than ``V`` means all, and is kept as ``V``.
    """

    vocab_size: int
    num_candidates: int

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.num_candidates < 1:
            raise ValueError(f"{self}: vocab_size and num_candidates must be at least 1")
        object.__setattr__(self, "num_candidates", min(self.num_candidates, self.vocab_size))

    @property
    def num_rows(self) -> int:
        """Rows of the stored ``vocab_proj``."""
        return self.vocab_size

    def arrange(self, rows: Tensor) -> Tensor:
        """``[V, ...]`` by id -> ``[num_rows, ...]`` as stored: the same."""
        return rows

    def restore(self, rows: Tensor) -> Tensor:
        """``[num_rows, ...]`` as stored -> ``[V, ...]`` by id: the same."""
        return rows

    def select(self, scores: Tensor) -> Tensor:
        """``[N, V]`` approximate logits by id -> ``[N, num_candidates]`` int64 ids, ascending."""
        if self.num_candidates == self.vocab_size:
            return torch.arange(self.vocab_size, device=scores.device).repeat(scores.shape[0], 1)
        ids = torch.arange(self.vocab_size, device=scores.device)
        distinct = (order_keys(scores).long() << 32) - ids  # no two are equal, so topk has no choice
        return distinct.topk(self.num_candidates, dim=1, sorted=False).indices.sort(dim=1).values


@dataclass(frozen=True, slots=True)
class TileSelection:
    """The best ``keep`` ids of every tile, where a tile holds ids that lie far apart.

    Row ``t * tile + j`` of the stored ``vocab_proj`` holds the id ``j * num_tiles + t``; rows whose id would be ``V``
    or more are padding and never selected. A tile is thus the ids that are equal modulo ``num_tiles``: neighbours,
    which tend to be large together, go to different tiles.

    Guarantee: an id that is among the best ``keep`` of its tile is a candidate. So the best id of all always is one,
    and the ``n``-th best id is lost only if ``keep`` better ones share its tile.

    Args:
        vocab_size: ``V``.
        tile: rows of a tile, a power of two.
        keep: candidates of a tile; a tile with fewer ids gives all of them.
    """

    vocab_size: int
    tile: int
    keep: int

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.keep < 1:
            raise ValueError(f"{self}: vocab_size and keep must be at least 1")
        if self.tile < 1 or self.tile & (self.tile - 1):
            raise ValueError(f"{self}: tile must be a power of two")
        if self.keep > self.tile:
            raise ValueError(f"{self}: keep cannot be more than tile")

    @property
    def num_tiles(self) -> int:
        return -(-self.vocab_size // self.tile)

    @property
    def num_rows(self) -> int:
        """Rows of the stored ``vocab_proj``, padding included."""
        return self.num_tiles * self.tile

    @property
    def num_candidates(self) -> int:
        return self.first_candidate(self.num_tiles)

    def first_candidate(self, t: int) -> int:
        """Candidates of the tiles before ``t``: where tile ``t`` begins in the output.

        The first ``V % num_tiles`` tiles hold one id more than the others.
        """
        ids, longer = divmod(self.vocab_size, self.num_tiles)
        return t * min(self.keep, ids) + (min(t, longer) if self.keep > ids else 0)

    def ids_of_rows(self, device: torch.device | str = "cpu") -> Tensor:
        """``[num_rows]`` int64: the id that each stored row holds, ``V`` or more for padding."""
        return torch.arange(self.num_rows, device=device).view(self.tile, self.num_tiles).t().reshape(-1)

    def arrange(self, rows: Tensor) -> Tensor:
        """``[V, ...]`` by id -> ``[num_rows, ...]`` as stored; padding rows are zero."""
        padding = rows.new_zeros(self.num_rows - self.vocab_size, *rows.shape[1:])
        return torch.cat((rows, padding)).unflatten(0, (self.tile, self.num_tiles)).transpose(0, 1).flatten(0, 1)

    def restore(self, rows: Tensor) -> Tensor:
        """``[num_rows, ...]`` as stored -> ``[V, ...]`` by id."""
        return rows.unflatten(0, (self.num_tiles, self.tile)).transpose(0, 1).flatten(0, 1)[: self.vocab_size]

    def select(self, scores: Tensor) -> Tensor:
        """``[N, V]`` approximate logits by id -> ``[N, num_candidates]`` int64 ids, tile by tile, best first."""
        padding = (0, self.num_rows - self.vocab_size)
        keys = torch.nn.functional.pad(order_keys(scores), padding, value=SELECTED)
        keys = keys.view(-1, self.tile, self.num_tiles)  # no permutation: ids of a tile are num_tiles apart
        best = []
        for _ in range(self.keep):
            place = keys.max(dim=1, keepdim=True).indices  # the first among equals
            keys.scatter_(1, place, SELECTED)
            best.append(place)
        ids = torch.cat(best, dim=1) * self.num_tiles + torch.arange(self.num_tiles, device=scores.device)
        ids = ids.transpose(1, 2)  # [N, num_tiles, keep]
        shortest, longer = divmod(self.vocab_size, self.num_tiles)
        if self.keep <= shortest:
            return ids.flatten(1)
        tile_sizes = shortest + (torch.arange(self.num_tiles, device=scores.device) < longer).int()
        return ids[:, torch.arange(self.keep, device=scores.device) < tile_sizes.unsqueeze(1)]


Selection = ExactSelection | TileSelection


def order_keys(scores: Tensor) -> Tensor:
    """int32 keys, a fresh tensor, that are ordered like the scores: -0 equals 0, NaN of either sign is the largest."""
    scores = torch.where(scores.isnan(), torch.nan, scores.float() + 0.0)
    bits = scores.view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

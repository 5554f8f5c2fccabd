"""What is drafted in a round, and how many columns of a cache attention looks at."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST_WIDTH = 256
COLUMN_STEP = 64  # widths of masks are multiples of it: fused attention wants aligned rows


@dataclass(frozen=True, slots=True)
class DraftShape:
    """A chain, or EAGLE-2's dynamic tree (Li et al. 2024, https://arxiv.org/abs/2406.16858).

    Every layer of the tree expands its ``top_k`` most probable nodes into ``top_k`` children each; of all nodes the
    ``num_tokens`` most probable are verified. Probable by the draft: the product of probabilities from the root on.

    Raises:
        ValueError: a number out of range, or more tokens than the tree has nodes.
    """

    depth: int  # draft steps, and the most drafts that one verification can accept; 0: plain decoding
    top_k: int = 1  # 1: a chain
    num_tokens: int | None = None  # verified drafts; None: all of a chain

    def __post_init__(self) -> None:
        if self.depth < 0 or self.top_k < 1:
            raise ValueError(f"depth={self.depth} must not be negative and top_k={self.top_k} must be at least 1")
        if self.is_chain and self.num_tokens not in (None, self.depth):
            raise ValueError(f"a chain of depth={self.depth} verifies all its tokens; leave out num_tokens="
                             f"{self.num_tokens}, or give a top_k above 1")
        if not self.is_chain and not (self.num_tokens and self.depth <= self.num_tokens <= self.num_nodes):
            raise ValueError(f"num_tokens={self.num_tokens} must lie between depth={self.depth} and the "
                             f"{self.num_nodes} nodes of a tree of top_k={self.top_k}")

    @property
    def is_chain(self) -> bool:
        return self.top_k == 1

    @property
    def num_nodes(self) -> int:
        """Drafted nodes, of which ``num_drafts`` are verified."""
        return self.top_k + max(0, self.depth - 1) * self.top_k**2 if self.depth else 0

    @property
    def num_drafts(self) -> int:
        """Drafts in one verification."""
        return self.num_tokens if self.num_tokens is not None else self.depth

    @property
    def num_expanded(self) -> int:
        """Nodes that the draft reads after its first step."""
        return max(0, self.depth - 1) * self.top_k


PLAIN = DraftShape(0)
EAGLE2 = DraftShape(depth=8, top_k=10, num_tokens=60)  # the set-up of the papers on EAGLE-2 and EAGLE-3


def width_for(num_columns: int, capacity: int) -> int:
    """Smallest of 256, 384, 512, 768, 1024, ... that holds ``num_columns``; never above ``capacity``."""
    width = SMALLEST_WIDTH
    while width < num_columns:
        width = width * 3 // 2 if width & (width - 1) == 0 else width * 4 // 3
    return min(width, capacity)

"""Every row of the target's ``lm_head``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specvocab_model.heads.base import Head, HeadOutput

if TYPE_CHECKING:
    from specvocab_model.target import Target


class FullHead(Head):
    """The target's own output embedding over the whole vocabulary: the most accurate head and the slowest."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def __call__(self, hidden: Tensor) -> HeadOutput:
        """Logits ``[N, V]`` of normalised hidden states ``[N, d]``."""
        return HeadOutput(None, self.target.logits(hidden))

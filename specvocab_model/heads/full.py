"""Every row of the target's ``lm_head``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import linear

from specvocab_model.heads.base import Head, HeadOutput

if TYPE_CHECKING:
    from specvocab_model.target import Target


class FullHead(Head):
    """The whole vocabulary: the most accurate head and the slowest.

    Args:
        target: owner of the scale and the soft-cap.
        weight: the draft's own output embedding ``[V, d]``; by default the target's.
    """

    def __init__(self, target: Target, weight: Tensor | None = None) -> None:
        self.target = target
        self.weight = (target.lm_head_weight if weight is None else weight).detach()

    def __call__(self, hidden: Tensor) -> HeadOutput:
        """Logits ``[N, V]`` of normalised hidden states ``[N, d]``."""
        logits = linear(hidden.to(self.weight.dtype), self.weight).float()
        return HeadOutput(None, self.target.scale_and_cap(logits))

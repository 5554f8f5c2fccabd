"""The speculator's approximate logits as the draft's own distribution (SlimSpec), with no exact ones on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specvocab_model.heads.base import Head, HeadOutput
from specvocab_model.speculator import VocabSpeculator

if TYPE_CHECKING:
    from specvocab_model.target import Target


class LowRankHead(Head):
    """``vocab_proj(down_proj(h))`` over the whole vocabulary, scaled and soft-capped as the target's logits are."""

    def __init__(self, target: Target, speculator: VocabSpeculator) -> None:
        self.target, self.speculator = target, speculator

    def __call__(self, hidden: Tensor) -> HeadOutput:
        """Logits ``[N, V]`` of normalised hidden states ``[N, d]``."""
        approximate = self.speculator(hidden.to(self.speculator.down_proj.weight.dtype))
        return HeadOutput(None, self.target.scale_and_cap(approximate.detach().float()))

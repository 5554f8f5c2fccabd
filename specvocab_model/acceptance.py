"""Simulated acceptance: what the unrolled training pass says about decoding.

The unroll feeds step ``i`` with the true tokens, which are the drafted ones exactly where every earlier step was
right. So the chance that a chain survives to step ``i`` can be read off the training pass, for every start position,
without decoding. All measurements are kept as sums over positions, which add up over micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AcceptanceSums:
    """Sums over valid positions, per unroll step; every field is fp64 [S]."""

    count: Tensor  # valid positions
    loss: Tensor
    aux_loss: Tensor
    entropy: Tensor  # the teacher's
    acceptance: Tensor  # sum over the vocabulary of min(p, q)
    target_recall: Tensor  # target argmax among the candidates
    draft_recall: Tensor  # draft argmax (full head) among the candidates
    reached: Tensor  # valid positions whose earlier steps were all right
    survived: Tensor  # ... and this step too
    survived_candidates: Tensor  # the same when the draft may only name candidates

    @classmethod
    def zeros(cls, num_steps: int, device: torch.device | str = "cpu") -> AcceptanceSums:
        return cls.unstack(torch.zeros(len(fields(cls)), num_steps, dtype=torch.float64, device=device))

    def stack(self) -> Tensor:
        """[fields, S] fp64: one tensor to reduce over ranks."""
        return torch.stack([self.count, self.loss, self.aux_loss, self.entropy, self.acceptance, self.target_recall,
                            self.draft_recall, self.reached, self.survived, self.survived_candidates])

    @classmethod
    def unstack(cls, stacked: Tensor) -> AcceptanceSums:
        return cls(*stacked.unbind(0))

    def __add__(self, other: AcceptanceSums) -> AcceptanceSums:
        return AcceptanceSums.unstack(self.stack() + other.stack())


def prefix_products(right: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Which chains reach each step and which survive it.

    Args:
        right, valid: [S, P] bool, indexed by the chain's start position.

    Returns:
        ``reached`` and ``survived``, [S, P] bool: valid with all earlier steps right; and right at this step too.
    """
    survived = (right & valid).int().cumprod(0).bool()
    before = torch.cat([torch.ones_like(survived[:1]), survived[:-1]])
    return before & valid, survived


def summarise(sums: AcceptanceSums) -> dict[str, float]:
    """The numbers every run reports (names are the keys of metrics.jsonl).

    ``simulated_tau/*`` is 1 + the mean number of steps a chain survives, over all start positions. The value for the
    candidates is a lower bound: where the draft's favourite is not a candidate the chain counts as broken, although
    its best candidate might have been right.
    """
    total = max(float(sums.count.sum()), 1.0)
    first = max(float(sums.count[0]), 1.0)
    metrics = {
        "loss": float(sums.loss.sum()) / total,
        "aux_loss": float(sums.aux_loss.sum()) / total,
        "teacher_entropy": float(sums.entropy.sum()) / total,
        "acceptance_probability": float(sums.acceptance[0]) / first,
        "candidate_recall/target_top1": float(sums.target_recall.sum()) / total,
        "candidate_recall/draft_top1": float(sums.draft_recall.sum()) / total,
        "simulated_tau/full": 1.0 + float(sums.survived.sum()) / first,
        "simulated_tau/candidates": 1.0 + float(sums.survived_candidates.sum()) / first,
    }
    for step, (survived, reached) in enumerate(zip(sums.survived.tolist(), sums.reached.tolist(), strict=True)):
        metrics[f"accuracy/step_{step}"] = survived / max(reached, 1.0)
    return metrics

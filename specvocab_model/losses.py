"""The objective: which positions are judged, with what weight, by which loss.

Everything is indexed by the *teacher's* row. Row ``t`` of the target predicts token ``t+1``; the draft's step ``i``
predicts the same token from its start position ``t-1-i``. So one teacher row serves up to S student rows, and the
loss is one pass over teacher rows (``specvocab_kernels.distill``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from specvocab_kernels.distill import DistillStats, distill
from torch import Tensor

from specvocab_model.acceptance import AcceptanceSums, prefix_products
from specvocab_model.speculator import VocabSpeculator


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is minimised: sum over steps of ``step_decay ** i * (loss_i + aux_weight * speculator loss_i)``."""

    loss: str
    aux_weight: float
    step_decay: float
    normalization: str  # 'valid': each step's mean is over its own valid positions; 'slot': over all token slots
    max_bytes: int  # memory for logits
    logit_scale: float = 1.0
    logit_softcap: float | None = None


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """The teacher rows that some step is judged by, and the student rows that belong to each."""

    teacher: Tensor  # [N] index into the flattened [B * T] positions
    student: Tensor  # [S, N] likewise; the start position of step i; 0 where not valid
    valid: Tensor  # [S, N] bool


def judged_rows(loss_mask: Tensor, document_ids: Tensor, num_steps: int) -> JudgedRows:
    """Find the positions that enter the loss.

    Step ``i`` at position ``t`` is valid where ``loss_mask[t+2+i] == 1`` and ``t+2+i`` lies in the same document as
    ``t``; it is judged by teacher row ``t+1+i``.

    Args:
        loss_mask, document_ids: [B, T] int.
    """
    seq_len = loss_mask.shape[1]
    at = torch.arange(seq_len, device=loss_mask.device)
    predicted = (at + 1).clamp(max=seq_len - 1)  # the token that teacher row `at` predicts
    supervised = (loss_mask[:, predicted] == 1) & (at + 1 < seq_len)
    valid = []
    for step in range(num_steps):
        start = at - 1 - step
        inside = document_ids[:, start.clamp(min=0)] == document_ids[:, predicted]
        valid.append(supervised & inside & (start >= 0))
    by_step = torch.stack(valid).flatten(1)  # [S, B * T]
    teacher = by_step.any(0).nonzero()[:, 0]
    steps = torch.arange(num_steps, device=loss_mask.device)[:, None]
    kept = by_step[:, teacher]
    return JudgedRows(teacher, torch.where(kept, teacher - 1 - steps, 0), kept)


def valid_counts(loss_mask: Tensor, document_ids: Tensor, num_steps: int) -> Tensor:
    """Number of valid positions of each unroll step, int64 [S]. Cheap on the CPU, before anything is moved."""
    return judged_rows(loss_mask, document_ids, num_steps).valid.sum(1)


def step_weights(objective: Objective, counts: Tensor) -> Tensor:
    """Weight of one valid position of each step, fp32 [S].

    ``counts`` [S]: what each step's mean is over, summed over all ranks and accumulated micro-batches: the valid
    positions of ``valid_counts``, or the number of token slots for ``normalization='slot'``.
    """
    decay = objective.step_decay ** torch.arange(len(counts), dtype=torch.float64, device=counts.device)
    return (decay / counts.clamp(min=1)).float()


def distillation_loss(
    hidden: Tensor,
    final_hidden: Tensor,
    lm_head_weight: Tensor,
    speculator: VocabSpeculator | None,
    *,
    loss_mask: Tensor,
    document_ids: Tensor,
    step_weights: Tensor,
    objective: Objective,
    collect: bool,
) -> tuple[Tensor, AcceptanceSums | None]:
    """Weighted sum of the draft's and the speculator's loss over all valid positions of all steps.

    Args:
        hidden: [S, B, T, d] of ``Draft.unroll``; ``final_hidden`` [B, T, d]; ``lm_head_weight`` [V, d].
        loss_mask, document_ids: [B, T]; ``step_weights`` [S].
        collect: also return the sums that metrics are made of.
    """
    rows = judged_rows(loss_mask, document_ids, hidden.shape[0])
    flat = hidden.flatten(1, 2)  # [S, B * T, d]
    student = flat.gather(1, rows.student[..., None].expand(-1, -1, flat.shape[-1]))
    loss, stats = distill(
        student,
        final_hidden.flatten(0, 1)[rows.teacher],
        lm_head_weight,
        None if speculator is None else speculator.down_proj.weight,
        None if speculator is None else speculator.vocab_proj.weight,
        torch.where(rows.valid, step_weights[:, None], 0.0),
        loss=objective.loss,
        aux_weight=objective.aux_weight,
        logit_scale=objective.logit_scale,
        logit_softcap=objective.logit_softcap,
        max_bytes=objective.max_bytes,
        collect=collect,
    )
    if stats is None:
        return loss, None
    num_candidates = lm_head_weight.shape[0] if speculator is None else speculator.num_candidates
    return loss, _acceptance_sums(stats, rows, loss_mask.numel(), num_candidates)


def _acceptance_sums(stats: DistillStats, rows: JudgedRows, num_positions: int, num_candidates: int) -> AcceptanceSums:
    """Per-step sums; chains are followed by their start position, so correctness is scattered back to [S, B * T]."""
    valid = rows.valid
    in_candidates = stats.target_rank < num_candidates

    def by_start(flags: Tensor) -> Tensor:
        placed = torch.zeros(valid.shape[0], num_positions, dtype=torch.bool, device=valid.device)
        step, row = valid.nonzero(as_tuple=True)
        placed[step, rows.student[step, row]] = flags[step, row]
        return placed

    valid_at = by_start(valid)
    reached, survived = prefix_products(by_start(stats.correct), valid_at)
    _, survived_candidates = prefix_products(by_start(stats.correct & in_candidates), valid_at)

    def total(values: Tensor) -> Tensor:
        return torch.where(valid, values.double(), 0.0).sum(1)

    return AcceptanceSums(
        count=valid.sum(1).double(),
        loss=total(stats.loss),
        aux_loss=total(stats.aux_loss),
        entropy=total(stats.entropy),
        acceptance=total(stats.acceptance),
        correct=total(stats.correct),
        target_recall=total(in_candidates),
        draft_recall=total(stats.draft_rank < num_candidates),
        reached=reached.sum(1).double(),
        survived=survived.sum(1).double(),
        survived_candidates=survived_candidates.sum(1).double(),
    )

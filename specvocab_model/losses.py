"""The objective: which positions are judged, with what weight, by which loss.

Everything is indexed by the *teacher's* row. Row ``t`` of the target predicts token ``t+1``; the draft's step ``i``
predicts the same token from its start position ``t-1-i``. So one teacher row serves up to S student rows, and the
loss is one pass over teacher rows (``specvocab_kernels.distill``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from specvocab_kernels.distill import DistillStats, distill, row_bytes
from specvocab_kernels.distill.reference import cap_logits
from torch import Tensor
from torch.nn.functional import linear

from specvocab_model.acceptance import AcceptanceSums, prefix_products
from specvocab_model.heads.static import OwnHead
from specvocab_model.speculator import VocabSpeculator, candidate_rule
from specvocab_model.unroll import JudgedRows, by_start, judged_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is minimised: sum over steps of ``step_decay ** i * (loss_i + aux_weight * speculator loss_i)``."""

    loss: str
    aux_weight: float
    step_decay: float
    max_bytes: int  # memory for logits
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    temperature: float = 1.0


def valid_counts(loss_mask: Tensor, document_ids: Tensor, num_steps: int) -> Tensor:
    """Number of valid positions of each unroll step, int64 [S]. Cheap on the CPU, before anything is moved."""
    return judged_rows(loss_mask, document_ids, num_steps).valid.sum(1)


def step_weights(objective: Objective, counts: Tensor) -> Tensor:
    """Weight of one valid position of each step, fp32 [S].

    ``counts`` [S]: what each step's mean is over, summed over all ranks and accumulated micro-batches: the valid
    positions of ``valid_counts``, or the number of token slots, as ``trainer.loss_normalization`` says.
    """
    decay = objective.step_decay ** torch.arange(len(counts), dtype=torch.float64, device=counts.device)
    return (decay / counts.clamp(min=1)).float()


def distillation_loss(
    student_hidden: Tensor,
    final_hidden: Tensor,
    lm_head_weight: Tensor,
    *,
    speculator: VocabSpeculator | None,
    rows: JudgedRows,
    step_weights: Tensor,
    objective: Objective,
    collect: bool,
) -> tuple[Tensor, AcceptanceSums | None]:
    """Weighted sum of the draft's and the speculator's loss over all valid positions of all steps.

    Args:
        student_hidden: [S, N, d], after the draft's final norm, at the start positions ``rows.student``.
        final_hidden: [B * T, d]; ``lm_head_weight`` [V, d]; ``step_weights`` [S].
        collect: also return the sums that metrics are made of.
    """
    num_tiles, keep = (1, lm_head_weight.shape[0]) if speculator is None else candidate_rule(speculator.selection)
    down_proj, vocab_proj = (None, None) if speculator is None else speculator.factors(lm_head_weight)
    loss, stats = distill(
        student_hidden,
        final_hidden.index_select(0, rows.teacher),
        lm_head_weight,
        down_proj,
        vocab_proj,
        torch.where(rows.valid, step_weights[:, None], 0.0),
        loss=objective.loss,
        aux_weight=objective.aux_weight,
        logit_scale=objective.logit_scale,
        logit_softcap=objective.logit_softcap,
        temperature=objective.temperature,
        num_tiles=num_tiles,
        max_bytes=objective.max_bytes,
        collect=collect,
    )
    if stats is None:
        return loss, None
    return loss, _acceptance_sums(stats, rows, final_hidden.shape[0], keep)


def static_distillation_loss(
    student_hidden: Tensor,
    final_hidden: Tensor,
    lm_head_weight: Tensor,
    *,
    head: OwnHead,
    rows: JudgedRows,
    step_weights: Tensor,
    objective: Objective,
    collect: bool,
) -> tuple[Tensor, AcceptanceSums | None]:
    """EAGLE-3's loss for a head over ``D`` of the ``V`` tokens; arguments as ``distillation_loss``.

    The teacher's distribution is renormalised over the head's tokens. Where its most probable token is not among them,
    the position contributes no loss; it still counts in the step's mean, and as a position where the head is wrong.
    """
    taught = final_hidden.index_select(0, rows.teacher)
    subset = lm_head_weight.index_select(0, head.ids)
    kept = _top_is_kept(taught, lm_head_weight, head, objective)
    loss, stats = distill(
        student_hidden,
        taught,
        subset,
        None,
        None,
        torch.where(rows.valid & kept, step_weights[:, None], 0.0),
        student_head=head.weight,
        loss=objective.loss,
        logit_scale=objective.logit_scale,
        logit_softcap=objective.logit_softcap,
        temperature=objective.temperature,
        max_bytes=objective.max_bytes,
        collect=collect,
    )
    if stats is None:
        return loss, None
    measured = replace(
        stats,
        loss=torch.where(kept, stats.loss, 0.0),
        entropy=torch.where(kept, stats.entropy, 0.0),
        correct=stats.correct & kept,
        acceptance=_acceptance(student_hidden, taught, lm_head_weight, head, objective),
        target_rank=(~kept).long().expand_as(stats.target_rank),
    )
    return loss, _acceptance_sums(measured, rows, final_hidden.shape[0], keep=1)


@torch.no_grad()
def _top_is_kept(taught: Tensor, lm_head_weight: Tensor, head: OwnHead, objective: Objective) -> Tensor:
    """Whether the most probable token of each teacher row [N, d] is one of the head's, bool [N]."""
    is_kept = torch.zeros(len(lm_head_weight), dtype=torch.bool, device=taught.device).index_fill_(0, head.ids, True)
    chunks = taught.split(_chunk(lm_head_weight, objective))
    return is_kept[torch.cat([_logits(rows, lm_head_weight, objective).argmax(-1) for rows in chunks])]


@torch.no_grad()
def _acceptance(
    student_hidden: Tensor, taught: Tensor, lm_head_weight: Tensor, head: OwnHead, objective: Objective
) -> Tensor:
    """Sum of min(p, q) over the head's tokens, fp32 [S, N]; ``p`` is not renormalised: it is what verification sees."""
    size, accepted = _chunk(lm_head_weight, objective), torch.zeros(student_hidden.shape[:2], device=taught.device)
    for start in range(0, len(taught), size):
        rows = slice(start, start + size)
        p = _logits(taught[rows], lm_head_weight, objective).softmax(-1)[:, head.ids]
        for step, hidden in enumerate(student_hidden):
            q = _logits(hidden[rows], head.weight.to(lm_head_weight.dtype), objective).softmax(-1)
            accepted[step, rows] = torch.minimum(p, q).sum(-1)
    return accepted


def _chunk(lm_head_weight: Tensor, objective: Objective) -> int:
    """Rows whose logits over the whole vocabulary may exist at one time."""
    return max(1, objective.max_bytes // row_bytes("torch", 1, lm_head_weight))


def _logits(hidden: Tensor, weight: Tensor, objective: Objective) -> Tensor:
    """fp32 [n, V] of ``hidden`` [n, d], as ``distill`` makes them."""
    with torch.autocast(hidden.device.type, enabled=False):
        product = linear(hidden.to(weight.dtype), weight).float()
    return cap_logits(product, objective.logit_scale, objective.logit_softcap) / objective.temperature


def _acceptance_sums(stats: DistillStats, rows: JudgedRows, num_positions: int, keep: int) -> AcceptanceSums:
    """Per-step sums over what the head would do with these weights.

    Ranks count the ids that score strictly above, so of several equal scores at the end of a tile's best ``keep`` all
    count as candidates here, and the lowest ids alone are the head's.
    """
    valid = rows.valid
    in_candidates = stats.target_rank < keep
    valid_at = by_start(valid, rows, num_positions)
    reached, survived = prefix_products(by_start(stats.correct, rows, num_positions), valid_at)
    with_candidates = by_start(stats.correct & in_candidates, rows, num_positions)
    _, survived_candidates = prefix_products(with_candidates, valid_at)

    def total(values: Tensor) -> Tensor:
        return torch.where(valid, values.double(), 0.0).sum(1)

    return AcceptanceSums(
        count=valid.sum(1).double(),
        loss=total(stats.loss),
        aux_loss=total(stats.aux_loss),
        entropy=total(stats.entropy),
        acceptance=total(stats.acceptance),
        target_recall=total(in_candidates),
        draft_recall=total(stats.draft_rank < keep),
        reached=reached.sum(1).double(),
        survived=survived.sum(1).double(),
        survived_candidates=survived_candidates.sum(1).double(),
    )

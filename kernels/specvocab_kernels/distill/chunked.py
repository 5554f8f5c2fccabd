"""Distillation over chunks of teacher rows: the full vocabulary in constant memory, gradients made in the forward pass.

A teacher row is judged by up to S student rows (one an unroll step). For one chunk of rows the teacher's product is
made once, then each step's logits are made, turned into their gradient in place, and multiplied back. Nothing of
size ``[rows, V]`` outlives its chunk. Making the gradients at once costs nothing: the loss is a weighted sum, so
backward only scales them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specvocab_kernels.distill.gradients import GRADIENTS, NEEDS_LOG, Teacher
from specvocab_kernels.distill.reference import DistillStats, cap_logits

CPU_BLOCK_BYTES = 12 * 2**20  # one fp32 block of logits; 64 rows of 49 152 ids measured best


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    """Everything of a ``distill`` call that is not a tensor."""

    loss: str
    aux_weight: float
    logit_scale: float
    logit_softcap: float | None
    num_tiles: int
    chunk_rows: int
    gradients: bool  # False: loss and measurements alone, without the products of the gradients


def _final_logits(raw: Tensor, options: DistillOptions) -> Tensor:
    """fp32 logits; a fresh tensor."""
    return cap_logits(raw.float(), options.logit_scale, options.logit_softcap)


def _to_raw(slope: Tensor, logits: Tensor, weight: Tensor, options: DistillOptions) -> Tensor:
    """Gradient in the final logits -> gradient in the bare product, times the row's weight; in place on ``slope``."""
    if options.logit_softcap is not None:
        slope.mul_(1.0 - (logits / options.logit_softcap) ** 2)
    return slope.mul_(weight[:, None] * options.logit_scale)


class DistillFunction(torch.autograd.Function):
    """``forward(student, down, vocab, head, teacher, lm_head, weight, options, stats) -> scalar`` leaves ``ctx.grads``.

    ``head`` is what the student is multiplied with; None: ``lm_head``, as the teacher.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total):  # type: ignore[no-untyped-def]
        """The gradients scaled in place: a copy would double the largest tensors of all.

        Raises:
            RuntimeError: they have been handed out before.
        """
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("distill: backward can run once only; call distill again instead of retain_graph=True")
        made = [None if grad is None else grad.mul_(grad_total)
                for grad in (grads.student, grads.down, grads.vocab, grads.head)]
        return (*made, None, None, None, None, None)


class ChunkedDistill(DistillFunction):
    """Chunk by chunk and step by step in plain torch."""

    @staticmethod
    def forward(ctx, student, down, vocab, head, teacher, lm_head, weight, options, stats):  # type: ignore[no-untyped-def]
        dtype = lm_head.dtype
        grads = Gradients.zeros_like(student, down, vocab, head)
        # Rows of weight 0 are blanked: a NaN there would survive the multiplication by 0.
        student = student.to(dtype).masked_fill((weight == 0)[..., None], 0.0)
        teacher = teacher.to(dtype).masked_fill((weight == 0).all(0)[:, None], 0.0)
        down, vocab = (None if matrix is None else matrix.to(dtype) for matrix in (down, vocab))
        head = lm_head if head is None else head.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        chunk_rows = options.chunk_rows
        if student.device.type == "cpu":  # elementwise passes over a block that stays in the cache are twice as fast
            chunk_rows = min(chunk_rows, max(1, CPU_BLOCK_BYTES // (4 * lm_head.shape[0])))
        for start in range(0, teacher.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = _final_logits(teacher[rows] @ lm_head.mT, options)
            shared = Teacher.from_logits(logits, options.loss in NEEDS_LOG)
            for step in range(student.shape[0]):
                total += _one_step(student[step, rows], down, vocab, shared, head, weight[step, rows], options,
                                   grads, stats, (step, rows))
        ctx.grads = grads if options.gradients else None
        return total


@dataclass(slots=True)
class Gradients:
    student: Tensor  # [S, N, d] in the student's dtype, which may hold smaller numbers than that of the products
    down: Tensor | None  # [r, d] fp32: sums over all rows
    vocab: Tensor | None  # [V, r] fp32
    head: Tensor | None  # [V, d] fp32, of a head of the student's own

    @classmethod
    def zeros_like(
        cls, student: Tensor, down: Tensor | None, vocab: Tensor | None, head: Tensor | None
    ) -> Gradients:
        def sums(like: Tensor | None) -> Tensor | None:
            return None if like is None else torch.zeros_like(like, dtype=torch.float32)

        return cls(torch.zeros_like(student), sums(down), sums(vocab), sums(head))


def _one_step(
    hidden: Tensor,
    down: Tensor | None,
    vocab: Tensor | None,
    teacher: Teacher,
    head: Tensor,
    weight: Tensor,
    options: DistillOptions,
    grads: Gradients,
    stats: DistillStats | None,
    at: tuple[int, slice],
) -> Tensor:
    """Loss, gradients and measurements of one unroll step on one chunk: ``hidden`` [C, d], ``weight`` [C]."""
    value_and_slope = GRADIENTS[options.loss]
    logits = _final_logits(hidden @ head.mT, options)
    value, slope = value_and_slope(teacher, logits)
    student_top = logits.argmax(-1) if stats is not None else None
    if stats is not None:
        stats.loss[at], stats.entropy[at] = value, teacher.entropy
        stats.correct[at] = student_top == teacher.top
        stats.acceptance[at] = torch.minimum(torch.softmax(logits, -1), teacher.p).sum(-1)
    if options.gradients:
        slope = _to_raw(slope, logits, weight, options).to(hidden.dtype)
        grads.student[at] = slope @ head
        if grads.head is not None:
            grads.head += slope.mT @ hidden
    del logits, slope

    aux_value = torch.zeros_like(value)
    if down is not None and vocab is not None and grads.down is not None and grads.vocab is not None:
        low_rank = hidden @ down.mT
        approximate = low_rank @ vocab.mT
        if stats is not None and student_top is not None:  # before the cap, whose rounding makes ties
            stats.target_rank[at] = _rank(approximate, teacher.top, options.num_tiles)
            stats.draft_rank[at] = _rank(approximate, student_top, options.num_tiles)
        approximate = _final_logits(approximate, options)
        aux_value, slope = value_and_slope(teacher, approximate)
        if options.gradients:
            slope = _to_raw(slope, approximate, weight * options.aux_weight, options).to(hidden.dtype)
            grads.vocab += slope.mT @ low_rank
            grad_low_rank = slope @ vocab
            grads.down += grad_low_rank.mT @ hidden
            grads.student[at] += grad_low_rank @ down
    elif stats is not None:
        stats.target_rank[at] = stats.draft_rank[at] = 0
    if stats is not None:
        stats.aux_loss[at] = aux_value
    return (weight * (value + options.aux_weight * aux_value)).sum()


def _rank(scores: Tensor, ids: Tensor, num_tiles: int) -> Tensor:
    """Number of ids of the same tile (equal modulo ``num_tiles``) scored strictly above ``ids`` [C] in [C, V]."""
    above = scores > scores.gather(-1, ids[:, None])
    if num_tiles > 1:
        above &= torch.arange(scores.shape[-1], device=ids.device) % num_tiles == (ids % num_tiles)[:, None]
    return above.sum(-1)

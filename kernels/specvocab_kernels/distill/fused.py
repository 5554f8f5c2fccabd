"""Distillation on a GPU: large products in the BLAS, everything between them in one Triton kernel, constant memory.

For one chunk of teacher rows all S unroll steps are stacked into one product of ``S * C`` rows: chunks can be small,
so memory stays small, and the products stay large enough for the tensor cores. One buffer holds the student's logits,
then their gradient, then the speculator's logits, then theirs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specvocab_kernels.distill.chunked import DistillFunction, DistillOptions, Gradients
from specvocab_kernels.distill.kernel import launch_student, launch_teacher
from specvocab_kernels.distill.reference import DistillStats

TILE_ROWS = 64
ADDS_IN_FP32 = "dtype_out" in torch.ops.aten.addmm.overloads()  # torch 2.8 and later


class FusedDistill(DistillFunction):
    """All steps of a chunk at once, with a Triton kernel."""

    @staticmethod
    def forward(ctx, student, down, vocab, head, teacher, lm_head, weight, options, stats):  # type: ignore[no-untyped-def]
        num_steps, num_rows, _ = student.shape
        dtype, device = lm_head.dtype, student.device
        grads = Gradients.zeros_like(student, down, vocab, head)
        down, vocab = (None if matrix is None else matrix.to(dtype) for matrix in (down, vocab))
        head = lm_head if head is None else head.to(dtype)
        losses = torch.full((2, num_steps, num_rows), float("nan"), device=device)  # student's, speculator's
        chunk_rows = min(_whole_tiles(options.chunk_rows), num_rows)
        buffer = torch.empty((num_steps + 1) * chunk_rows, lm_head.shape[0], dtype=dtype, device=device)
        for start in range(0, num_rows, max(chunk_rows, 1)):
            rows = slice(start, start + chunk_rows)
            _one_chunk(student, down, vocab, head, teacher, lm_head, weight, options, stats, grads, losses, rows,
                       buffer)
        if stats is not None:
            stats.loss.copy_(losses[0])
            stats.aux_loss.copy_(losses[1] if down is not None else torch.zeros_like(losses[1]))
        total = (weight * losses[0]).sum()
        if down is not None:
            total = total + options.aux_weight * (weight * losses[1]).sum()
        ctx.grads = grads if options.gradients else None
        return total


def _whole_tiles(most: int) -> int:
    """Rows of a chunk, at most ``most``: what fills the products' tiles. Not a share of the rows at hand: the memory
    must not depend on them."""
    return most // TILE_ROWS * TILE_ROWS or most


def _one_chunk(
    student: Tensor,
    down: Tensor | None,
    vocab: Tensor | None,
    head: Tensor,
    teacher: Tensor,
    lm_head: Tensor,
    weight: Tensor,
    options: DistillOptions,
    stats: DistillStats | None,
    grads: Gradients,
    losses: Tensor,
    rows: slice,
    buffer: Tensor,
) -> None:
    """Losses, gradients and measurements of the teacher rows ``rows`` and all student rows that share them."""
    num_steps, count = student.shape[0], teacher[rows].shape[0]
    weights = weight[:, rows].flatten().contiguous()  # flatten is a strided view where C is 1
    # Rows of weight 0 are blanked: a NaN there would survive the multiplication by 0.
    hidden = student[:, rows].flatten(0, 1).to(lm_head.dtype).masked_fill((weights == 0)[:, None], 0.0)  # [S * C, d]
    taught = teacher[rows].to(lm_head.dtype).masked_fill((weight[:, rows] == 0).all(0)[:, None], 0.0)
    judge = partial(
        launch_student, loss=options.loss, scale=options.logit_scale, softcap=options.logit_softcap,
        collect=stats is not None,
    )  # fmt: skip

    def by_step(values: Tensor) -> Tensor:
        return values.view(num_steps, count)

    teacher_logits = torch.mm(taught, lm_head.mT, out=buffer[:count])
    shared = launch_teacher(teacher_logits, options.logit_scale, options.logit_softcap, stats is not None)
    logits = torch.mm(hidden, head.mT, out=buffer[count : count * (1 + num_steps)])
    exact = judge(logits, shared, weights)
    losses[0, :, rows] = by_step(exact.loss)
    if options.gradients:
        grad_hidden = logits @ head
        if grads.head is not None:
            _add_product(grads.head, logits.mT, hidden)
    if stats is not None:
        stats.correct[:, rows] = by_step(exact.top) == shared.top
        stats.acceptance[:, rows] = by_step(exact.acceptance)
        stats.entropy[:, rows] = shared.entropy
        stats.target_rank[:, rows] = stats.draft_rank[:, rows] = 0

    if down is not None and vocab is not None and grads.down is not None and grads.vocab is not None:
        low_rank = hidden @ down.mT
        torch.mm(low_rank, vocab.mT, out=logits)
        compared = exact.top if stats is not None else None
        approximate = judge(
            logits, shared, weights * options.aux_weight, compared=compared, num_tiles=options.num_tiles
        )
        losses[1, :, rows] = by_step(approximate.loss)
        if stats is not None:
            stats.target_rank[:, rows] = by_step(approximate.target_rank)
            stats.draft_rank[:, rows] = by_step(approximate.compared_rank)
        if options.gradients:
            _add_product(grads.vocab, logits.mT, low_rank)
            grad_low_rank = logits @ vocab
            _add_product(grads.down, grad_low_rank.mT, hidden)
            grad_hidden.addmm_(grad_low_rank, down)
    if options.gradients:
        grads.student[:, rows] = grad_hidden.view(num_steps, count, -1)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, fp32 ``total`` and products of half precision.

    The BLAS can add into the sum itself: no bf16 copy of ``[V, r]``, and no rounding of every chunk's share.
    """
    if ADDS_IN_FP32 and total.is_cuda and a.dtype != total.dtype:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.add_(a @ b)

"""Full-vocabulary distillation of a student and its vocabulary speculator, in memory that does not grow with tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specvocab_kernels._impl import choose_impl
from specvocab_kernels.distill.chunked import ChunkedDistill, DistillFunction, DistillOptions
from specvocab_kernels.distill.reference import LOSSES, DistillStats

__all__ = ["LOSSES", "DistillStats", "distill", "row_bytes"]

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-2, 1e3  # beyond, logits in fp32 say nothing about the distribution
TORCH_BYTES_PER_LOGIT = 28  # teacher: logits, p, log p; student: raw, fp32, q, slope and a temporary


def distill(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    lm_head: Tensor,
    down_proj: Tensor | None,
    vocab_proj: Tensor | None,
    weight: Tensor,
    *,
    student_head: Tensor | None = None,
    loss: str = "forward_kl",
    aux_weight: float = 0.1,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    temperature: float = 1.0,
    num_tiles: int = 1,
    max_bytes: int = 2**30,
    collect: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, DistillStats | None]:
    """Weighted sum of a named loss over all pairs of a teacher row and a student row, against the full vocabulary.

    With ``p = softmax(f(U g))`` of the teacher's row, ``q = softmax(f(U h))`` of the student's and
    ``s = softmax(f(vocab_proj down_proj h))`` of the speculator's, where ``f`` scales,
    soft-caps and divides by the temperature::

        total = sum over (step, row) of weight * (loss(p, q) + aux_weight * loss(p, s))

    Args:
        student_hidden: ``h`` [S, N, d], after the draft's final norm; gets a gradient.
        teacher_hidden: ``g`` [N, d], after the target's final norm; row n is shared by the S student rows of n.
        lm_head: ``U`` [V, d], frozen. Its dtype is the dtype of the products; softmax and sums are fp32.
        down_proj, vocab_proj: [r, d] and [V, r], both or neither; they get gradients.
        student_head: [V, d], in the place of ``U`` for the student alone; it gets a gradient.
        weight: [S, N] fp32, not negative. Where it is 0 loss and gradient are exactly 0, whatever the logits.
        loss: one of ``LOSSES``.
        temperature: of all three distributions; measurements are at that temperature too.
        num_tiles: ids are ranked among those equal to them modulo ``num_tiles``, the tile that a head with
            ``selection=tile`` would see them in; 1: among all.
        max_bytes: memory for logits; rows are worked off in chunks that fit (one row at least).
        collect: also return per-position measurements.
        impl: "torch" (chunks of plain torch), "triton", or "auto": Triton on a GPU.

    Returns:
        fp32 scalar, and ``DistillStats`` when asked for.

    Raises:
        ValueError: shapes that do not fit together, an unknown loss, or an ``impl`` that cannot run here.
    """
    steps, rows, hidden_size = student_hidden.shape
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} is not known; choose one of {', '.join(LOSSES)}")
    if teacher_hidden.shape != (rows, hidden_size) or weight.shape != (steps, rows):
        raise ValueError(
            f"student_hidden {tuple(student_hidden.shape)} [S, N, d] needs teacher_hidden [N, d] and weight [S, N], "
            f"got {tuple(teacher_hidden.shape)} and {tuple(weight.shape)}"
        )
    if lm_head.ndim != 2 or lm_head.shape[1] != hidden_size:
        raise ValueError(f"lm_head {tuple(lm_head.shape)} must be [V, {hidden_size}]")
    if student_head is not None and student_head.shape != lm_head.shape:
        raise ValueError(f"student_head {tuple(student_head.shape)} must have the shape of lm_head, "
                         f"{tuple(lm_head.shape)}")
    if (down_proj is None) != (vocab_proj is None):
        raise ValueError("down_proj and vocab_proj come together or not at all")
    if down_proj is not None and vocab_proj is not None:
        rank = down_proj.shape[0]
        if down_proj.shape != (rank, hidden_size) or vocab_proj.shape != (lm_head.shape[0], rank):
            raise ValueError(
                f"down_proj {tuple(down_proj.shape)} and vocab_proj {tuple(vocab_proj.shape)} must be "
                f"[r, {hidden_size}] and [{lm_head.shape[0]}, r]"
            )
    if not logit_scale > 0:
        raise ValueError(f"logit_scale={logit_scale} must be positive")
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise ValueError(f"temperature={temperature} must lie between {MIN_TEMPERATURE} and {MAX_TEMPERATURE}")
    if num_tiles < 1:
        raise ValueError(f"num_tiles={num_tiles} must be at least 1")
    if max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes} must be positive")

    impl = choose_impl("distill", impl, student_hidden.device)
    options = DistillOptions(
        loss=loss,
        aux_weight=aux_weight,
        # cap(z * scale) / T is the cap at softcap / T of z * scale / T.
        logit_scale=logit_scale / temperature,
        logit_softcap=None if logit_softcap is None else logit_softcap / temperature,
        num_tiles=num_tiles,
        chunk_rows=max(1, max_bytes // row_bytes(impl, steps, lm_head)),
        gradients=torch.is_grad_enabled() and any(
            matrix is not None and matrix.requires_grad
            for matrix in (student_hidden, down_proj, vocab_proj, student_head)
        ),
    )
    function: type[DistillFunction] = ChunkedDistill
    if impl == "triton":
        from specvocab_kernels.distill.fused import FusedDistill  # needs the package triton

        function = FusedDistill
    stats = DistillStats.empty((steps, rows), student_hidden.device) if collect else None
    # One position's share of a large batch, and a gradient divided by the temperature, are too small for fp16, so the
    # products are made with weights whose largest is about the temperature. Being a power of two, the unit changes no
    # bit of the result where nothing underflows.
    unit = _next_power_of_two(weight) / 2.0 ** math.floor(math.log2(temperature))
    with torch.autocast(student_hidden.device.type, enabled=False):
        total = function.apply(
            student_hidden, down_proj, vocab_proj, student_head, teacher_hidden, lm_head, weight / unit, options, stats
        )
    return total * unit, stats


def _next_power_of_two(weight: Tensor) -> Tensor:
    """Above the largest of ``weight``, as a scalar on its device; an arbitrary one where all are 0 or none is there."""
    if not weight.numel():
        return weight.new_ones(())
    largest = weight.amax().clamp_min(torch.finfo(weight.dtype).tiny)
    return largest / torch.frexp(largest).mantissa


def row_bytes(impl: str, num_steps: int, lm_head: Tensor) -> int:
    """Bytes of logits that one teacher row keeps alive: what ``max_bytes`` is divided by.

    Triton holds the row's and all its students' logits in the products' dtype; the torch path holds those of one step
    at a time, in fp32 and with the temporaries of the loss.
    """
    vocab_size = lm_head.shape[0]
    if impl == "triton":
        return (num_steps + 1) * vocab_size * lm_head.element_size()
    return TORCH_BYTES_PER_LOGIT * vocab_size

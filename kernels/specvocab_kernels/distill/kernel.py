"""Softmax, loss and gradient of logits that lie in memory: the part of distillation that is not a matrix product.

The products stay with the BLAS; these kernels make one pass to normalise a row of logits and one (two for the losses
whose gradient needs a sum over the row first) to turn it into its gradient in place. A row of student logits is read
twice and written once, and nothing else of size V moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specvocab_kernels.distill.reference import LK_HYBRID_DECAY, LOG_FLOOR

LOG_FLOOR_ = tl.constexpr(LOG_FLOOR)
MINUS_DECAY = tl.constexpr(-LK_HYBRID_DECAY)
TINY = tl.constexpr(1.17549435e-38)
MAX_BLOCK = 4096


@triton.jit
def _final(raw, scale, softcap, CAPPED: tl.constexpr):
    """Bare product -> final logit."""
    x = raw.to(tl.float32) * scale
    if CAPPED:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)  # softcap * tanh(x / softcap)
    return x


@triton.jit
def _online(x, top, total):
    """Take one block into a running maximum and sum of exponentials; -inf entries add nothing."""
    new_top = tl.maximum(top, tl.max(x, 0))
    return new_top, total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)


@triton.jit
def teacher_kernel(logits, lse_out, top_out, entropy_out, vocab_size, row_stride, scale, softcap,
                   CAPPED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Per row: log-sum-exp, argmax (the lowest id among equals) and entropy."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    ids = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    argmax = 0
    for start in range(0, vocab_size, BLOCK):
        raw = tl.load(logits + start + ids, mask=start + ids < vocab_size, other=float("-inf"))
        x = tl.where(start + ids < vocab_size, _final(raw, scale, softcap, CAPPED), float("-inf"))
        argmax = tl.where(tl.max(x, 0) > top, start + tl.argmax(x, 0), argmax)
        top, total = _online(x, top, total)
    lse = top + tl.log(total)
    entropy = 0.0
    for start in range(0, vocab_size, BLOCK):
        raw = tl.load(logits + start + ids, mask=start + ids < vocab_size, other=float("-inf"))
        x = tl.where(start + ids < vocab_size, _final(raw, scale, softcap, CAPPED), float("-inf"))
        p = tl.exp(x - lse)
        entropy += tl.sum(tl.where(p > 0.0, p * (lse - x), 0.0), 0)
    tl.store(lse_out + row, lse)
    tl.store(top_out + row, argmax)
    tl.store(entropy_out + row, entropy)


@triton.jit
def _sums(LOSS: tl.constexpr, p, q, log_p, log_q):
    """The three sums over a row that values and slopes are made of: (main, second, KL), one block's share."""
    kl = tl.sum(tl.where(p > 0.0, p * (log_p - log_q), 0.0), 0)
    if LOSS == "reverse_kl":
        main = tl.sum(tl.where(q > 0.0, q * (log_q - log_p), 0.0), 0)
        second = 0.0
    elif LOSS == "jsd":
        high = tl.maximum(log_p, log_q)
        log_m = high + tl.log(0.5 * (tl.exp(log_p - high) + tl.exp(log_q - high)))
        main = tl.sum(tl.where(p > 0.0, p * (log_p - log_m), 0.0), 0)
        second = tl.sum(tl.where(q > 0.0, q * (log_q - log_m), 0.0), 0)
    else:
        main = tl.sum(tl.minimum(p, q), 0)
        second = tl.sum(tl.where(q < p, q, 0.0), 0)
    return main, second, kl


@triton.jit
def _value(LOSS: tl.constexpr, main, second, kl):
    if LOSS == "forward_kl":
        value = kl
    elif LOSS == "reverse_kl":
        value = main
    elif LOSS == "jsd":
        value = 0.5 * (main + second)
    elif LOSS == "tv":
        value = 1.0 - main
    elif LOSS == "lk":
        value = -tl.log(tl.maximum(main, TINY))
    else:
        share = tl.exp(main * MINUS_DECAY)
        value = share * kl + (1.0 - share) * (1.0 - main)
    return value


@triton.jit
def _slope(LOSS: tl.constexpr, p, q, log_p, log_q, main, second):
    """Gradient in the final logits, see gradients.py."""
    if LOSS == "forward_kl":
        slope = q - p
    elif LOSS == "reverse_kl":
        slope = q * (log_q - log_p - main)
    elif LOSS == "jsd":
        high = tl.maximum(log_p, log_q)
        log_m = high + tl.log(0.5 * (tl.exp(log_p - high) + tl.exp(log_q - high)))
        slope = 0.5 * q * (log_q - log_m - second)
    else:
        falling = -q * (tl.where(q < p, 1.0, 0.0) - second)  # -d(acceptance)/dz
        if LOSS == "tv":
            slope = falling
        elif LOSS == "lk":
            slope = falling / tl.maximum(main, TINY)
        else:
            share = tl.exp(main * MINUS_DECAY)
            slope = share * (q - p) + (1.0 - share) * falling
    return slope


@triton.jit
def student_kernel(
    logits,  # [S * C, V] raw; overwritten by weight * gradient in the raw logits
    teacher,  # [C, V] raw
    teacher_lse, teacher_top,  # [C]
    weight,  # [S * C]
    compared,  # [S * C] int: a second id to rank (the student's argmax); read if RANK
    loss_out, acceptance_out,  # [S * C]
    top_out, target_rank_out, compared_rank_out,  # [S * C] int64
    num_steps, num_rows, vocab_size, row_stride, teacher_stride, scale, softcap,
    LOSS: tl.constexpr, CAPPED: tl.constexpr, COLLECT: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time are the steps of one teacher row, which then comes from the cache.
    at = tl.program_id(0) // num_steps
    row = ((tl.program_id(0) % num_steps) * num_rows + at).to(tl.int64)
    logits += row * row_stride
    teacher += at.to(tl.int64) * teacher_stride
    ids = tl.arange(0, BLOCK)
    w = tl.load(weight + row)
    target = tl.load(teacher_top + at)
    if RANK:
        other = tl.load(compared + row)
        target_score = tl.load(logits + target).to(tl.float32)
        other_score = tl.load(logits + other).to(tl.float32)

    top = float("-inf")
    total = 0.0
    argmax = 0
    above_target = 0
    above_other = 0
    for start in range(0, vocab_size, BLOCK):
        raw = tl.load(logits + start + ids, mask=start + ids < vocab_size, other=float("-inf")).to(tl.float32)
        x = tl.where(start + ids < vocab_size, _final(raw, scale, softcap, CAPPED), float("-inf"))
        if COLLECT:
            argmax = tl.where(tl.max(x, 0) > top, start + tl.argmax(x, 0), argmax)
        if RANK:
            above_target += tl.sum((raw > target_score).to(tl.int32), 0)
            above_other += tl.sum((raw > other_score).to(tl.int32), 0)
        top, total = _online(x, top, total)
    lse = top + tl.log(total)
    t_lse = tl.load(teacher_lse + at)

    main = 0.0
    second = 0.0
    kl = 0.0
    accept = 0.0
    if LOSS != "forward_kl":
        for start in range(0, vocab_size, BLOCK):
            inside = start + ids < vocab_size
            x = _final(tl.load(logits + start + ids, mask=inside, other=0.0), scale, softcap, CAPPED)
            t = _final(tl.load(teacher + start + ids, mask=inside, other=0.0), scale, softcap, CAPPED)
            q = tl.where(inside, tl.exp(x - lse), 0.0)
            p = tl.where(inside, tl.exp(t - t_lse), 0.0)
            log_q = tl.maximum(x - lse, LOG_FLOOR_)
            log_p = tl.maximum(t - t_lse, LOG_FLOOR_)
            more_main, more_second, more_kl = _sums(LOSS, p, q, log_p, log_q)
            main += more_main
            second += more_second
            kl += more_kl

    for start in range(0, vocab_size, BLOCK):
        inside = start + ids < vocab_size
        x = _final(tl.load(logits + start + ids, mask=inside, other=0.0), scale, softcap, CAPPED)
        t = _final(tl.load(teacher + start + ids, mask=inside, other=0.0), scale, softcap, CAPPED)
        q = tl.where(inside, tl.exp(x - lse), 0.0)
        p = tl.where(inside, tl.exp(t - t_lse), 0.0)
        log_q = tl.maximum(x - lse, LOG_FLOOR_)
        log_p = tl.maximum(t - t_lse, LOG_FLOOR_)
        if LOSS == "forward_kl":
            kl += tl.sum(tl.where(p > 0.0, p * (log_p - log_q), 0.0), 0)
        if COLLECT:
            accept += tl.sum(tl.minimum(p, q), 0)
        slope = _slope(LOSS, p, q, log_p, log_q, main, second) * (w * scale)
        if CAPPED:
            slope *= 1.0 - (x / softcap) * (x / softcap)
        tl.store(logits + start + ids, slope.to(logits.dtype.element_ty), mask=inside)

    tl.store(loss_out + row, _value(LOSS, main, second, kl))
    if COLLECT:
        tl.store(acceptance_out + row, accept)
        tl.store(top_out + row, argmax)
    if RANK:
        tl.store(target_rank_out + row, above_target)
        tl.store(compared_rank_out + row, above_other)


def block_size(vocab_size: int) -> int:
    """Ids of one pass: the whole row if it is short."""
    return min(MAX_BLOCK, triton.next_power_of_2(vocab_size))


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """One chunk of teacher rows. ``logits`` [C, V] raw; the others [C]."""

    logits: Tensor
    lse: Tensor
    top: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True)
class StudentRows:
    """What one launch says about its rows, all [S * C]; pre-filled with NaN and -1, so that an unwritten one shows."""

    loss: Tensor
    acceptance: Tensor
    top: Tensor
    target_rank: Tensor
    compared_rank: Tensor


def launch_teacher(logits: Tensor, scale: float, softcap: float | None) -> TeacherRows:
    """Normalise raw teacher ``logits`` [C, V]."""
    count, vocab_size = logits.shape
    lse, entropy = (torch.full((count,), float("nan"), device=logits.device) for _ in range(2))
    top = torch.full((count,), -1, dtype=torch.int64, device=logits.device)
    teacher_kernel[(count,)](
        logits, lse, top, entropy, vocab_size, logits.stride(0), scale, softcap or 1.0,
        CAPPED=softcap is not None, BLOCK=block_size(vocab_size), num_warps=8,
    )  # fmt: skip
    return TeacherRows(logits, lse, top, entropy)


def launch_student(
    logits: Tensor,
    teacher: TeacherRows,
    weight: Tensor,
    *,
    loss: str,
    scale: float,
    softcap: float | None,
    collect: bool,
    compared: Tensor | None = None,
) -> StudentRows:
    """Turn raw student ``logits`` [S * C, V] into ``weight`` [S * C] times their gradient, in place.

    Row ``s * C + n`` belongs to teacher row ``n``. With ``collect`` argmax and acceptance are measured too, and with
    ``compared`` [S * C] also how many ids score above the teacher's argmax and above ``compared``.
    """
    count, vocab_size = teacher.logits.shape
    size, device = logits.shape[0], logits.device
    value, accept = (torch.full((size,), float("nan"), device=device) for _ in range(2))
    top, target_rank, compared_rank = (torch.full((size,), -1, dtype=torch.int64, device=device) for _ in range(3))
    student_kernel[(size,)](
        logits, teacher.logits, teacher.lse, teacher.top, weight,
        top if compared is None else compared,  # a pointer is wanted even where it stays unread
        value, accept, top, target_rank, compared_rank,
        size // count, count, vocab_size, logits.stride(0), teacher.logits.stride(0), scale, softcap or 1.0,
        LOSS=loss, CAPPED=softcap is not None, COLLECT=collect, RANK=compared is not None,
        BLOCK=block_size(vocab_size), num_warps=8,
    )  # fmt: skip
    return StudentRows(value, accept, top, target_rank, compared_rank)

"""Softmax, loss and gradient of logits that lie in memory: the part of distillation that is not a matrix product.

The products stay with the BLAS; these kernels make one pass to normalise a row of logits and one (two for the losses
whose gradient needs a sum over the row first) to turn it into its gradient in place. A row of student logits is read
twice and written once, and nothing else of size V moves.

A program owns one row and walks along it in tiles [DEPTH, LANES]. Every lane keeps its own running maximum and sums,
so the threads meet once at the end of the row and not once a tile.
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
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e38)  # a running maximum starts here: from -inf, a lane of -inf logits would turn NaN
NO_ID = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What a program takes in at a time. Chosen by measurement, see docs/PERFORMANCE.md."""

    depth: int
    lanes: int
    num_warps: int

    def fitting(self, vocab_size: int) -> Tile:
        """No longer than a row, for tests on small vocabularies."""
        lanes = min(self.lanes, triton.next_power_of_2(vocab_size))
        return Tile(depth=self.depth if lanes == self.lanes else 1, lanes=lanes, num_warps=self.num_warps)


TILE = Tile(depth=2, lanes=2048, num_warps=8)


@triton.jit
def _load(pointer, start, vocab_size, scale, softcap, CAPPED: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr):
    """Final and raw logits of the tile at ``start``, -inf past the end, and the tile's ids."""
    ids = start + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    raw = tl.load(pointer + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    x = raw * scale
    if CAPPED:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)  # softcap * tanh(x / softcap)
        x = tl.where(ids < vocab_size, x, float("-inf"))
    return x, raw, ids


@triton.jit
def _exp(x, shift):
    """exp(x - shift) in two instructions an element: one multiply-add, one exp2. Not for a ``shift`` of LOWEST: the
    multiply-add leaves the rounding error of the second product, relative to its size."""
    return tl.exp2(x * LOG2E - shift * LOG2E)


@triton.jit
def _online(x, top, total):
    """Take a tile into each lane's running maximum and sum of exponentials; -inf entries add nothing."""
    new_top = tl.maximum(top, tl.max(x, 0))
    return new_top, total * tl.exp(top - new_top) + tl.sum(_exp(x, new_top[None, :]), 0)


@triton.jit
def _best(x, ids, top, best):
    """Id of each lane's maximum, the lowest among equals; ``top`` is the maximum before this tile."""
    high = tl.max(x, 0)
    here = tl.min(tl.where(x == high[None, :], ids, NO_ID), 0)
    return tl.where(high > top, here, best)


@triton.jit
def _join(top, total):
    """All lanes' maxima and sums -> the row's maximum and log-sum-exp."""
    row_top = tl.max(top, 0)
    return row_top, row_top + tl.log(tl.sum(total * tl.exp(top - row_top), 0))


@triton.jit
def _argmax(top, row_top, best, vocab_size):
    """The lowest id that has the row's maximum; in range even for a row of NaN, because it is used as an index."""
    return tl.minimum(tl.min(tl.where(top == row_top, best, NO_ID), 0), vocab_size - 1)


@triton.jit
def teacher_kernel(logits, lse_out, top_out, entropy_out, vocab_size, row_stride, scale, softcap,
                   CAPPED: tl.constexpr, COLLECT: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Per row: log-sum-exp, and for measurements argmax (the lowest id among equals) and entropy."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    top = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    best = tl.full([LANES], NO_ID, tl.int32)
    for start in range(0, vocab_size, DEPTH * LANES):
        x, _, ids = _load(logits, start, vocab_size, scale, softcap, CAPPED, DEPTH, LANES)
        if COLLECT:
            best = _best(x, ids, top, best)
        top, total = _online(x, top, total)
    row_top, lse = _join(top, total)
    tl.store(lse_out + row, lse)
    if COLLECT:
        entropy = tl.zeros([LANES], tl.float32)
        for start in range(0, vocab_size, DEPTH * LANES):
            x, _, ids = _load(logits, start, vocab_size, scale, softcap, CAPPED, DEPTH, LANES)
            p = _exp(x, lse)
            entropy += tl.sum(tl.where(p > 0.0, p * (lse - x), 0.0), 0)
        tl.store(top_out + row, _argmax(top, row_top, best, vocab_size))
        tl.store(entropy_out + row, tl.sum(entropy, 0))


@triton.jit
def _sums(LOSS: tl.constexpr, p, q, log_p, log_q):
    """The three sums that values and slopes are made of, (main, second, KL): each lane's share of one tile."""
    kl = tl.sum(tl.where(p > 0.0, p * (log_p - log_q), 0.0), 0)
    if LOSS == "reverse_kl":
        main = tl.sum(tl.where(q > 0.0, q * (log_q - log_p), 0.0), 0)
        second = tl.zeros_like(main)
    elif LOSS == "jsd":
        high = tl.maximum(log_p, log_q)
        log_m = high + tl.log(0.5 * (tl.exp(log_p - high) + tl.exp(log_q - high)))
        main = tl.sum(tl.where(p > 0.0, p * (log_p - log_m), 0.0), 0)
        second = tl.sum(tl.where(q > 0.0, q * (log_q - log_m), 0.0), 0)
    else:
        tl.static_assert((LOSS == "tv") | (LOSS == "lk") | (LOSS == "lk_hybrid"))
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
        tl.static_assert(LOSS == "lk_hybrid")
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
            tl.static_assert(LOSS == "lk_hybrid")
            share = tl.exp(main * MINUS_DECAY)
            slope = share * (q - p) + (1.0 - share) * falling
    return slope


@triton.jit
def _log_probs(x, t, lse, t_lse):
    """(log p, log q), floored as in the reference."""
    return tl.maximum(t - t_lse, LOG_FLOOR_), tl.maximum(x - lse, LOG_FLOOR_)


@triton.jit(do_not_specialize=["num_steps", "num_rows"])  # they change from batch to batch
def student_kernel(
    logits,  # [S * C, V] raw; overwritten by weight * gradient in the raw logits
    teacher,  # [C, V] raw
    teacher_lse, teacher_top,  # [C]
    weight,  # [S * C]
    compared,  # [S * C] int: a second id to rank (the student's argmax); read if RANK
    loss_out, acceptance_out,  # [S * C]
    top_out, target_rank_out, compared_rank_out,  # [S * C] int64
    num_steps, num_rows, vocab_size, num_tiles, row_stride, teacher_stride, scale, softcap,
    LOSS: tl.constexpr, CAPPED: tl.constexpr, COLLECT: tl.constexpr, RANK: tl.constexpr, TILED: tl.constexpr,
    DEPTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time are the steps of one teacher row, which then comes from the cache.
    at = tl.program_id(0) // num_steps
    row = ((tl.program_id(0) % num_steps) * num_rows + at).to(tl.int64)
    logits += row * row_stride
    teacher += at.to(tl.int64) * teacher_stride
    w = tl.load(weight + row)
    if RANK:
        target_id, other_id = tl.load(teacher_top + at), tl.load(compared + row)
        target_score = tl.load(logits + target_id).to(tl.float32)
        other_score = tl.load(logits + other_id).to(tl.float32)

    top = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    best = tl.full([LANES], NO_ID, tl.int32)
    above_target = tl.zeros([LANES], tl.int32)
    above_other = tl.zeros([LANES], tl.int32)
    for start in range(0, vocab_size, DEPTH * LANES):
        x, raw, ids = _load(logits, start, vocab_size, scale, softcap, CAPPED, DEPTH, LANES)
        if COLLECT:
            best = _best(x, ids, top, best)
        if RANK:
            beats_target, beats_other = raw > target_score, raw > other_score
            if TILED:
                beats_target &= ids % num_tiles == target_id % num_tiles
                beats_other &= ids % num_tiles == other_id % num_tiles
            above_target += tl.sum(beats_target.to(tl.int32), 0)
            above_other += tl.sum(beats_other.to(tl.int32), 0)
        top, total = _online(x, top, total)
    row_top, lse = _join(top, total)
    t_lse = tl.load(teacher_lse + at)

    # Value and slope of most losses need sums over the row before the first slope can be written.
    main = tl.zeros([LANES], tl.float32)
    second = tl.zeros([LANES], tl.float32)
    kl = tl.zeros([LANES], tl.float32)
    if LOSS != "forward_kl":
        for start in range(0, vocab_size, DEPTH * LANES):
            x, _, ids = _load(logits, start, vocab_size, scale, softcap, CAPPED, DEPTH, LANES)
            t, _, ids = _load(teacher, start, vocab_size, scale, softcap, CAPPED, DEPTH, LANES)
            p, q = _exp(t, t_lse), _exp(x, lse)
            log_p, log_q = _log_probs(x, t, lse, t_lse)
            more_main, more_second, more_kl = _sums(LOSS, p, q, log_p, log_q)
            main += more_main
            second += more_second
            kl += more_kl
    main_sum = tl.sum(main, 0)
    second_sum = tl.sum(second, 0)

    accept = tl.zeros([LANES], tl.float32)
    for start in range(0, vocab_size, DEPTH * LANES):
        x, _, ids = _load(logits, start, vocab_size, scale, softcap, CAPPED, DEPTH, LANES)
        t, _, ids = _load(teacher, start, vocab_size, scale, softcap, CAPPED, DEPTH, LANES)
        p, q = _exp(t, t_lse), _exp(x, lse)
        log_p, log_q = _log_probs(x, t, lse, t_lse)
        if LOSS == "forward_kl":  # where p > 0 its logarithm is above the floor
            kl += tl.sum(tl.where(p > 0.0, p * ((t - t_lse) - log_q), 0.0), 0)
        if COLLECT:
            accept += tl.sum(tl.minimum(p, q), 0)
        slope = _slope(LOSS, p, q, log_p, log_q, main_sum, second_sum) * (w * scale)
        if CAPPED:
            slope *= 1.0 - (x / softcap) * (x / softcap)
        tl.store(logits + ids, slope.to(logits.dtype.element_ty), mask=ids < vocab_size)

    tl.store(loss_out + row, _value(LOSS, main_sum, second_sum, tl.sum(kl, 0)))
    if COLLECT:
        tl.store(acceptance_out + row, tl.sum(accept, 0))
        tl.store(top_out + row, _argmax(top, row_top, best, vocab_size))
    if RANK:
        tl.store(target_rank_out + row, tl.sum(above_target, 0))
        tl.store(compared_rank_out + row, tl.sum(above_other, 0))


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


def launch_teacher(logits: Tensor, scale: float, softcap: float | None, collect: bool) -> TeacherRows:
    """Normalise raw teacher ``logits`` [C, V]; argmax and entropy are measured with ``collect``."""
    count, vocab_size = logits.shape
    tile = TILE.fitting(vocab_size)
    lse, entropy = (torch.full((count,), float("nan"), device=logits.device) for _ in range(2))
    top = torch.full((count,), -1, dtype=torch.int64, device=logits.device)
    teacher_kernel[(count,)](
        logits, lse, top, entropy, vocab_size, logits.stride(0), scale, softcap or 1.0,
        CAPPED=softcap is not None, COLLECT=collect, DEPTH=tile.depth, LANES=tile.lanes, num_warps=tile.num_warps,
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
    num_tiles: int = 1,
) -> StudentRows:
    """Turn raw student ``logits`` [S * C, V] into ``weight`` [S * C] times their gradient, in place.

    Row ``s * C + n`` belongs to teacher row ``n``. With ``collect`` argmax and acceptance are measured too, and with
    ``compared`` [S * C] also how many ids score above the teacher's argmax and above ``compared``, of the ids that are
    equal to them modulo ``num_tiles``.
    """
    count, vocab_size = teacher.logits.shape
    tile = TILE.fitting(vocab_size)
    size, device = logits.shape[0], logits.device
    value, accept = (torch.full((size,), float("nan"), device=device) for _ in range(2))
    top, target_rank, compared_rank = (torch.full((size,), -1, dtype=torch.int64, device=device) for _ in range(3))
    student_kernel[(size,)](
        logits, teacher.logits, teacher.lse, teacher.top, weight,
        top if compared is None else compared,  # a pointer is wanted even where it stays unread
        value, accept, top, target_rank, compared_rank,
        size // count, count, vocab_size, num_tiles, logits.stride(0), teacher.logits.stride(0), scale, softcap or 1.0,
        LOSS=loss, CAPPED=softcap is not None, COLLECT=collect, RANK=compared is not None,
        TILED=num_tiles > 1, DEPTH=tile.depth, LANES=tile.lanes, num_warps=tile.num_warps,
    )  # fmt: skip
    return StudentRows(value, accept, top, target_rank, compared_rank)

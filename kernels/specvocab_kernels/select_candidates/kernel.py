"""``select_candidates`` in Triton: radix select over the order of the bits, 11 bits a pass.

Each pass counts, for the scores that still tie with the k-th largest, how often every value of the next bits occurs;
the last two kernels write the ids in ascending order. Counts are integers, so their atomic sums do not depend on the
order of the programs: the result is the same every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specvocab_kernels._impl import interpreting

BLOCK = 4096  # scores of one program
BINS = 2048
SHIFTS = (21, 10, 0)


@triton.jit
def _unsigned_keys(scores):
    """int64 in [0, 2^32) ordered like the scores: -0 equals 0, NaN of either sign is the largest."""
    bits = (scores.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(scores != scores, 0x7FC00000, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000000


@triton.jit
def _threshold(counts_ptr, row, k, PASSES: tl.constexpr, BINS_: tl.constexpr):
    """Leading bits of the k-th largest key after ``PASSES`` passes, and its rank among the keys that share them."""
    value = tl.zeros((), dtype=tl.int64)
    rank = k.to(tl.int64)
    bins = tl.arange(0, BINS_)
    for i in tl.static_range(PASSES):
        counts = tl.load(counts_ptr + (row * 3 + i) * BINS_ + bins).to(tl.int64)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # scores in higher bins
        hit = (above < rank) & (rank <= above + counts)
        value = value * (1024 if i == 2 else 2048) + tl.sum(tl.where(hit, bins, 0).to(tl.int64), 0)
        rank -= tl.sum(tl.where(hit, above, 0), 0)
    return value, rank


@triton.jit(do_not_specialize=["vocab_size", "k"])
def _count_kernel(
    scores_ptr,  # [B, V]
    counts_ptr,  # [B, 3, BINS] int32, zero in this pass's third
    vocab_size,
    k,
    row_stride,
    PASS: tl.constexpr,
    BLOCK_: tl.constexpr,
    BINS_: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK_ + tl.arange(0, BLOCK_)
    inside = ids < vocab_size
    keys = _unsigned_keys(tl.load(scores_ptr + row * row_stride + ids, mask=inside, other=0.0))
    value, _ = _threshold(counts_ptr, row, k, PASS, BINS_)
    bits: tl.constexpr = 10 if PASS == 2 else 11
    wanted = inside
    if PASS > 0:
        wanted = inside & ((keys >> (SHIFT + bits)) == value)
    digit = ((keys >> SHIFT) & ((1 << bits) - 1)).to(tl.int32)
    tl.atomic_add(counts_ptr + (row * 3 + PASS) * BINS_ + digit, 1, mask=wanted, sem="relaxed")


@triton.jit(do_not_specialize=["vocab_size", "k", "num_blocks"])
def _block_kernel(
    scores_ptr,
    counts_ptr,
    larger_ptr,  # [B, num_blocks] int32: keys above the threshold
    equal_ptr,  # [B, num_blocks] int32: keys equal to it
    vocab_size,
    k,
    row_stride,
    num_blocks,
    BLOCK_: tl.constexpr,
    BINS_: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK_ + tl.arange(0, BLOCK_)
    inside = ids < vocab_size
    keys = _unsigned_keys(tl.load(scores_ptr + row * row_stride + ids, mask=inside, other=0.0))
    value, _ = _threshold(counts_ptr, row, k, 3, BINS_)
    tl.store(larger_ptr + row * num_blocks + block, tl.sum((inside & (keys > value)).to(tl.int32), 0))
    tl.store(equal_ptr + row * num_blocks + block, tl.sum((inside & (keys == value)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["vocab_size", "k", "num_blocks"])
def _write_kernel(
    scores_ptr,
    counts_ptr,
    larger_ptr,
    equal_ptr,
    ids_ptr,  # [B, k] int32
    vocab_size,
    k,
    row_stride,
    num_blocks,
    BLOCK_: tl.constexpr,
    BINS_: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK_ + tl.arange(0, BLOCK_)
    inside = ids < vocab_size
    keys = _unsigned_keys(tl.load(scores_ptr + row * row_stride + ids, mask=inside, other=0.0))
    value, ties = _threshold(counts_ptr, row, k, 3, BINS_)
    others = tl.arange(0, BLOCKS)
    before = others < block
    larger_before = tl.sum(tl.load(larger_ptr + row * num_blocks + others, mask=before, other=0), 0)
    equal_before = tl.sum(tl.load(equal_ptr + row * num_blocks + others, mask=before, other=0), 0)
    equal = (inside & (keys == value)).to(tl.int32)
    taken = (inside & (keys > value)) | ((equal > 0) & (equal_before + tl.cumsum(equal, 0) <= ties))
    start = larger_before + tl.minimum(equal_before.to(tl.int64), ties)
    place = start + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(ids_ptr + row * k + place, ids, mask=taken & (place < k))


def select_candidates_triton(scores: Tensor, k: int) -> Tensor:
    """``[B, V] -> [B, min(k, V)]`` int32, ascending; among equal scores the lowest ids. ``scores``: rows contiguous."""
    batch, vocab_size = scores.shape
    if k >= vocab_size:
        return torch.arange(vocab_size, dtype=torch.int32, device=scores.device).repeat(batch, 1)
    ids = torch.empty(batch, k, dtype=torch.int32, device=scores.device)
    if batch == 0:
        return ids
    block = min(BLOCK, max(256, triton.next_power_of_2(vocab_size))) if interpreting() else BLOCK
    num_blocks = triton.cdiv(vocab_size, block)
    counts = torch.zeros(batch, len(SHIFTS), BINS, dtype=torch.int32, device=scores.device)
    larger = torch.empty(batch, num_blocks, dtype=torch.int32, device=scores.device)
    equal = torch.empty_like(larger)
    grid = (batch, num_blocks)
    stride = scores.stride(0)
    shape = dict(BLOCK_=block, BINS_=BINS, num_warps=8)
    with torch.cuda.device_of(scores):
        for i, shift in enumerate(SHIFTS):
            _count_kernel[grid](scores, counts, vocab_size, k, stride, PASS=i, SHIFT=shift, **shape)
        _block_kernel[grid](scores, counts, larger, equal, vocab_size, k, stride, num_blocks, **shape)
        _write_kernel[grid](
            scores,
            counts,
            larger,
            equal,
            ids,
            vocab_size,
            k,
            stride,
            num_blocks,
            BLOCKS=triton.next_power_of_2(num_blocks),
            **shape,
        )
    return ids

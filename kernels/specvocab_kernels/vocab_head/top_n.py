"""The best n of a row of candidate logits and their log-probabilities, in two small kernels.

The first takes ``CHUNK`` candidates each, the second merges. A key holds a logit's order and, below it, the place
counted from the end: no two keys are equal, so that the result does not depend on how the work is divided.
"""

import triton
import triton.language as tl

from specvocab_kernels.vocab_head.common import order_keys

NONE = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["width", "chunks"])
def partial_kernel(
    logits_ptr,  # [B, width] float32
    keys_ptr,  # [B, chunks, n] int64
    maxima_ptr,  # [B, chunks] float32
    sums_ptr,  # [B, chunks] float32: of exp(logit - maximum)
    width,
    chunks,
    n,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < width
    if PDL:
        tl.extra.cuda.gdc_wait()
    logits = tl.load(logits_ptr + row * width + place, mask=inside, other=float("-inf"))
    maximum = tl.max(logits, 0)
    shift = tl.where(maximum > float("-inf"), maximum, 0.0)
    out = row * chunks + chunk
    tl.store(maxima_ptr + out, shift)
    tl.store(sums_ptr + out, tl.sum(tl.exp(logits - shift), 0))
    keys = (order_keys(logits).to(tl.int64) << 32) + (0x7FFFFFFF - place)
    keys = tl.where(inside, keys, NONE)
    for j in range(n):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + out * n + j, best)
        keys = tl.where(keys == best, NONE, keys)


@triton.jit(do_not_specialize=["width", "chunks", "ids_stride"])
def merge_kernel(
    logits_ptr,
    ids_ptr,  # [B or 1, width] int32
    keys_ptr,
    maxima_ptr,
    sums_ptr,
    best_ids_ptr,  # [B, n] int32
    log_probs_ptr,  # [B, n] float32
    width,
    chunks,
    ids_stride,
    n,
    KEYS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    chunk = tl.arange(0, CHUNKS)
    maxima = tl.load(maxima_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    sums = tl.load(sums_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    shift = tl.max(maxima, 0)
    total = shift + tl.log(tl.sum(sums * tl.exp(maxima - shift), 0))
    slot = tl.arange(0, KEYS)
    keys = tl.load(keys_ptr + row * chunks * n + slot, mask=slot < chunks * n, other=NONE)
    for j in range(n):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, NONE, keys)
        place = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        tl.store(best_ids_ptr + row * n + j, tl.load(ids_ptr + row * ids_stride + place))
        tl.store(log_probs_ptr + row * n + j, tl.load(logits_ptr + row * width + place) - total)

"""What the kernels of the head share, and the small ones that make ``down_proj · h``.

``PDL``: programmatic dependent launch. A kernel starts while the one before it still runs, and waits for its results
only where it needs them.
"""

import triton
import triton.language as tl

from specvocab_kernels.vocab_head.selection import SELECTED

SELECTED_ = tl.constexpr(SELECTED)
MAX_UNROLLED = tl.constexpr(4)  # candidates of a tile; beyond, compiling would take minutes
# One compilation serves every vocabulary and batch size.
SIZES = ("batch", "vocab_size", "num_tiles", "num_candidates", "per_tile", "extra")


@triton.jit
def order_keys(scores):
    """int32 keys ordered like the scores; see ``selection.order_keys``."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(scores != scores, 0x7FC00000, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def scale_and_cap(logits, scale, softcap, CAPPED: tl.constexpr):
    logits = logits * scale
    if CAPPED:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)  # softcap * tanh(logits / softcap)
    return logits


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """``acc + a · b`` in float32; ``UPCAST``: the interpreter's product of bfloat16 is wrong."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _round(reduced, largest, KIND: tl.constexpr):
    """``reduced`` as the matrix units take it, relative to the row's largest element, in one or two parts.

    int8: the second part holds what rounding left, so that rounding the hidden side adds nothing to the error of the
    8-bit weights. fp8 weights are multiplied as float16, which holds them exactly.
    """
    unit = reduced / largest
    if KIND == "int8":
        unit *= 127.0
        rounded = tl.floor(unit + 0.5)
        high = rounded.to(tl.int8)
        low = tl.floor((unit - rounded) * 254.0 + 0.5).to(tl.int8)
    else:
        if KIND == "fp8" or KIND == "fp16":
            high = unit.to(tl.float16)
        elif KIND == "bf16":
            high = unit.to(tl.bfloat16)
        else:
            high = unit
        low = high
    return high, low


@triton.jit(do_not_specialize=["batch"])
def reduce_kernel(
    hidden_ptr,  # [B, d]
    down_ptr,  # [r, d]
    reduced_ptr,  # [B, r] float32
    batch,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """``reduced = hidden · down_projᵀ``, for few rows: sums on the lanes, every row of ``down_proj`` read once."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    products = tl.zeros((BLOCK_B, BLOCK_R, BLOCK_D), dtype=tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        down = tl.load(
            down_ptr + r[:, None] * HIDDEN + column[None, :],
            mask=(r < RANK)[:, None] & (column < HIDDEN)[None, :],
            other=0.0,
        )
        hidden = tl.load(
            hidden_ptr + b[:, None] * HIDDEN + column[None, :],
            mask=(b < batch)[:, None] & (column < HIDDEN)[None, :],
            other=0.0,
        )
        products += hidden.to(tl.float32)[:, None, :] * down.to(tl.float32)[None, :, :]
    tl.store(
        reduced_ptr + b[:, None] * RANK + r[None, :],
        tl.sum(products, axis=2),
        mask=(b < batch)[:, None] & (r < RANK)[None, :],
    )


@triton.jit(do_not_specialize=["batch"])
def reduce_dot_kernel(
    hidden_ptr,
    down_ptr,
    reduced_ptr,
    batch,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SAME: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same for many rows, on the matrix units."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_B, BLOCK_R), dtype=tl.float32)
    for start in range(0, HIDDEN, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        inside = column < HIDDEN
        down = tl.load(
            down_ptr + r[:, None] * HIDDEN + column[None, :], mask=(r < RANK)[:, None] & inside[None, :], other=0.0
        )
        hidden = tl.load(
            hidden_ptr + b[:, None] * HIDDEN + column[None, :], mask=(b < batch)[:, None] & inside[None, :], other=0.0
        )
        if not SAME:
            down, hidden = down.to(tl.float32), hidden.to(tl.float32)
        acc = dot(hidden, tl.trans(down), acc, UPCAST)
    tl.store(reduced_ptr + b[:, None] * RANK + r[None, :], acc, mask=(b < batch)[:, None] & (r < RANK)[None, :])


@triton.jit
def round_kernel(
    reduced_ptr,  # [B, r] float32
    high_ptr,  # [B, r]
    low_ptr,  # [B, r], for int8
    units_ptr,  # [B] float32: what one unit of a row is worth
    totals_ptr,  # [B] int32: set to zero, for the selection to count in
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """``reduced`` rounded once for all tiles; see ``_round``."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # first: the next kernel starts meanwhile, and then waits itself
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_R)
    inside = column < RANK
    reduced = tl.load(reduced_ptr + b * RANK + column, mask=inside, other=0.0)
    largest = tl.max(tl.abs(reduced), 0)
    largest = tl.where(largest > 0, largest, 1.0)
    high, low = _round(reduced, largest, KIND)
    tl.store(high_ptr + b * RANK + column, high, mask=inside)
    if KIND == "int8":
        tl.store(low_ptr + b * RANK + column, low, mask=inside)
    tl.store(units_ptr + b, largest)
    tl.store(totals_ptr + b, 0)

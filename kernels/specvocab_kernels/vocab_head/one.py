"""The tile head for one hidden state: everything after ``down_proj · h`` in one kernel.

A program owns one tile of the stored ``vocab_proj``: it reads those rows once, keeps the best ids of the tile and
multiplies their rows of ``lm_head`` at once. No ``[B, V]`` tensor exists, nothing waits for a global selection, and
the dependent reads of one tile hide behind the streaming reads of the others.
"""

import triton
import triton.language as tl

from specvocab_kernels.vocab_head.common import SELECTED_, SIZES, order_keys, scale_and_cap


@triton.jit
def _dp4a(a, b, acc, EMULATE: tl.constexpr):
    """``acc`` plus the products of the four int8 in ``a`` with those in ``b``, all int32."""
    if EMULATE:
        for i in tl.static_range(4):
            acc += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
        return acc
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _pack(reduced_ptr, word, inside, largest):
    """Four neighbours of ``reduced`` as int8 in one int32, and what rounding left of them, in 64ths."""
    high = tl.zeros_like(word)
    low = tl.zeros_like(word)
    for i in tl.static_range(4):
        unit = tl.load(reduced_ptr + 4 * word + i, mask=inside, other=0.0) * (127.0 / largest)
        rounded = tl.floor(unit + 0.5)
        high |= (rounded.to(tl.int32) & 0xFF) << (8 * i)
        low |= (tl.floor((unit - rounded) * 64.0 + 0.5).to(tl.int32) & 0xFF) << (8 * i)
    return high, low


@triton.jit
def _load_rows(pointers, column, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of ``LENGTH`` elements as a tuple of pieces ``WIDTH`` columns wide, none of them waited for."""
    pieces = ()
    for first in tl.static_range(0, LENGTH, WIDTH):
        inside = (first + column < LENGTH)[None, :]
        piece = tl.load(pointers + first, mask=inside, other=0.0, eviction_policy="evict_first")
        pieces = pieces + (piece,)  # type: ignore[assignment]  # noqa: RUF005 (Triton does not unpack)
    return pieces


@triton.jit(do_not_specialize=SIZES[1:])
def tile_kernel(
    hidden_ptr,  # [B, d]
    reduced_ptr,  # [B, r] float32
    proj_ptr,  # [num_tiles * TILE, r]
    scales_ptr,  # [num_tiles * TILE] float32
    lm_head_ptr,  # [V, d]
    ids_ptr,  # [B, k] int32
    logits_ptr,  # [B, k] float32
    vocab_size,
    num_tiles,
    num_candidates,
    per_tile,  # candidates of every tile, one more in the first `extra`
    extra,
    logit_scale,
    softcap,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    KEEP: tl.constexpr,
    KEEP_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    EMULATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile for one hidden state. The tile is read in ``PARTS`` parts, the next one while one is worked on.

    A row is read in pieces of ``COLUMNS`` elements, a power of two: where one piece spans the row, the lanes beyond
    ``RANK`` idle.
    """
    SUB: tl.constexpr = TILE // PARTS
    # int8: four elements a word, multiplied four at a time.
    WORDS: tl.constexpr = KIND == "int8" and RANK % 4 == 0 and RANK <= 2048
    LENGTH: tl.constexpr = RANK // 4 if WORDS else RANK
    WIDTH: tl.constexpr = COLUMNS // 4 if WORDS else COLUMNS
    PIECES: tl.constexpr = (LENGTH + WIDTH - 1) // WIDTH
    t = tl.program_id(0)
    batch_row = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    part = tl.arange(0, SUB)
    # Rows of the stored vocab_proj: int64, because a row index times its length passes 2^31.
    start = t.to(tl.int64) * TILE
    if WORDS:
        proj_ptr = proj_ptr.to(tl.pointer_type(tl.int32))
    pointers = proj_ptr + (start + part)[:, None] * LENGTH + column[None, :]
    pieces = _load_rows(pointers, column, LENGTH, WIDTH)
    place = tl.arange(0, PARTS)[:, None] * SUB + part[None, :]  # [PARTS, SUB]
    if SCALED:
        scales = tl.load(scales_ptr + start + place)
    if PDL:
        tl.extra.cuda.gdc_wait()
    reduced_ptr += batch_row * RANK
    if WORDS:
        all_columns = tl.arange(0, BLOCK_R)
        largest = tl.max(tl.abs(tl.load(reduced_ptr + all_columns, mask=all_columns < RANK, other=0.0)), 0)
        largest = tl.where(largest > 0, largest, 1.0)
    factors = ()
    for first in tl.static_range(0, LENGTH, WIDTH):
        if WORDS:
            factor = _pack(reduced_ptr, first + column, first + column < LENGTH, largest)
        else:
            factor = tl.load(reduced_ptr + first + column, mask=first + column < LENGTH, other=0.0)
        factors = factors + (factor,)  # type: ignore[assignment]  # noqa: RUF005

    scores = tl.zeros((PARTS, SUB), dtype=tl.float32)
    for i in tl.static_range(PARTS):
        current = pieces
        if i + 1 < PARTS:
            pointers += SUB * LENGTH
            pieces = _load_rows(pointers, column, LENGTH, WIDTH)
        if WORDS:
            dots = tl.zeros((SUB, WIDTH), dtype=tl.int32)
            for j in tl.static_range(PIECES):
                dots = _dp4a(current[j], factors[j][0][None, :], dots, EMULATE)
            dots *= 64
            for j in tl.static_range(PIECES):
                dots = _dp4a(current[j], factors[j][1][None, :], dots, EMULATE)
            found = tl.sum(dots, 1).to(tl.float32)
        else:
            products = current[0].to(tl.float32) * factors[0][None, :]  # type: ignore[misc]
            for j in tl.static_range(1, PIECES):
                products += current[j].to(tl.float32) * factors[j][None, :]
            found = tl.sum(products, 1)
        scores = tl.where((tl.arange(0, PARTS) == i)[:, None], found[None, :], scores)
    if WORDS:
        scores *= largest / (64.0 * 127.0)
    if SCALED:
        scores *= scales

    keys = tl.where(place.to(tl.int64) * num_tiles + t < vocab_size, order_keys(scores), SELECTED_)
    slot = tl.arange(0, KEEP_PAD)
    chosen = tl.zeros((KEEP_PAD,), dtype=tl.int32)
    for j in tl.static_range(KEEP):
        best = tl.min(tl.min(tl.where(keys == tl.max(tl.max(keys, 1), 0), place, TILE), 1), 0)
        keys = tl.where(place == best, SELECTED_, keys)
        chosen = tl.where(slot == j, best, chosen)
    ids = chosen.to(tl.int64) * num_tiles + t
    count = per_tile + tl.where(t < extra, 1, 0)
    valid = (slot < count) & (ids < vocab_size)

    products = tl.zeros((KEEP_PAD, BLOCK_D), dtype=tl.float32)
    for first in tl.static_range(0, HIDDEN, BLOCK_D):
        column_d = first + tl.arange(0, BLOCK_D)
        inside_d = column_d < HIDDEN
        hidden = tl.load(hidden_ptr + batch_row * HIDDEN + column_d, mask=inside_d, other=0.0).to(tl.float32)
        rows = tl.load(
            lm_head_ptr + ids[:, None] * HIDDEN + column_d[None, :],
            mask=valid[:, None] & inside_d[None, :],
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        products += hidden[None, :] * rows
    logits = scale_and_cap(tl.sum(products, axis=1), logit_scale, softcap, CAPPED)
    out = batch_row * num_candidates + t * per_tile + tl.minimum(t, extra) + slot
    tl.store(ids_ptr + out, ids.to(tl.int32), mask=valid)
    tl.store(logits_ptr + out, logits, mask=valid)

"""The tile head for several hidden states, and the approximate logits for ``ExactSelection``.

Two kernels after ``down_proj · h``. The first streams ``vocab_proj`` once for all hidden states and notes, tile by
tile, every row's best ids and their union. The second multiplies the rows of ``lm_head`` in that union, each read
once, with all hidden states; every row then takes its own. Work and memory of the two differ too much to share the
registers of one kernel: fused, they took 65 µs where they take 38 apart (10 rows, see docs/PERFORMANCE.md).
"""

import triton
import triton.language as tl

from specvocab_kernels.vocab_head.common import MAX_UNROLLED, SELECTED_, SIZES, dot, order_keys, scale_and_cap


@triton.jit
def _scores(
    high_ptr,
    low_ptr,
    proj_ptr,
    scales_ptr,
    start,
    b,
    present,
    exists,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    ACROSS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Approximate logits ``[TILE, BLOCK_B]`` of the rows from ``start``, in units of the hidden states' rounding.

    ``ACROSS``: the matrix units compute the transpose, so that a thread holds more ids of fewer hidden states and the
    best id of a tile is found almost within it.
    """
    place = tl.arange(0, TILE)
    M: tl.constexpr = BLOCK_B if ACROSS else TILE
    N: tl.constexpr = TILE if ACROSS else BLOCK_B
    if KIND == "int8":
        high_dots = tl.zeros((M, N), dtype=tl.int32)
        low_dots = tl.zeros((M, N), dtype=tl.int32)
    else:
        high_dots = tl.zeros((M, N), dtype=tl.float32)
    for k in tl.range(0, RANK, BLOCK_K, num_stages=STAGES):
        column = k + tl.arange(0, BLOCK_K)
        inside = column < RANK
        rows = tl.load(
            proj_ptr + (start + place)[:, None] * RANK + column[None, :],
            mask=exists & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        offsets = b[:, None] * RANK + column[None, :]
        wanted = present[:, None] & inside[None, :]
        high = tl.load(high_ptr + offsets, mask=wanted, other=0.0)
        if KIND == "int8":
            low = tl.load(low_ptr + offsets, mask=wanted, other=0.0)
            if ACROSS:
                high_dots = tl.dot(high, tl.trans(rows), high_dots, out_dtype=tl.int32)
                low_dots = tl.dot(low, tl.trans(rows), low_dots, out_dtype=tl.int32)
            else:
                high_dots = tl.dot(rows, tl.trans(high), high_dots, out_dtype=tl.int32)
                low_dots = tl.dot(rows, tl.trans(low), low_dots, out_dtype=tl.int32)
        else:
            if KIND == "fp8":
                rows = rows.to(tl.float16)
            if ACROSS:
                high_dots = dot(high, tl.trans(rows), high_dots, UPCAST)
            else:
                high_dots = dot(rows, tl.trans(high), high_dots, UPCAST)
    scores = high_dots.to(tl.float32)
    if KIND == "int8":
        scores = (scores + low_dots.to(tl.float32) * (1.0 / 254.0)) * (1.0 / 127.0)
    if ACROSS:
        scores = tl.trans(scores)
    if SCALED:
        scores *= tl.load(scales_ptr + start + place)[:, None]
    return scores


@triton.jit(do_not_specialize=["batch", "vocab_size"])
def scores_kernel(
    high_ptr,
    low_ptr,
    units_ptr,
    proj_ptr,  # [V, r]
    scales_ptr,
    scores_ptr,  # [B, V] float32
    batch,
    vocab_size,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Approximate logits of ``TILE`` ids by id, for a selection over all of them."""
    b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    present = b < batch
    start = tl.program_id(0).to(tl.int64) * TILE
    if PDL:
        tl.extra.cuda.gdc_wait()
    # The last tile begins early enough to be whole: it writes some scores again, the same.
    start = tl.minimum(start, tl.maximum(vocab_size - TILE, 0).to(tl.int64))
    ids = start + tl.arange(0, TILE)
    exists = ids < vocab_size
    scores = _scores(
        high_ptr,
        low_ptr,
        proj_ptr,
        scales_ptr,
        start,
        b,
        present,
        exists[:, None],
        RANK,
        TILE,
        BLOCK_B,
        BLOCK_K,
        STAGES,
        KIND,
        False,
        False,
        UPCAST,
    )
    if SCALED:
        scores *= tl.load(scales_ptr + ids, mask=exists, other=0.0)[:, None]
    scores *= tl.load(units_ptr + b, mask=present, other=0.0)[None, :]
    tl.store(scores_ptr + b[None, :] * vocab_size + ids[:, None], scores, mask=exists[:, None] & present[None, :])


@triton.jit
def _take_best(
    keys, union, j, rows_count, t, num_tiles, ids_ptr, chosen_ptr, TILE: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Write every row's best id as its ``j``-th candidate, unless it has fewer, and take its key away."""
    place = tl.arange(0, TILE)[:, None]
    best = tl.min(tl.where(keys == tl.max(keys, 0)[None, :], place, TILE), 0)
    taken = place == best[None, :]
    valid = rows_count > j
    ids = best * num_tiles + t
    tl.store(ids_ptr + j, ids, mask=valid)
    tl.store(chosen_ptr + j * BLOCK_B, tl.where(valid, ids, -1))
    union = tl.maximum(union, tl.max((taken & valid[None, :]).to(tl.int32), 1))
    return tl.where(taken, SELECTED_, keys), union


@triton.jit(do_not_specialize=SIZES)
def select_kernel(
    high_ptr,  # [B, r]
    low_ptr,
    units_ptr,  # [B]
    proj_ptr,  # [num_tiles * TILE, r]
    scales_ptr,  # [num_tiles * TILE] float32
    ids_ptr,  # [B, k] int32
    chosen_ptr,  # [batch blocks, num_tiles, KEEP, BLOCK_B] int32: the same ids, by tile
    members_ptr,  # [batch blocks, num_tiles, MEMBERS] int32; LISTED: the tiles' unions end to end, in any order
    sizes_ptr,  # [batch blocks, num_tiles] int32, of each tile's union; LISTED: [batch blocks], of all, zero before
    batch,
    vocab_size,
    num_tiles,
    num_candidates,
    per_tile,
    extra,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    KEEP: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    SHARED: tl.constexpr,
    LISTED: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile for ``BLOCK_B`` hidden states: every row's best ids, and the union of them without repetition."""
    t = tl.program_id(0)
    lane = tl.arange(0, BLOCK_B)
    b = tl.program_id(1) * BLOCK_B + lane
    present = b < batch
    b = b.to(tl.int64)
    place = tl.arange(0, TILE)
    start = t.to(tl.int64) * TILE
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    keys = tl.full((TILE, BLOCK_B), SELECTED_, dtype=tl.int32)
    for i in tl.static_range(BLOCKS):  # shared: a tile's best ids of the rows of every block
        row = i * BLOCK_B + lane.to(tl.int64) if SHARED else b
        here = row < batch
        scores = _scores(
            high_ptr,
            low_ptr,
            proj_ptr,
            scales_ptr,
            start,
            row,
            here,
            True,
            RANK,
            TILE,
            BLOCK_B,
            BLOCK_K,
            STAGES,
            KIND,
            SCALED,
            LISTED,
            UPCAST,
        )
        if SHARED:  # rows must be comparable
            scores *= tl.load(units_ptr + row, mask=here, other=0.0)[None, :]
        exists = place.to(tl.int64) * num_tiles + t < vocab_size
        keys = tl.maximum(keys, tl.where(exists[:, None] & here[None, :], order_keys(scores), SELECTED_))
    if SHARED:
        keys = tl.broadcast_to(tl.max(keys, 1)[:, None], (TILE, BLOCK_B))
    count = per_tile + tl.where(t < extra, 1, 0)
    block = tl.program_id(1).to(tl.int64) * num_tiles + t
    out = b * num_candidates + t * per_tile + tl.minimum(t, extra)
    union = tl.zeros((TILE,), dtype=tl.int32)
    rows_count = tl.where(present, count, 0)
    ids_ptr += out
    chosen_ptr += block * KEEP * BLOCK_B + lane
    if KEEP <= MAX_UNROLLED:
        for j in tl.static_range(KEEP):
            keys, union = _take_best(keys, union, j, rows_count, t, num_tiles, ids_ptr, chosen_ptr, TILE, BLOCK_B)
    else:
        for j in range(KEEP):
            keys, union = _take_best(keys, union, j, rows_count, t, num_tiles, ids_ptr, chosen_ptr, TILE, BLOCK_B)
    first = block * MEMBERS
    if LISTED:
        first = tl.program_id(1).to(tl.int64) * num_tiles * MEMBERS
        first += tl.atomic_add(sizes_ptr + tl.program_id(1), tl.sum(union, 0), sem="relaxed")
    else:
        tl.store(sizes_ptr + block, tl.sum(union, 0))
    tl.store(members_ptr + first + tl.cumsum(union, 0) - 1, place * num_tiles + t, mask=union > 0)


@triton.jit(do_not_specialize=SIZES)
def rescore_kernel(
    hidden_ptr,  # [B, d]
    lm_head_ptr,  # [V, d]
    logits_ptr,  # [B, k] float32
    chosen_ptr,
    members_ptr,
    sizes_ptr,
    batch,
    vocab_size,
    num_tiles,
    num_candidates,
    per_tile,
    extra,
    logit_scale,
    softcap,
    HIDDEN: tl.constexpr,
    KEEP: tl.constexpr,
    MEMBERS: tl.constexpr,
    LISTED: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    CAPPED: tl.constexpr,
    SAME: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ids of the unions, ``SLOTS`` at a time, times ``BLOCK_B`` hidden states.

    A row of ``lm_head`` is read once however many hidden states want it; each takes its own candidates from the
    products of all. A program has the members of ``TILES`` tiles, or, ``LISTED``, an equal share of the list of all:
    with many ids a tile, programs that own tiles end at different times. In what order the tiles have listed their ids
    changes nothing: a product depends on its row alone.
    """
    lane = tl.arange(0, BLOCK_B)
    b = tl.program_id(1) * BLOCK_B + lane
    present = b < batch
    first_block = tl.program_id(1).to(tl.int64) * num_tiles
    members_ptr += first_block * MEMBERS
    if PDL:
        tl.extra.cuda.gdc_wait()
    if LISTED:
        total = tl.load(sizes_ptr + tl.program_id(1))
        share = tl.cdiv(total, tl.num_programs(0))
        start = tl.program_id(0) * share
        end = tl.minimum(start + share, total)
    else:
        first_tile = tl.program_id(0) * TILES
        tile = tl.arange(0, TILES_PAD)
        owned = (tile < TILES) & (first_tile + tile < num_tiles)
        sizes = tl.load(sizes_ptr + first_block + first_tile + tile, mask=owned, other=0)
        ends = tl.cumsum(sizes, 0)
        start = 0
        end = tl.sum(sizes, 0)

    for begin in range(start, end, SLOTS):
        slot = begin + tl.arange(0, SLOTS)
        used = slot < end
        if LISTED:
            member = tl.load(members_ptr + slot, mask=used, other=0)
            t = member % num_tiles
        else:
            before = slot[:, None] >= ends[None, :]  # tiles that lie wholly before the slot
            t = first_tile + tl.minimum(tl.sum(before.to(tl.int32), 1), TILES - 1)
            inner = slot - tl.sum(tl.where(before, sizes[None, :], 0), 1)
            member = tl.load(members_ptr + t.to(tl.int64) * MEMBERS + inner, mask=used, other=0)
        row = member.to(tl.int64) * HIDDEN
        acc = tl.zeros((SLOTS, BLOCK_B), dtype=tl.float32)
        for first in tl.range(0, HIDDEN, BLOCK_D, num_stages=STAGES):
            column = first + tl.arange(0, BLOCK_D)
            inside = column < HIDDEN
            rows = tl.load(
                lm_head_ptr + row[:, None] + column[None, :],
                mask=used[:, None] if EVEN else used[:, None] & inside[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            hidden = tl.load(
                hidden_ptr + b[:, None].to(tl.int64) * HIDDEN + column[None, :],
                mask=present[:, None] if EVEN else present[:, None] & inside[None, :],
                other=0.0,
            )
            if not SAME:
                rows, hidden = rows.to(tl.float32), hidden.to(tl.float32)
            acc = dot(rows, tl.trans(hidden), acc, UPCAST)

        logits = scale_and_cap(acc, logit_scale, softcap, CAPPED)
        out = b[None, :] * num_candidates + (t * per_tile + tl.minimum(t, extra))[:, None]
        chosen = chosen_ptr + ((first_block + t) * KEEP * BLOCK_B)[:, None] + lane[None, :]
        wanted = used[:, None] & present[None, :]
        if KEEP <= MAX_UNROLLED:
            for j in tl.static_range(KEEP):
                mine = tl.load(chosen + j * BLOCK_B, mask=used[:, None], other=-1) == member[:, None]
                tl.store(logits_ptr + out + j, logits, mask=mine & wanted)
        else:
            for j in range(KEEP):
                mine = tl.load(chosen + j * BLOCK_B, mask=used[:, None], other=-1) == member[:, None]
                tl.store(logits_ptr + out + j, logits, mask=mine & wanted)

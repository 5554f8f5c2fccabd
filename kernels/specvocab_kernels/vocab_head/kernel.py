"""Launches of the head's Triton kernels, and the block shapes they run with.

Block shapes are fixed by the shape of the problem, never searched: a graph capture must not meet a search. They were
measured on an H200 (docs/PERFORMANCE.md).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specvocab_kernels._impl import interpreting
from specvocab_kernels.vocab_head import common, many, one, top_n
from specvocab_kernels.vocab_head.selection import TileSelection
from specvocab_kernels.vocab_head.weights import HeadWeights

KINDS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
}
MAX_TILE = 1024
MAX_KEEP = 64
CHUNK = 1024  # candidates of one program of the first top-n kernel


def tile_head(
    hidden: Tensor,
    weights: HeadWeights,
    ids: Tensor,
    logits: Tensor,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    shared: bool = False,
    config: dict[str, dict[str, int]] | None = None,
) -> None:
    """Fill ``ids`` ``[B, k]`` int32 and ``logits`` ``[B, k]`` float32 for a ``TileSelection``.

    Args:
        hidden: ``[B, d]`` contiguous.
        config: block shapes of the kernels by name instead of the measured ones, for benchmarks.

    Raises:
        ValueError: the tile or ``keep`` is larger than the kernels are made for.
    """
    selection = weights.selection
    assert isinstance(selection, TileSelection)
    if selection.tile > MAX_TILE or selection.keep > MAX_KEEP:
        raise ValueError(
            f"vocab_head: {selection} is too large for the Triton kernels; use tile <= {MAX_TILE} and "
            f"keep <= {MAX_KEEP}, or impl='torch'"
        )
    batch = hidden.shape[0]
    config = {**block_shapes(weights, batch, shared), **(config or {})}
    reduced = _reduce(hidden, weights, config["reduce"])
    shortest, longer = divmod(selection.vocab_size, selection.num_tiles)
    sizes = (
        selection.vocab_size,
        selection.num_tiles,
        selection.num_candidates,
        min(selection.keep, shortest),
        longer if selection.keep > shortest else 0,
    )
    final = (logit_scale, 0.0 if logit_softcap is None else logit_softcap)
    if "one" in config:
        one.tile_kernel[(selection.num_tiles, batch)](
            hidden,
            reduced,
            weights.vocab_proj,
            weights.scales,
            weights.lm_head,
            ids,
            logits,
            *sizes,
            *final,
            HIDDEN=weights.hidden_size,
            RANK=weights.rank,
            TILE=selection.tile,
            KEEP=selection.keep,
            KEEP_PAD=triton.next_power_of_2(selection.keep),
            KIND=KINDS[weights.vocab_proj.dtype],
            SCALED=weights.scales is not None,
            CAPPED=logit_softcap is not None,
            EMULATE=interpreting(),
            **config["one"],
            **_dependent(hidden),
        )
        return

    block_b = config["batch"]["BLOCK_B"]
    blocks = triton.cdiv(batch, block_b)
    num_members = min(selection.tile, selection.keep * (1 if shared else block_b))
    per_tile: dict[str, Any] = dict(dtype=torch.int32, device=hidden.device)
    chosen = torch.empty(blocks, selection.num_tiles, selection.keep, block_b, **per_tile)
    members = torch.empty(blocks, selection.num_tiles, num_members, **per_tile)
    *rounded, zeros = _rounded(reduced, weights)
    rescore = dict(config["rescore"])
    listed = "PER_MULTIPROCESSOR" in rescore
    member_counts = zeros if listed else torch.empty(blocks, selection.num_tiles, **per_tile)
    many.select_kernel[(selection.num_tiles, blocks)](
        *rounded,
        weights.vocab_proj,
        weights.scales,
        ids,
        chosen,
        members,
        member_counts,
        batch,
        *sizes,
        RANK=weights.rank,
        TILE=selection.tile,
        KEEP=selection.keep,
        MEMBERS=num_members,
        BLOCK_B=block_b,
        BLOCKS=blocks if shared else 1,
        KIND=KINDS[weights.vocab_proj.dtype],
        SCALED=weights.scales is not None,
        SHARED=shared,
        LISTED=listed,
        UPCAST=interpreting(),
        **config["select"],
        **_dependent(hidden),
    )
    if listed:
        programs = rescore.pop("PER_MULTIPROCESSOR") * _multiprocessors(hidden)
        rescore |= dict(TILES=0, TILES_PAD=0)
    else:
        programs = triton.cdiv(selection.num_tiles, rescore["TILES"])
        rescore["TILES_PAD"] = triton.next_power_of_2(rescore["TILES"])
    many.rescore_kernel[(programs, blocks)](
        hidden,
        weights.lm_head,
        logits,
        chosen,
        members,
        member_counts,
        batch,
        *sizes,
        *final,
        HIDDEN=weights.hidden_size,
        KEEP=selection.keep,
        MEMBERS=num_members,
        LISTED=listed,
        BLOCK_B=block_b,
        EVEN=weights.hidden_size % rescore["BLOCK_D"] == 0,
        CAPPED=logit_softcap is not None,
        SAME=hidden.dtype == weights.lm_head.dtype,
        UPCAST=interpreting(),
        **rescore,
        **_dependent(hidden),
    )


def approximate_scores(hidden: Tensor, weights: HeadWeights) -> Tensor:
    """``[B, V]`` float32 approximate logits by id; for weights in that order (``ExactSelection``)."""
    batch = hidden.shape[0]
    config = block_shapes(weights, batch, False)
    scores = torch.empty(batch, weights.vocab_size, dtype=torch.float32, device=hidden.device)
    tile = config["scores"]["TILE"]
    block_b = config["batch"]["BLOCK_B"]
    many.scores_kernel[(triton.cdiv(weights.vocab_size, tile), triton.cdiv(batch, block_b))](
        *_rounded(_reduce(hidden, weights, config["reduce"]), weights)[:3],
        weights.vocab_proj,
        weights.scales,
        scores,
        batch,
        weights.vocab_size,
        RANK=weights.rank,
        BLOCK_B=block_b,
        KIND=KINDS[weights.vocab_proj.dtype],
        SCALED=weights.scales is not None,
        UPCAST=interpreting(),
        **config["scores"],
        **_dependent(hidden),
    )
    return scores


def top_n_triton(ids: Tensor, logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """As ``reference.top_n_torch``; ``logits`` contiguous, the rows of ``ids`` too (or one row, expanded)."""
    batch, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    empty: dict[str, Any] = dict(device=logits.device)
    keys = torch.empty(batch, chunks, n, dtype=torch.int64, **empty)
    maxima = torch.empty(batch, chunks, dtype=torch.float32, **empty)
    sums = torch.empty_like(maxima)
    best_ids = torch.empty(batch, n, dtype=torch.int32, **empty)
    log_probs = torch.empty(batch, n, dtype=torch.float32, **empty)
    top_n.partial_kernel[(batch, chunks)](
        logits, keys, maxima, sums, width, chunks, n, CHUNK=CHUNK, num_warps=4, **_dependent(logits)
    )
    top_n.merge_kernel[(batch,)](
        logits,
        ids,
        keys,
        maxima,
        sums,
        best_ids,
        log_probs,
        width,
        chunks,
        ids.stride(0),
        n,
        KEYS=triton.next_power_of_2(chunks * n),
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=4 if chunks * n <= 4096 else 16,
        **_dependent(logits),
    )
    return best_ids, log_probs


def block_shapes(weights: HeadWeights, batch: int, shared: bool) -> dict[str, dict[str, Any]]:
    """Block shapes of the kernels for ``batch`` hidden states; with ``"one"`` where the fused kernel is taken."""
    size = weights.vocab_proj.element_size()
    few = dict(USE_DOT=False, BLOCK_R=2, num_warps=4)
    wide = min(4096, _block(weights.hidden_size))
    shapes: dict[str, dict[str, Any]] = {}
    if batch == 1:
        shapes["reduce"] = dict(few, BLOCK_B=1, BLOCK_D=wide)
    elif batch <= 16:
        shapes["reduce"] = dict(few, BLOCK_B=4, BLOCK_D=min(1024, wide))
    else:
        shapes["reduce"] = dict(USE_DOT=True, BLOCK_B=16, BLOCK_R=16, BLOCK_D=min(256, wide), num_warps=4, num_stages=4)
    if weights.lm_head.dtype == torch.float32 and batch > 16:
        shapes["reduce"].update(BLOCK_D=min(64, wide))
    block_b = 16 if batch <= 16 else 32 if batch <= 32 else 64
    shapes["batch"] = dict(BLOCK_B=block_b)
    shapes["scores"] = dict(TILE=128, BLOCK_K=64 if size < 4 else 32, STAGES=3, num_warps=4)
    selection = weights.selection
    if not isinstance(selection, TileSelection):
        return shapes

    tile, keep = selection.tile, selection.keep
    if batch == 1:
        parts = tile * _block(weights.rank) * size // (4096 if size == 1 else 8192)  # bytes of one piece
        keep_pad = triton.next_power_of_2(keep)
        block_d = max(32, min(wide, 16384 // keep_pad))
        num_warps = {torch.int8: 2, torch.float8_e4m3fn: 4}.get(weights.vocab_proj.dtype, 8)
        columns = _block(weights.rank)
        if size == 2 and weights.rank & (weights.rank - 1):  # whole tiles in flight, and few lanes beyond the rank
            columns, parts = min(64, columns), triton.cdiv(tile * weights.rank * size, 49152)
        shapes["one"] = dict(
            PARTS=max(1, min(triton.next_power_of_2(parts), 8 if size == 1 else 16, tile // 4)),
            BLOCK_R=_block(weights.rank),
            COLUMNS=columns,
            BLOCK_D=block_d,
            num_warps=max(num_warps, min(8, keep_pad * block_d // 2048)),
        )
    shapes["select"] = dict(
        BLOCK_K=64 if tile * size <= 1024 else 32 if tile * size <= 2048 or size < 4 else 16,
        STAGES=3,
        num_warps=8 if tile * block_b > 8192 or tile > 256 else 4,
    )
    half = weights.lm_head.element_size() == 2
    if shared:
        rescore = dict(TILES=max(1, 16 // keep), SLOTS=16, BLOCK_D=512 if block_b == 16 else 128, STAGES=4, num_warps=4)
    elif block_b == 16:
        rescore = dict(TILES=max(1, 8 // keep), SLOTS=64, BLOCK_D=128, STAGES=5, num_warps=4)
    elif block_b == 64:
        rescore = dict(PER_MULTIPROCESSOR=2, SLOTS=128, BLOCK_D=64, STAGES=4, num_warps=4)
    else:
        union = tile * (1 - (1 - min(1.0, keep / tile)) ** block_b)  # of independent rows
        rescore = dict(TILES=max(1, int(205 / union)), SLOTS=256, BLOCK_D=64, STAGES=4, num_warps=8)
    if not half:
        rescore.update(SLOTS=min(64, rescore["SLOTS"]), BLOCK_D=32, STAGES=3)
    shapes["rescore"] = rescore
    return shapes


def _reduce(hidden: Tensor, weights: HeadWeights, config: dict[str, Any]) -> Tensor:
    """``down_proj · h``, ``[B, r]`` float32."""
    batch = hidden.shape[0]
    reduced = torch.empty(batch, weights.rank, dtype=torch.float32, device=hidden.device)
    config = dict(config)
    kernel, options = common.reduce_kernel, {}
    if config.pop("USE_DOT"):
        kernel = common.reduce_dot_kernel
        options = dict(SAME=hidden.dtype == weights.down_proj.dtype, UPCAST=interpreting())
    kernel[(triton.cdiv(weights.rank, config["BLOCK_R"]), triton.cdiv(batch, config["BLOCK_B"]))](
        hidden,
        weights.down_proj,
        reduced,
        batch,
        HIDDEN=weights.hidden_size,
        RANK=weights.rank,
        **options,
        **config,
        **_dependent(hidden),
    )
    return reduced


def _rounded(reduced: Tensor, weights: HeadWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``reduced`` as the matrix units take it: high and low part, unit; and a zero for each row (see ``many``)."""
    kind = KINDS[weights.vocab_proj.dtype]
    dtype = torch.float16 if kind == "fp8" else weights.vocab_proj.dtype
    high = torch.empty(reduced.shape, dtype=dtype, device=reduced.device)
    low = torch.empty_like(high) if kind == "int8" else high
    units = torch.empty(reduced.shape[0], dtype=torch.float32, device=reduced.device)
    zeros = torch.empty(reduced.shape[0], dtype=torch.int32, device=reduced.device)
    common.round_kernel[(reduced.shape[0],)](
        reduced,
        high,
        low,
        units,
        zeros,
        RANK=weights.rank,
        BLOCK_R=_block(weights.rank),
        KIND=kind,
        num_warps=1,
        **_dependent(reduced),
    )
    return high, low, units, zeros


def _block(length: int) -> int:
    return max(16, triton.next_power_of_2(length))


def _multiprocessors(tensor: Tensor) -> int:
    if tensor.device.type != "cuda":
        return 2  # the interpreter: more than one, to show that they share the work rightly
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def _dependent(tensor: Tensor) -> dict[str, bool]:
    """Options of programmatic dependent launch, where the GPU has it."""
    if tensor.device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(tensor.device) < (9, 0):
        return dict(PDL=False)
    return dict(PDL=True, launch_pdl=True)

"""``gather_dot`` in Triton: bound by memory, so it reads every candidate row once and has no use for ``tl.dot``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Fixed, not autotuned: a graph capture must not meet a search, and the interpreter takes one configuration only.
# Measured on an H200 over 12 shapes (d 640 to 4096, B 1 to 64): on average 15 %, at worst 53 % (d = 4096, B = 1,
# k = 256: 5.1 against 3.4 µs) slower than the best of all tiles tried for each shape.
BLOCK_K = 2
MAX_BLOCK_D = 1024
NUM_WARPS = 1


@triton.jit
def _gather_dot_kernel(
    hidden_ptr,  # [B, d], contiguous
    weight_ptr,  # [V, d], elements of a row are neighbours
    ids_ptr,  # [B, k], contiguous
    out_ptr,  # [B, k], contiguous, float32
    vocab_size,
    hidden_size,
    num_candidates,
    weight_row_stride,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: ``BLOCK_K`` candidates of one row. One grid axis, because the others end at 65535."""
    num_blocks = tl.cdiv(num_candidates, BLOCK_K)
    # Offsets are int64 throughout: a row index times its stride passes 2^31 at real sizes.
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    candidate = (tl.program_id(0) % num_blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
    wanted = candidate < num_candidates
    ids = tl.load(ids_ptr + row * num_candidates + candidate, mask=wanted, other=0).to(tl.int64)
    valid = wanted & (ids >= 0) & (ids < vocab_size)

    # The tile is summed once, at the end: a reduction in the loop would cost more than the loads hide.
    products = tl.zeros((BLOCK_K, BLOCK_D), dtype=tl.float32)
    for start in range(0, hidden_size, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        inside = column < hidden_size
        hidden = tl.load(hidden_ptr + row * hidden_size + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(
            weight_ptr + (ids * weight_row_stride)[:, None] + column[None, :],
            mask=valid[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        products += hidden[None, :] * weight
    logits = tl.where(valid, tl.sum(products, axis=1), float("nan"))
    tl.store(out_ptr + row * num_candidates + candidate, logits, mask=wanted)


def gather_dot_triton(hidden: Tensor, weight: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """Write the logits ``[B, k]`` into ``out`` (float32) and return it; ``hidden``, ``ids``, ``out`` contiguous."""
    batch_size, num_candidates = ids.shape
    if ids.numel() == 0:
        return out  # CUDA refuses an empty grid
    with torch.cuda.device_of(hidden):  # Triton launches on the current device, not on the tensors'
        _gather_dot_kernel[(batch_size * triton.cdiv(num_candidates, BLOCK_K),)](
            hidden,
            weight,
            ids,
            out,
            weight.shape[0],
            weight.shape[1],
            num_candidates,
            weight.stride(0),
            BLOCK_K=BLOCK_K,
            BLOCK_D=min(MAX_BLOCK_D, max(16, triton.next_power_of_2(weight.shape[1]))),
            num_warps=NUM_WARPS,
        )
    return out

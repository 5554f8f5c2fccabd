"""Attention of one new token per slot in Triton: one program for a slot and key-value head, or a part of its columns.

Bound by memory: keys and values are read once, for all query heads of their group, which stand in the rows of
``tl.dot`` (Ainslie et al. 2023, "GQA"). The softmax is made in one pass over blocks of columns (Milakov & Gimelshein
2018). Few slots with long caches would leave most of a GPU idle, so their columns are split over several programs, and
the parts merged by their log-sum-exp ("Flash-Decoding", Dao et al. 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specvocab_kernels._impl import interpreting

# Fixed, not autotuned: a graph capture must not meet a search. Not measured yet.
BLOCK_BYTES = 16384  # of keys in a block of columns
NUM_WARPS = 4
LOG2_E = 1.4426950408889634
PROGRAMS_PER_SM = 4  # fewer of them are split
MIN_SPLIT = 256  # columns: less is not worth the merge
MOST_SPLITS = 32


@triton.jit
def _slot_attention_kernel(
    query,  # [S, H, D], contiguous
    keys, values,  # [S, H_kv, C, D], elements of a row are neighbours
    first, last,  # [S]
    out,  # [S, H, D]; or of parts [SPLITS, S, H, D] float32, contiguous
    lse,  # [SPLITS, S, H] float32: log2 of the sum of exponentials; not touched if SPLITS is 1
    num_slots, num_kv_heads, groups, capacity,
    slot_stride, head_stride, column_stride,
    scale,  # times log2(e)
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter's product of bfloat16 is wrong
):  # fmt: skip
    slot = (tl.program_id(0) // num_kv_heads).to(tl.int64)  # offsets pass 2^31 at real sizes
    kv_head = tl.program_id(0) % num_kv_heads
    split = tl.program_id(1)
    group, dim = tl.arange(0, GROUPS), tl.arange(0, DIMS)
    head = (slot * num_kv_heads + kv_head) * groups + group
    is_head, is_dim = group < groups, dim < HEAD_DIM
    q = tl.load(query + head[:, None] * HEAD_DIM + dim[None, :], mask=is_head[:, None] & is_dim[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    begin = tl.maximum(tl.load(first + slot), 0)
    end = tl.minimum(tl.load(last + slot), capacity - 1) + 1
    if SPLITS > 1:
        size = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK) * BLOCK
        begin += split * size
        end = tl.minimum(begin + size, end)

    base = slot * slot_stride + kv_head.to(tl.int64) * head_stride
    acc = tl.zeros([GROUPS, DIMS], tl.float32)
    top = tl.full([GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        seen = column < end
        at = base + column.to(tl.int64)[:, None] * column_stride + dim[None, :]
        k = tl.load(keys + at, mask=seen[:, None] & is_dim[None, :], other=0.0)
        v = tl.load(values + at, mask=seen[:, None] & is_dim[None, :], other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))  # finite: the first column of every block is seen
        weights = tl.exp2(scores - new_top[:, None])
        kept = tl.exp2(top - new_top)
        total = total * kept + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
        top = new_top

    if SPLITS > 1:
        head += split.to(tl.int64) * num_slots * num_kv_heads * groups
        tl.store(lse + head, top + tl.log2(tl.where(total > 0, total, 1.0)), mask=is_head)
    total = tl.where(total > 0, total, 1.0)  # a part without columns
    tl.store(out + head[:, None] * HEAD_DIM + dim[None, :], (acc / total[:, None]).to(out.dtype.element_ty),
             mask=is_head[:, None] & is_dim[None, :])


def slot_attention_triton(
    query: Tensor, keys: Tensor, values: Tensor, first: Tensor, last: Tensor, scale: float, out: Tensor,
    num_splits: int | None = None,
) -> Tensor:
    """Write the attention into ``out`` and return it; ``query``, ``first``, ``last``, ``out`` contiguous.

    Args:
        num_splits: programs for a slot and key-value head; None chooses by shapes, which a graph holds fixed.
    """
    num_slots, num_heads, head_dim = query.shape
    num_kv_heads, capacity = keys.shape[1:3]
    if query.numel() == 0:
        return out  # CUDA refuses an empty grid
    splits = num_splits or _num_splits(num_slots * num_kv_heads, capacity, query.device)
    parts, lse = out, out
    if splits > 1:
        parts = out.new_empty((splits, *out.shape), dtype=torch.float32)
        lse = out.new_empty((splits, num_slots, num_heads), dtype=torch.float32)
    dims = max(16, triton.next_power_of_2(head_dim))
    with torch.cuda.device_of(query):  # Triton launches on the current device, not on the tensors'
        _slot_attention_kernel[(num_slots * num_kv_heads, splits)](
            query, keys, values, first, last, parts, lse,
            num_slots, num_kv_heads, num_heads // num_kv_heads, capacity,
            *keys.stride()[:3],
            scale * LOG2_E,
            HEAD_DIM=head_dim, DIMS=dims, GROUPS=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
            BLOCK=max(16, BLOCK_BYTES // (dims * query.element_size())), SPLITS=splits, UPCAST=interpreting(),
            num_warps=NUM_WARPS,
        )  # fmt: skip
    if splits > 1:
        weights = (lse - lse.amax(0)).exp2_()  # one part at least has columns
        out.copy_((parts * (weights / weights.sum(0))[..., None]).sum(0))
    return out


def _num_splits(num_programs: int, capacity: int, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    wanted = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(wanted // num_programs, capacity // MIN_SPLIT, MOST_SPLITS))

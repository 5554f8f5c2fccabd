"""Attention of one new token per slot, each over its own columns of a cache that all slots share the shape of."""

import torch
from torch import Tensor

from specvocab_kernels._impl import choose_impl
from specvocab_kernels.slot_attention.reference import slot_attention_reference

__all__ = ["slot_attention"]

MAX_HEAD_DIM = 256  # of the Triton kernel, which holds a row of every key in a block at a time
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("specvocab::slot_attention", mutates_args=())  # so torch.compile sees one operation
def slot_attention(
    query: Tensor, keys: Tensor, values: Tensor, first: Tensor, last: Tensor, scale: float, impl: str = "auto"
) -> Tensor:
    """Softmax attention of a token of each slot over the columns ``first`` to ``last`` of its own cache, both included.

    The kernel reads those columns and no others, so a slot costs what it has written and not what it may write. No
    backward. Lengths are read on the device: nothing waits, and CUDA graphs may capture the call once it has run on
    tensors of the same kind.

    Args:
        query: ``[S, H, D]`` float32, bfloat16 or float16; any strides (copied unless contiguous).
        keys, values: ``[S, H_kv, C, D]`` of the same dtype and strides, with neighbouring elements in a row; query head
            ``h`` reads head ``h // (H / H_kv)``.
        first, last: ``[S]`` int64, ``0 <= first <= last < C``. Bounds beyond the cache are taken as its ends.
        scale: of the scores, usually ``D ** -0.5``.
        impl: ``"auto"``, ``"triton"`` or ``"torch"``, see ``choose_impl``.

    Returns:
        ``[S, H, D]`` in the dtype of ``query``; sums are float32.

    Raises:
        ValueError: shapes, dtypes or strides do not fit; ``impl`` cannot run here.
    """
    _check(query, keys, values, first, last)
    if choose_impl("slot_attention", impl, query.device) == "torch":
        return slot_attention_reference(query, keys, values, first, last, scale)
    if query.shape[2] > MAX_HEAD_DIM or query.dtype not in DTYPES or keys.stride(3) != 1:
        raise ValueError(f"slot_attention: the Triton kernel takes {', '.join(map(str, DTYPES))}, heads of at most "
                         f"{MAX_HEAD_DIM} and rows without gaps; got {query.dtype}, {query.shape[2]}, strides "
                         f"{keys.stride()}; use impl='torch'")
    from specvocab_kernels.slot_attention.kernel import slot_attention_triton

    query = query.contiguous()
    return slot_attention_triton(query, keys, values, first.contiguous(), last.contiguous(), scale,
                                 torch.empty_like(query))


@slot_attention.register_fake
def _(
    query: Tensor, keys: Tensor, values: Tensor, first: Tensor, last: Tensor, scale: float, impl: str = "auto"
) -> Tensor:
    return query.new_empty(query.shape)


def _check(query: Tensor, keys: Tensor, values: Tensor, first: Tensor, last: Tensor) -> None:
    shapes = (f"got query {list(query.shape)}, keys {list(keys.shape)}, values {list(values.shape)}, "
              f"first {list(first.shape)}, last {list(last.shape)}")
    if query.dim() != 3 or keys.dim() != 4 or keys.shape != values.shape:
        raise ValueError(f"slot_attention: needs query [S, H, D], keys and values [S, H_kv, C, D]; {shapes}")
    if (query.shape[0], query.shape[2]) != (keys.shape[0], keys.shape[3]) or query.shape[1] % keys.shape[1]:
        raise ValueError(f"slot_attention: query [S, H, D] must share S and D with keys [S, H_kv, C, D], and H must be "
                         f"a multiple of H_kv; {shapes}")
    if first.shape != query.shape[:1] or last.shape != query.shape[:1]:
        raise ValueError(f"slot_attention: first and last must hold one column a slot; {shapes}")
    if not first.dtype == last.dtype == torch.int64:
        raise ValueError(f"slot_attention: first is {first.dtype}, last {last.dtype}; needs int64")
    if not query.dtype == keys.dtype == values.dtype:
        raise ValueError(f"slot_attention: query is {query.dtype}, keys {keys.dtype}, values {values.dtype}; needs one")
    if keys.stride() != values.stride():
        raise ValueError(f"slot_attention: keys have strides {keys.stride()}, values {values.stride()}; needs the same")

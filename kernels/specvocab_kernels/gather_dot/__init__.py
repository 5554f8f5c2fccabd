"""Exact logits of selected rows of ``lm_head``: the second half of a speculated vocabulary."""

import torch
from torch import Tensor

from specvocab_kernels._impl import choose_impl
from specvocab_kernels.gather_dot.reference import gather_dot_torch

__all__ = ["gather_dot"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gather_dot(hidden: Tensor, weight: Tensor, ids: Tensor, impl: str = "auto") -> Tensor:
    """Dot each hidden state with its own selection of rows: ``out[b, j] = hidden[b] · weight[ids[b, j]]``.

    An id outside ``[0, V)``, negative ones included, never reads memory. On a GPU its result is NaN, because finding
    it would make the host wait; the torch implementation on the CPU refuses it. ``B = 0`` and ``k = 0`` give an empty
    result. There is no backward. CUDA graphs may capture the call once it has run on tensors of the same kind
    (Triton compiles at the first).

    Args:
        hidden: ``[B, d]`` float32, bfloat16 or float16, any strides (copied unless contiguous).
        weight: ``[V, d]`` likewise, its dtype may differ from ``hidden``'s; rows may lie apart, but the elements of
            a row must be neighbours, because copying an ``lm_head`` at every call would cost more than the product.
        ids: ``[B, k]`` int32 or int64; repeated ids are allowed.
        impl: ``"auto"``, ``"triton"`` or ``"torch"``, see ``choose_impl``.

    Returns:
        ``[B, k]`` float32. Products and sums are float32 whatever the inputs, in an order that depends on the shapes
        alone: the same call gives the same bits.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit; an id is out of range (torch on the CPU); an input
            wants a gradient; ``impl`` cannot run here.
    """
    _check(hidden, weight, ids)
    if choose_impl("gather_dot", impl, hidden.device) == "torch":
        if ids.device.type == "cpu":
            _check_range(ids, weight.shape[0])
        return gather_dot_torch(hidden, weight, ids)

    from specvocab_kernels.gather_dot.kernel import gather_dot_triton

    out = torch.empty(ids.shape, dtype=torch.float32, device=hidden.device)
    return gather_dot_triton(hidden.contiguous(), weight, ids.contiguous(), out)


def _check(hidden: Tensor, weight: Tensor, ids: Tensor) -> None:
    shapes = f"got hidden {list(hidden.shape)}, weight {list(weight.shape)}, ids {list(ids.shape)}"
    if not hidden.dim() == weight.dim() == ids.dim() == 2:
        raise ValueError(f"gather_dot: needs hidden [B, d], weight [V, d], ids [B, k]; {shapes}")
    if hidden.shape[1] != weight.shape[1] or hidden.shape[0] != ids.shape[0]:
        raise ValueError(f"gather_dot: hidden [B, d] must share d with weight [V, d] and B with ids [B, k]; {shapes}")
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dtype not in DTYPES:
            raise ValueError(f"gather_dot: {name} is {tensor.dtype}; needs float32, bfloat16 or float16")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"gather_dot: {name} requires grad and there is no backward; call under torch.no_grad()")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"gather_dot: ids is {ids.dtype}; needs int32 or int64")
    if not hidden.device == weight.device == ids.device:
        raise ValueError(f"gather_dot: hidden is on {hidden.device}, weight on {weight.device}, ids on {ids.device}")
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        raise ValueError(f"gather_dot: weight has strides {weight.stride()}; call weight.contiguous() once, beforehand")


def _check_range(ids: Tensor, vocab_size: int) -> None:
    if ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"gather_dot: ids run from {low} to {high}; weight has the rows 0 to {vocab_size - 1}")

"""The own keys of an unrolled position: merged into the attention over the step-0 keys, forward and backward.

One program takes one position and one key-value head with all its query heads. Everything is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_queries", "num_own"])  # they change from call to call
def merge_kernel(
    query, shared_out,  # [M, H, D]
    shared_lse,  # [H, M]
    own_keys, own_values,  # [num_own, M, H_kv, D]
    out,  # [M, H, D]
    lse_out,  # [H, M]
    num_queries, num_own, groups, scale,
    HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    group = tl.arange(0, GROUPS)
    dim = tl.arange(0, DIMS)
    heads = head * groups + group
    at = (row * num_kv_heads * groups + heads)[:, None] * HEAD_DIM + dim[None, :]
    inside = (group < groups)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + at, mask=inside, other=0.0).to(tl.float32)
    acc = tl.load(shared_out + at, mask=inside, other=0.0).to(tl.float32)
    top = tl.load(shared_lse + heads * num_queries + row, mask=group < groups, other=0.0)
    total = tl.full([GROUPS], 1.0, tl.float32)
    for i in range(num_own):
        own_at = ((i * num_queries + row) * num_kv_heads + head) * HEAD_DIM + dim
        k = tl.load(own_keys + own_at, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
        v = tl.load(own_values + own_at, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
        score = tl.sum(q * k[None, :], 1) * scale
        new_top = tl.maximum(top, score)
        kept, added = tl.exp(top - new_top), tl.exp(score - new_top)
        acc = acc * kept[:, None] + added[:, None] * v[None, :]
        total = total * kept + added
        top = new_top
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse_out + heads * num_queries + row, top + tl.log(total), mask=group < groups)


@triton.jit(do_not_specialize=["num_queries", "num_own"])  # they change from call to call
def merge_backward_kernel(
    grad_out, query, out,  # [M, H, D]; ``out`` and ``lse`` over all keys
    lse,  # [H, M]
    own_keys, own_values,  # [num_own, M, H_kv, D]
    grad_query,  # [M, H, D], holds the step-0 keys' share; the own keys' is added
    grad_keys, grad_values,  # [num_own, M, H_kv, D]
    num_queries, num_own, groups, scale,
    HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    group = tl.arange(0, GROUPS)
    dim = tl.arange(0, DIMS)
    heads = head * groups + group
    at = (row * num_kv_heads * groups + heads)[:, None] * HEAD_DIM + dim[None, :]
    inside = (group < groups)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + at, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(grad * tl.load(out + at, mask=inside, other=0.0).to(tl.float32), 1)
    log_total = tl.load(lse + heads * num_queries + row, mask=group < groups, other=0.0)
    grad_q = tl.load(grad_query + at, mask=inside, other=0.0).to(tl.float32)
    for i in range(num_own):
        own_at = ((i * num_queries + row) * num_kv_heads + head) * HEAD_DIM + dim
        k = tl.load(own_keys + own_at, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
        v = tl.load(own_values + own_at, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * k[None, :], 1) * scale - log_total)
        grad_score = weight * (tl.sum(grad * v[None, :], 1) - delta) * scale
        grad_q += grad_score[:, None] * k[None, :]
        grad_k = tl.sum(grad_score[:, None] * q, 0)
        grad_v = tl.sum(weight[:, None] * grad, 0)
        tl.store(grad_keys + own_at, grad_k.to(grad_keys.dtype.element_ty), mask=dim < HEAD_DIM)
        tl.store(grad_values + own_at, grad_v.to(grad_values.dtype.element_ty), mask=dim < HEAD_DIM)
    tl.store(grad_query + at, grad_q.to(grad_query.dtype.element_ty), mask=inside)


def _shape_arguments(query: Tensor, own_keys: Tensor) -> dict[str, int]:
    groups, head_dim = query.shape[1] // own_keys.shape[2], query.shape[2]
    return {
        "groups": groups,
        "HEAD_DIM": head_dim,
        "GROUPS": triton.next_power_of_2(groups),
        "DIMS": triton.next_power_of_2(head_dim),
        "num_warps": 1,
    }


def launch_merge(
    query: Tensor, shared_out: Tensor, shared_lse: Tensor, own_keys: Tensor, own_values: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [M, H, D] and log-sum-exp [H, M] over step-0 and own keys; ``own_keys`` [num_own, M, H_kv, D]."""
    out, lse = torch.empty_like(shared_out), torch.empty_like(shared_lse)
    grid = (query.shape[0], own_keys.shape[2])
    merge_kernel[grid](query, shared_out, shared_lse, own_keys, own_values, out, lse, query.shape[0], len(own_keys),
                       scale=query.shape[2] ** -0.5, **_shape_arguments(query, own_keys))  # fmt: skip
    return out, lse


def launch_merge_backward(
    grad_out: Tensor, query: Tensor, out: Tensor, lse: Tensor, own_keys: Tensor, own_values: Tensor, grad_query: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``own_keys`` and ``own_values``; the query's is added to ``grad_query`` in place."""
    grad_keys, grad_values = torch.empty_like(own_keys), torch.empty_like(own_values)
    grid = (query.shape[0], own_keys.shape[2])
    merge_backward_kernel[grid](grad_out, query, out, lse, own_keys, own_values, grad_query, grad_keys, grad_values,
                                query.shape[0], len(own_keys), scale=query.shape[2] ** -0.5,
                                **_shape_arguments(query, own_keys))  # fmt: skip
    return grad_keys, grad_values

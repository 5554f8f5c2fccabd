"""Unroll attention on a GPU: torch's flash attention over the step-0 keys, a Triton kernel for a position's own keys.

Flash attention is called as an operator, because its log-sum-exp is needed, forward to merge the own keys in and
backward to give it the merged one (see ``reference.shared_attention_backward``). It takes documents as offsets, so
nothing is compiled for a mask or a length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from specvocab_kernels.unroll_attention.kernel import launch_merge, launch_merge_backward
from specvocab_kernels.unroll_attention.reference import Spans, shared_attention, shared_attention_backward


class UnrollAttention(torch.autograd.Function):
    """``forward(query, key, value, spans, *own_keys, *own_values) -> out``, shapes as in ``unroll_attention``."""

    @staticmethod
    def forward(ctx, query, key, value, spans, *own):  # type: ignore[no-untyped-def]
        query = query.contiguous()
        out, lse, random_state = _shared_forward(query, key, value, spans)
        if own:
            out, lse = launch_merge(query, out.contiguous(), lse, *_stack(own))
        ctx.save_for_backward(query, key, value, out, lse, *random_state, *own)
        ctx.spans = spans
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        query, key, value, out, lse, state, offset, *own = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grad_query, grad_key, grad_value = _shared_backward(
            grad_out, query, key, value, out, lse, (state, offset), ctx.spans
        )
        grads_own: list[Tensor] = []
        if own:
            grad_query = grad_query.contiguous()
            for grads in launch_merge_backward(grad_out, query, out, lse, *_stack(own), grad_query):
                grads_own.extend(grads.unbind())
        return grad_query, grad_key, grad_value, None, *grads_own


def _stack(own: tuple[Tensor, ...] | list[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of the steps so far, each [num_own, M, H_kv, D]."""
    half = len(own) // 2
    return torch.stack(tuple(own[:half])), torch.stack(tuple(own[half:]))


def _shared_forward(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Output [M, H, D], log-sum-exp fp32 [H, M], and flash attention's state for dropout, which is not used."""
    if query.device.type == "cpu":  # in Triton's interpreter
        return *shared_attention(query, key, value, spans), (query.new_empty(0), query.new_empty(0))
    out, lse, *state, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, spans.query_offsets, spans.key_offsets, spans.max_queries, spans.max_keys,
        0.0, True, False,
    )  # fmt: skip
    return out, lse, (state[0], state[1])


def _shared_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    state: tuple[Tensor, Tensor], spans: Spans,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, step-0 keys and values under the merged ``out`` and ``lse``."""
    if query.device.type == "cpu":
        return shared_attention_backward(grad_out, query, key, value, out, lse, spans)
    return torch.ops.aten._flash_attention_backward(
        grad_out, query, key, value, out, lse, spans.query_offsets, spans.key_offsets,
        spans.max_queries, spans.max_keys, 0.0, True, *state,
    )  # fmt: skip

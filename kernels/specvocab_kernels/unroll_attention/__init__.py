"""Attention of EAGLE-3's unrolled training steps over packed documents."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specvocab_kernels._impl import choose_impl
from specvocab_kernels.unroll_attention.reference import Spans, unroll_attention_reference

__all__ = ["Spans", "unroll_attention"]

MAX_HEAD_DIM = 256  # of the flash-attention kernels in torch


def unroll_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    spans: Spans,
    *,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention of one unroll step.

    A query sees the step-0 keys of its own document up to its own position, and the keys that its own position left
    at the later steps: in decoding those are drafted tokens that only its own continuation follows.

    Args:
        query: [M, H, D], the unrolled positions.
        key, value: [N, H_kv, D], all positions at step 0; H a multiple of H_kv.
        own_keys, own_values: of each later step so far, [M, H_kv, D].
        spans: where the documents lie among the N keys and the M queries.
        impl: "triton" (torch's flash attention over the step-0 keys, a Triton kernel for the own keys; half precision
            and a head size that is a multiple of 8 up to 256), "torch", or "auto": "triton" wherever it can run.

    Returns:
        [M, H, D] in the dtype of ``query``; all arguments but ``spans`` get gradients.

    Raises:
        ValueError: shapes that do not fit together, or an ``impl`` that cannot run here.
    """
    num_queries, num_heads, head_dim = query.shape
    if key.shape != value.shape or key.shape[2] != head_dim or num_heads % key.shape[1]:
        raise ValueError(
            f"query {tuple(query.shape)} [M, H, D] needs key and value [N, H_kv, D] with H a multiple of H_kv, "
            f"got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    own_shape = (num_queries, *key.shape[1:])
    if len(own_keys) != len(own_values) or any(own.shape != own_shape for own in (*own_keys, *own_values)):
        raise ValueError(f"own_keys and own_values must be equally many tensors of shape {own_shape}")
    half = query.element_size() == 2 and query.is_floating_point()
    if impl == "auto" and not (half and head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM):
        impl = "torch"
    if choose_impl("unroll_attention", impl, query.device) == "torch":
        return unroll_attention_reference(query, key, value, own_keys, own_values, spans)
    from specvocab_kernels.unroll_attention.autograd import UnrollAttention  # needs the package triton

    return UnrollAttention.apply(query, key, value, spans, *own_keys, *own_values)

"""What a draft position may attend to: while training (unrolled over whole sequences) and while decoding (cached).

Both are an ``attend(query, key, value)`` that first takes in the new keys and values and then answers the queries.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from specvocab_kernels.unroll_attention import Spans, unroll_attention
from torch import Tensor


class Memory(Protocol):
    """Where a layer leaves its new keys and values and what its queries are answered from."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


class UnrollMemory:
    """Keys and values of one unrolled training pass over packed documents.

    Step 0 leaves a key at every position; a query at position ``t`` of any step sees the step-0 keys ``s <= t`` of
    its own document. Every later step adds one key a position, which is seen by that position alone: in decoding it
    would be a drafted token that only its own continuation follows.
    """

    def __init__(self, spans: Spans):
        self.spans = spans
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Softmax attention of one unroll step.

        Args:
            query: [M, H, D], the unrolled positions; ``key`` and ``value``: [N, H_kv, D] of all positions at step 0,
                [M, H_kv, D] afterwards.

        Returns:
            [M, H, D]
        """
        self.keys.append(key)
        self.values.append(value)
        return unroll_attention(query, self.keys[0], self.values[0], self.keys[1:], self.values[1:], self.spans)


class DraftCache:
    """Keys and values of the draft while decoding one batch of equally long sequences."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of cached positions."""
        return 0 if self.key is None else self.key.shape[2]

    def truncate(self, length: int) -> None:
        """Forget everything past the first ``length`` positions (drafted tokens that were not accepted)."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a draft cache of {self.length} positions to {length}")
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key[:, :, :length], self.value[:, :, :length]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append the new positions, then causal attention over all cached ones.

        Args:
            query: [B, T, H, D]; ``key`` and ``value``: [B, T, H_kv, D], H a multiple of H_kv.

        Returns:
            [B, T, H, D]
        """
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self.key is None or self.value is None:
            self.key, self.value = key, value
        else:
            self.key, self.value = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        num_new, num_all = query.shape[2], self.key.shape[2]
        mask = torch.ones(num_new, num_all, dtype=torch.bool, device=query.device).tril(num_all - num_new)
        out = F.scaled_dot_product_attention(query, self.key, self.value, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

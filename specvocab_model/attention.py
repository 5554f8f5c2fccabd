"""What a draft position may attend to: while training (unrolled over whole sequences) and while decoding (cached).

Both are an ``attend(query, key, value)`` that first takes in the new keys and values and then answers the queries,
so the decoder layer in ``draft.py`` is the same code in both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class UnrollMemory:
    """Keys and values of one unrolled training pass over packed rows.

    Step 0 leaves a key at every position; a query at position ``t`` of any step sees the step-0 keys ``s <= t`` of
    its own document. Every later step adds one key a position, which is seen by that position alone: in decoding it
    would be a drafted token that only its own continuation follows.
    """

    def __init__(self, document_ids: Tensor):
        """``document_ids`` [B, T] int: equal for the tokens of one document, different for its neighbours."""
        seq_len = document_ids.shape[1]
        same_document = document_ids[:, :, None] == document_ids[:, None, :]
        causal = torch.ones(seq_len, seq_len, dtype=torch.bool, device=document_ids.device).tril()
        self.mask = (same_document & causal)[:, None, None]  # [B, 1, 1, T, T]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Softmax attention of one unroll step.

        Args:
            query: [B, H, T, D]; ``key`` and ``value``: [B, H_kv, T, D], H a multiple of H_kv.

        Returns:
            [B, H, T, D]
        """
        self.keys.append(key)
        self.values.append(value)
        batch, num_heads, seq_len, head_dim = query.shape
        query = query.view(batch, key.shape[1], -1, seq_len, head_dim) * head_dim**-0.5  # [B, H_kv, G, T, D]

        shared = query @ self.keys[0][:, :, None].mT  # [B, H_kv, G, T, T]
        scores = [shared.float().masked_fill(~self.mask, float("-inf"))]
        scores += [(query * own[:, :, None]).sum(-1, keepdim=True).float() for own in self.keys[1:]]
        weights = torch.cat(scores, dim=-1).softmax(-1).to(query.dtype)

        out = weights[..., :seq_len] @ self.values[0][:, :, None]
        for i, own in enumerate(self.values[1:]):
            out = out + weights[..., seq_len + i : seq_len + i + 1] * own[:, :, None]
        return out.reshape(batch, num_heads, seq_len, head_dim)


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
        """Append the new positions, then causal attention over all cached ones. Shapes as in ``UnrollMemory``."""
        if self.key is None or self.value is None:
            self.key, self.value = key, value
        else:
            self.key, self.value = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        num_new, num_all = query.shape[2], self.key.shape[2]
        mask = torch.ones(num_new, num_all, dtype=torch.bool, device=query.device).tril(num_all - num_new)
        return F.scaled_dot_product_attention(query, self.key, self.value, attn_mask=mask, enable_gqa=True)

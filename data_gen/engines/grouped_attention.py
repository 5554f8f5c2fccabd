"""Attention of one new token, without copying keys and values for every query head.

With grouped queries and a mask, transformers' ``sdpa`` (before it packed the groups itself) repeats the cache for every
query head: two thirds of the time of a step. Here the keys are read once: by a kernel that is told the columns of each
slot in place of a mask, and reads no others, or with the heads of a group where several query tokens would stand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from specvocab_kernels.slot_attention import slot_attention
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specvocab_model.target import Target

NAME = "specvocab_grouped"


def use_grouped_attention(target: Target) -> bool:
    """Switch a target that runs ``sdpa``; others stay as they are.

    Returns:
        Whether it runs ``grouped_attention`` now.
    """
    if target.model.config._attn_implementation == "sdpa":
        target.model.set_attn_implementation(NAME)
    return target.model.config._attn_implementation == NAME


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers' attention functions: query ``[B, H, T, D]``, key and value ``[B, H/g, S, D]``.

    Args:
        attention_mask: what transformers gives; or int64 ``[2, B, 1, 1]``, the first and the last column of each row,
            which has one new token.

    Returns:
        ``[B, T, H, D]``, and no attention weights.
    """
    batch, heads, length, head_dim = query.shape
    if length > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask.dtype == torch.int64:
        first, last = attention_mask[:, :, 0, 0].unbind()
        return slot_attention(query[:, :, 0], key, value, first, last, kwargs["scaling"])[:, None], None
    groups = key.shape[1]
    output = F.scaled_dot_product_attention(
        query.reshape(batch, groups, heads // groups, head_dim), key, value,
        attn_mask=attention_mask.expand(-1, groups, heads // groups, -1), scale=kwargs["scaling"],
    )
    return output.reshape(batch, 1, heads, head_dim), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)

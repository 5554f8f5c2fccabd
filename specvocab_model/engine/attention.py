"""What a node of a tree sees, and attention that reads a cache once for all query heads of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "specvocab_tree"


def tree_visible(lengths: Tensor, ancestors: Tensor, width: int) -> Tensor:
    """Which columns of a cache the nodes of a tree see: all before the tree, and of the tree what ``ancestors`` says.

    Args:
        lengths: int64 [B], the column of the tree's first node.
        ancestors: bool [B or 1, T, N]; node ``t`` sees the node in column ``length + n``; it must see itself.
        width: columns in use.

    Returns:
        bool [B, T, width]
    """
    columns = torch.arange(width, device=lengths.device) - lengths[:, None]  # counted from the tree's first
    num_nodes = ancestors.shape[-1]
    inside = ((columns >= 0) & (columns < num_nodes))[:, None]
    index = columns.clamp(0, num_nodes - 1)[:, None].expand(-1, ancestors.shape[1], -1)
    seen = ancestors.expand(len(lengths), -1, -1).gather(2, index)
    return (columns < 0)[:, None] | (inside & seen)


def causal_visible(columns: Tensor, width: int) -> Tensor:
    """The same where tokens stand one after another, each in a column of ``columns`` int64 [B, T]: bool [B, T, width].
    """
    return torch.arange(width, device=columns.device) <= columns[:, :, None]


def column_positions(lengths: Tensor, depths: Tensor, width: int) -> Tensor:
    """Position in the text of every column, int64 [B, width]: a node stands at ``length + depth``.

    Args:
        lengths: int64 [B]; ``depths``: int64 [B or 1, T].
    """
    columns = torch.arange(width, device=lengths.device).expand(len(lengths), -1)
    index = (columns - lengths[:, None]).clamp(0, depths.shape[1] - 1)
    in_tree = lengths[:, None] + depths.expand(len(lengths), -1).gather(1, index)
    return torch.where(columns < lengths[:, None], columns, in_tree)


def additive(visible: Tensor, dtype: torch.dtype, num_groups: int) -> Tensor:
    """What is added to scores: bool [B, T, W] -> [B, 1, num_groups * T, W]."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min)
    return mask.repeat(1, num_groups, 1)[:, None]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Attention with grouped queries that stand side by side, so that keys and values are not copied for each head.

    Args:
        query: [B, H, T, D]; ``key`` and ``value``: [B, H / g, W, D].
        mask: of ``additive`` with ``num_groups = g``.

    Returns:
        [B, H, T, D]
    """
    batch, heads, length, head_dim = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1] * length, head_dim)
    return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale).reshape(query.shape)


def tree_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers' attention functions; masks of another height than ``attend`` wants go the ordinary way."""
    if attention_mask is None or attention_mask.shape[-2] == query.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    output = attend(query, key, value, attention_mask, scale=kwargs["scaling"])
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)

"""Attention in packed rows without a mask: documents are given by where they begin.

transformers makes a mask [B, 1, T, T] of packed rows, and asks the GPU whether it is needed; attention then takes all
T * T scores, with keys and values copied for every query head, in the few kernels that read a mask. torch's flash
attention takes the documents as offsets and leaves out what lies between them.

The offsets travel as an attention mask does, and are known by their type: int32 [1, 1, 1, N + 1] of N documents in the
flattened rows. transformers hands on what has four dimensions as it is.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specvocab_model.target import Target

NAME = "specvocab_packed"
MAX_HEAD_DIM = 256  # of the flash-attention kernels in torch


def use(target: Target) -> bool:
    """Switch a target with ``sdpa`` attention to this, where flash attention takes its heads; whether that was done."""
    if target.model.config._attn_implementation == "sdpa" and can_attend(target.model.dtype, target.spec.head_dim):
        target.model.set_attn_implementation(NAME)
    return target.model.config._attn_implementation == NAME


def can_attend(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's flash attention takes such heads."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM


def as_mask(offsets: Tensor) -> Tensor:
    """What ``packed_attention`` wants in place of a mask.

    Args:
        offsets: int32 [N + 1], first position of every document in the flattened rows [B * T], ascending, then B * T.
            A document may be empty, and none may reach into the next row.
    """
    return offsets[None, None, None]


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float,
    sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions; with an ordinary mask or none it is that of ``sdpa``."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows, heads, length, head_dim = query.shape
    queries, keys, values = (each.transpose(1, 2).reshape(rows * length, -1, head_dim) for each in (query, key, value))
    attend = flash if query.is_cuda else reference
    output = attend(queries, keys, values, attention_mask.flatten(), length, scaling, sliding_window)
    return output.view(rows, length, heads, head_dim), None


def flash(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scaling: float, window: int | None
) -> Tensor:
    """[B * T, H, D]. A position sees itself and the ``window - 1`` positions before it in its document, or all.

    Args:
        query: [B * T, H, D]; ``key`` and ``value``: [B * T, H_kv, D].
        longest: at least the length of the longest document.
    """
    before = None if window is None else window - 1
    output, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, offsets, offsets, longest, longest, 0.0, True, False, scale=scaling,
        window_size_left=before, window_size_right=None if window is None else 0,
    )  # fmt: skip
    return output


def reference(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scaling: float, window: int | None
) -> Tensor:
    """As ``flash``, document by document."""
    output = torch.empty_like(query)
    bounds = offsets.tolist()
    for begin, end in pairwise(bounds):
        at = torch.arange(end - begin, device=query.device)
        distance = at[:, None] - at
        visible = (distance >= 0) & (distance < (window or end))
        queries, keys, values = (each[begin:end].transpose(0, 1)[None] for each in (query, key, value))
        attended = F.scaled_dot_product_attention(queries, keys, values, visible, scale=scaling, enable_gqa=True)
        output[begin:end] = attended[0].transpose(0, 1)
    return output


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)

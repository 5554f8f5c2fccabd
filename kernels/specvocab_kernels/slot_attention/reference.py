"""Attention of one new token per slot in plain torch: the path of the CPU, and what the kernel is tested against."""

import torch
from torch import Tensor


def slot_attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, first: Tensor, last: Tensor, scale: float
) -> Tensor:
    """See ``slot_attention``. Computes in fp32, or in fp64 where the arguments are, over all columns."""
    exact = torch.promote_types(query.dtype, torch.float32)
    columns = torch.arange(keys.shape[2], device=keys.device)
    visible = ((columns >= first[:, None]) & (columns <= last[:, None]))[:, None]  # [S, 1, C]
    grouped = query.to(exact).unflatten(1, (keys.shape[1], -1))  # [S, H_kv, G, D]
    scores = (grouped @ keys.to(exact).mT * scale).masked_fill(~visible[:, :, None], float("-inf"))
    # What lies outside has no weight, but would still make NaN of one that it holds.
    return (scores.softmax(-1) @ values.to(exact).masked_fill(~visible[..., None], 0)).flatten(1, 2).to(query.dtype)

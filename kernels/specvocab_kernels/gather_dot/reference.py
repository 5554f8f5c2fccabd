"""``gather_dot`` in plain torch."""

import torch
from torch import Tensor

MAX_GATHERED = 1 << 22  # elements of one gathered block (16 MB of float32), unless B · d alone is more


def gather_dot_torch(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """``[B, d], [V, d], [B, k] -> [B, k]`` float32; ids outside ``[0, V)`` give NaN.

    Multiplies and sums rather than calling ``matmul``, which a global switch may turn to TF32 or bfloat16.
    """
    hidden = hidden.float().unsqueeze(1)
    valid = (ids >= 0) & (ids < weight.shape[0])
    rows = ids.long().masked_fill(~valid, 0)
    candidates_per_block = max(1, MAX_GATHERED // max(1, hidden.numel()))
    # In place: indexing has made a copy already, and a second one costs more than the product.
    logits = [weight[block].float().mul_(hidden).sum(-1) for block in rows.split(candidates_per_block, dim=1)]
    return torch.cat(logits, dim=1).masked_fill(~valid, torch.nan)

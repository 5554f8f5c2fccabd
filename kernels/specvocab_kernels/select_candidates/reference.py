"""``select_candidates`` in plain torch."""

import torch
from torch import Tensor


def select_candidates_torch(scores: Tensor, k: int) -> Tensor:
    """``[B, V] -> [B, min(k, V)]`` int64; unsorted, because sorting costs time and the order means nothing."""
    batch_size, vocab_size = scores.shape
    if k >= vocab_size:
        return torch.arange(vocab_size, device=scores.device).repeat(batch_size, 1)
    return torch.topk(scores, k, dim=1, sorted=False).indices

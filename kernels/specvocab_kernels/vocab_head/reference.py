"""The head in plain torch and float32."""

from __future__ import annotations

import torch
from torch import Tensor

from specvocab_kernels.gather_dot.reference import gather_dot_torch
from specvocab_kernels.vocab_head.weights import HeadWeights, dequantize_vocab_proj

ROWS_AT_ONCE = 1 << 15  # of vocab_proj, converted to float32 at one time


def vocab_head_torch(hidden: Tensor, weights: HeadWeights, shared: bool) -> tuple[Tensor, Tensor]:
    """Candidate ids ``[B, k]`` int64 and their raw logits ``[B, k]`` float32."""
    scores = approximate_logits(hidden, weights)
    if shared and hidden.shape[0] > 1:
        ids = weights.selection.select(best_of_rows(scores)).repeat(hidden.shape[0], 1)
    else:
        ids = weights.selection.select(scores)
    return ids, gather_dot_torch(hidden, weights.lm_head, ids)


def approximate_logits(hidden: Tensor, weights: HeadWeights) -> Tensor:
    """``[B, V]`` float32 by id: what the selection looks at."""
    reduced = hidden.float() @ weights.down_proj.float().t()
    scales = weights.scales.split(ROWS_AT_ONCE) if weights.scales is not None else None
    blocks = [
        reduced @ dequantize_vocab_proj(rows, None if scales is None else scales[i]).t()
        for i, rows in enumerate(weights.vocab_proj.split(ROWS_AT_ONCE))
    ]
    return weights.selection.restore(torch.cat(blocks, dim=1).t()).t().contiguous()


def best_of_rows(scores: Tensor) -> Tensor:
    """``[B, V] -> [1, V]``: each id's largest score over the rows, NaN where one is."""
    return scores.amax(0, keepdim=True)


def top_n_torch(ids: Tensor, logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The ``n`` largest logits ``[B, n]`` with their ids, as log-probabilities over the candidates."""
    order = logits.sort(dim=1, descending=True, stable=True)
    place = order.indices[:, :n]
    return ids.gather(1, place), order.values[:, :n] - logits.logsumexp(1, keepdim=True)

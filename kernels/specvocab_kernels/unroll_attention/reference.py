"""Unroll attention in plain torch, document by document: the path of the CPU, and what the kernels are tested against.

Softmax over two sets of keys is merged from the softmax over each. With ``o_j`` and ``l_j`` the output and the
log-sum-exp over set ``j``, ``o = sum_j exp(l_j - l) o_j`` where ``l = logsumexp_j l_j``. Here one set is the document's
step-0 keys, and every own key is a set of one, whose log-sum-exp is its score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spans:
    """Documents among the rows of a packed batch. The queries of a document are its last positions, in order."""

    query_offsets: Tensor  # [documents + 1] int32, from 0 to M
    key_offsets: Tensor  # [documents + 1] int32, from 0 to N
    max_queries: int  # of one document
    max_keys: int

    def documents(self) -> Iterator[tuple[slice, slice]]:
        """Queries and keys of every document that has queries. Waits for the device."""
        queries, keys = self.query_offsets.tolist(), self.key_offsets.tolist()
        for i in range(len(queries) - 1):
            if queries[i + 1] > queries[i]:
                yield slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])


def unroll_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor], spans: Spans
) -> Tensor:
    """See ``unroll_attention``; differentiable torch."""
    out, lse = shared_attention(query, key, value, spans)
    if not own_keys:
        return out
    grouped = query.unflatten(1, (key.shape[1], -1))  # [M, H_kv, G, D]
    scale = query.shape[-1] ** -0.5
    scores = [(grouped * own[:, :, None]).sum(-1).flatten(1).float() * scale for own in own_keys]  # [M, H]
    weights = torch.stack([lse.mT, *scores]).softmax(0).to(query.dtype).unflatten(2, (key.shape[1], -1))
    merged = weights[0, ..., None] * out.unflatten(1, (key.shape[1], -1))
    for weight, own in zip(weights[1:], own_values, strict=True):
        merged = merged + weight[..., None] * own[:, :, None]
    return merged.flatten(1, 2)


def shared_attention(query: Tensor, key: Tensor, value: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """Attention over the step-0 keys: output [M, H, D] and log-sum-exp of the scaled scores, fp32 [H, M]."""
    outs, lses = [], []
    for queries, keys in spans.documents():
        scores = _scores(query[queries], key[keys])
        lses.append(scores.logsumexp(-1).flatten(0, 1))
        weights = scores.softmax(-1).to(query.dtype)
        outs.append((weights @ _by_head(value[keys])[:, None]).flatten(0, 1).transpose(0, 1))
    return torch.cat(outs), torch.cat(lses, dim=1)


def shared_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, spans: Spans
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, step-0 keys and values, where ``out`` and ``lse`` are those over *all* keys.

    What flash attention's backward computes: it makes every probability anew as ``exp(score - lse)``, so given the
    merged ``lse`` it yields exactly these keys' share.
    """
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    scale, groups = query.shape[-1] ** -0.5, (key.shape[1], -1)
    delta = (grad_out * out).float().sum(-1).mT  # [H, M]
    for queries, keys in spans.documents():
        weights = (_scores(query[queries], key[keys]) - lse[:, queries].unflatten(0, groups)[..., None]).exp()
        grad = _by_head(grad_out[queries]).unflatten(0, groups).float()  # [H_kv, G, L_q, D]
        grad_weights = grad @ _by_head(value[keys])[:, None].mT.float()
        grad_scores = weights * (grad_weights - delta[:, queries].unflatten(0, groups)[..., None]) * scale
        grouped = _by_head(query[queries]).unflatten(0, groups).float()
        grads[0][queries] = (grad_scores @ _by_head(key[keys])[:, None].float()).flatten(0, 1).transpose(0, 1)
        grads[1][keys] = (grad_scores.mT @ grouped).sum(1).transpose(0, 1)
        grads[2][keys] = (weights.mT @ grad).sum(1).transpose(0, 1)
    return grads


def _by_head(rows: Tensor) -> Tensor:
    """[L, H, D] -> [H, L, D]"""
    return rows.transpose(0, 1)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Scaled scores of one document, fp32 [H_kv, G, L_q, L_k]; -inf where the key lies after the query."""
    num_queries, num_keys = query.shape[0], key.shape[0]
    grouped = _by_head(query).unflatten(0, (key.shape[1], -1)) * query.shape[-1] ** -0.5
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
    return (grouped @ _by_head(key)[:, None].mT).float().masked_fill(~visible, float("-inf"))

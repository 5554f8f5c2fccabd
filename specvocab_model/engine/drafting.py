"""Drafting chains and EAGLE-2's dynamic trees; nothing here asks the host, so that a graph can capture it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specvocab_model.engine.forward import DraftForward
from specvocab_model.engine.shapes import DraftShape
from specvocab_model.heads import Head
from specvocab_model.sampling import Sampling, draw


@dataclass(slots=True)
class Tree:
    """The tokens that the target judges next, for each sequence. Node 0, the root, is the newest token of the text."""

    token_ids: Tensor  # int64 [B, T]; the root's is filled in by whoever knows it
    parents: Tensor  # int64 [B, T], below the node's own index; the root's is itself
    depths: Tensor  # int64 [B, T]
    ancestors: Tensor  # bool [B, T, T], row t marks node t and what is above it
    probabilities: Tensor  # fp64 [B, T - 1, V], what the drafts of a sampled chain were drawn from; [B, 0, V] else

    @classmethod
    def chain(cls, batch_size: int, num_drafts: int, *, sampled_vocab_size: int, device: torch.device) -> Tree:
        """Of tokens 0. ``sampled_vocab_size`` 0: the chain is not drawn."""
        indices = torch.arange(num_drafts + 1, device=device).expand(batch_size, -1)
        num_drawn = num_drafts if sampled_vocab_size else 0
        return cls(
            token_ids=torch.zeros_like(indices).contiguous(),
            parents=(indices - 1).clamp_min(0),
            depths=indices.clone(),
            ancestors=(indices[:, :, None] >= indices[:, None]),
            probabilities=torch.zeros(batch_size, num_drawn, sampled_vocab_size, dtype=torch.float64, device=device),
        )


@dataclass(slots=True)
class Verified:
    """The positions that the last verification added, which the draft has not read."""

    features: Tensor  # [B, R, 3d], the target's; rows from ``num_new`` on hold leftovers
    next_ids: Tensor  # int64 [B, R], the token after each
    starts: Tensor  # int64 [B], position of the first
    num_new: Tensor  # int64 [B], 1 to R

    @classmethod
    def nothing(cls, batch_size: int, num_rows: int, weight: Tensor) -> Verified:
        """``weight``: [.., d], of the target's dtype and device."""
        return cls(
            features=weight.new_zeros(batch_size, num_rows, 3 * weight.shape[-1]),
            next_ids=weight.new_zeros(batch_size, num_rows, dtype=torch.int64),
            starts=weight.new_zeros(batch_size, dtype=torch.int64),
            num_new=weight.new_ones(batch_size, dtype=torch.int64),
        )


class ChainDrafter:
    """Drafts ``shape.depth`` tokens after one another: the likeliest, or drawn."""

    def __init__(self, forward: DraftForward, head: Head, shape: DraftShape, sampling: Sampling) -> None:
        self.forward, self.head, self.shape, self.sampling = forward, head, shape, sampling
        self.vocab_size = forward.target.spec.vocab_size

    def __call__(self, verified: Verified, tree: Tree, uniforms: Tensor, width: int) -> None:
        """Read what was verified, then write the next drafts to ``tree``.

        Args:
            uniforms: fp64 [B, depth] in [0, 1), looked at when sampling.
        """
        hidden, lengths = read_verified(self.forward, verified, width)
        num_keys = max(1, self.shape.num_expanded)
        causal = torch.ones(1, num_keys, num_keys, dtype=torch.bool, device=lengths.device).tril()
        for i in range(1, self.shape.depth + 1):
            token_ids = self._pick(hidden[:, 0], tree, i, uniforms)
            tree.token_ids[:, i] = token_ids
            if i < self.shape.depth:
                columns = lengths[:, None] + i - 1  # the position of the token before: the draft reads x[t+1] at t
                hidden = self.forward(
                    hidden, token_ids[:, None], columns, columns, lengths, causal[:, i - 1 : i], width)

    def _pick(self, hidden: Tensor, tree: Tree, step: int, uniforms: Tensor) -> Tensor:
        """Draft number ``step`` from pre-norm output [B, d], int64 [B]; what it was drawn from goes to the tree."""
        output = self.head(self.forward.draft.norm(hidden))
        if self.sampling.greedy:
            return output.greedy_tokens()
        probabilities = self.sampling.probabilities(output.dense_logits(self.vocab_size))
        tree.probabilities[:, step - 1] = probabilities
        return draw(probabilities, uniforms[:, step - 1])


class TreeDrafter:
    """Grows a tree layer by layer and keeps its ``shape.num_tokens`` most probable nodes.

    A node's score is the log-probability of its path. It is never above its parent's, and ties go to the shallower
    node, so that what is kept hangs together.
    """

    def __init__(self, forward: DraftForward, head: Head, shape: DraftShape) -> None:
        self.forward, self.head, self.shape = forward, head, shape

    def __call__(self, verified: Verified, tree: Tree, uniforms: Tensor, width: int) -> None:
        """Read what was verified, then write the next tree; ``uniforms`` are not looked at: nothing is drawn."""
        top_k, device = self.shape.top_k, tree.token_ids.device
        hidden, lengths = read_verified(self.forward, verified, width)
        batch_size = len(lengths)
        token_ids, scores = self._children(hidden, torch.zeros(batch_size, 1, device=device))
        # The pool of all nodes; parents are places in it, -1 is the root.
        pool_tokens, pool_scores, pool_parents = [token_ids], [scores], [torch.full_like(token_ids, -1)]
        places = torch.arange(top_k, device=device).expand(batch_size, -1)
        hidden = hidden.expand(-1, top_k, -1)
        seen = torch.zeros(batch_size, top_k, self.shape.num_expanded, dtype=torch.bool, device=device)
        themselves = torch.eye(top_k, dtype=torch.bool, device=device)
        num_pooled = top_k
        for i in range(1, self.shape.depth):
            # The nodes of layer i are read: their keys stand in one block, each sees itself and what is above it.
            first, behind = (i - 1) * top_k, i * top_k
            seen[:, :, first:behind] = themselves
            columns = lengths[:, None] + torch.arange(first, behind, device=device)
            positions = (lengths + i - 1)[:, None].expand(-1, top_k)
            hidden = self.forward(hidden, token_ids, columns, positions, lengths, seen, width)
            child_tokens, child_scores = self._children(hidden, scores)
            pool_tokens.append(child_tokens)
            pool_scores.append(child_scores)
            pool_parents.append(places[:, :, None].expand(-1, -1, top_k).flatten(1))
            scores, chosen = child_scores.topk(top_k)
            above = chosen // top_k
            token_ids, places = child_tokens.gather(1, chosen), num_pooled + chosen
            hidden = _take(hidden, above)
            seen = _take(seen, above)
            num_pooled += top_k**2
        self._keep(torch.cat(pool_tokens, 1), torch.cat(pool_scores, 1), torch.cat(pool_parents, 1), tree)

    def _children(self, hidden: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The ``top_k`` best tokens after each node and their scores: [B, K * top_k] for [B, K, d] and [B, K]."""
        ids, log_probs = self.head.top_n(self.forward.draft.norm(hidden).flatten(0, 1), self.shape.top_k)
        children = log_probs.view(*scores.shape, -1) + scores[:, :, None]
        return ids.long().view(len(scores), -1), children.flatten(1)

    def _keep(self, token_ids: Tensor, scores: Tensor, parents: Tensor, tree: Tree) -> None:
        """Write the best nodes of the pool to the tree; all [B, P]: ids, fp32 scores, places of parents in the pool."""
        batch_size, num_pooled = token_ids.shape
        order = scores.sort(dim=1, descending=True, stable=True).indices
        kept = order[:, : self.shape.num_drafts].sort(dim=1).values  # layer by layer: parents come first
        nodes = torch.arange(1, kept.shape[1] + 1, device=kept.device).expand(batch_size, -1)
        node_at = kept.new_zeros(batch_size, num_pooled + 1)  # of each place in the pool, shifted by one for the root
        node_at.scatter_(1, kept + 1, nodes)
        tree.token_ids[:, 1:] = token_ids.gather(1, kept)
        tree.parents[:, 1:] = node_at.gather(1, parents.gather(1, kept) + 1)
        tree.ancestors.copy_(ancestors_of(tree.parents, self.shape.depth))
        tree.depths.copy_(tree.ancestors.sum(-1) - 1)


def read_verified(forward: DraftForward, verified: Verified, width: int) -> tuple[Tensor, Tensor]:
    """Step 0 at the new positions: the output at the last of them [B, 1, d], and the length of the text read [B]."""
    hidden = forward.read(verified.features, verified.next_ids, verified.starts, width)
    return _take(hidden, verified.num_new[:, None] - 1), verified.starts + verified.num_new


def ancestors_of(parents: Tensor, depth: int) -> Tensor:
    """Node ``t`` and what is above it, bool [B, T, T], of ``parents`` int64 [B, T] of a tree no deeper than ``depth``.

    With ``S`` = "is or is the parent of", ``S^n`` reaches ``n`` steps up; squaring doubles ``n``. Counts of paths stay
    far below what fp32 holds exactly.
    """
    num_nodes = parents.shape[1]
    steps = torch.eye(num_nodes, device=parents.device).expand(len(parents), -1, -1).clone()
    steps.scatter_(2, parents[:, :, None], 1.0)
    reach = 1
    while reach < depth:
        steps = (steps @ steps).clamp_max(1.0)
        reach *= 2
    return steps > 0


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """``rows`` [B, T, d] at ``index`` [B, n]: [B, n, d]."""
    return rows.gather(1, index[:, :, None].expand(-1, -1, rows.shape[2]))

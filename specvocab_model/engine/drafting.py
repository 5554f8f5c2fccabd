"""Drafting chains and EAGLE-2's dynamic trees; nothing here asks the host, so that a graph can capture it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specvocab_model.compiled_layers import Fuse
from specvocab_model.engine.forward import DraftForward, take
from specvocab_model.engine.shapes import DraftShape
from specvocab_model.heads import Head, HeadOutput
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

    def __init__(self, forward: DraftForward, head: Head, shape: DraftShape, sampling: Sampling, fuse: Fuse) -> None:
        self.forward, self.head, self.shape, self.sampling = forward, head, shape, sampling
        self._likeliest = fuse(HeadOutput.greedy_tokens)

    def __call__(self, verified: Verified, tree: Tree, uniforms: Tensor, width: int) -> None:
        """Read what was verified, then write the next drafts to ``tree``.

        Args:
            uniforms: fp64 [B, depth] in [0, 1), looked at when sampling.
        """
        hidden, normed, lengths = read_verified(self.forward, verified, width)
        drafts = [self._pick(normed, tree, 0, uniforms)]
        for step in range(self.shape.depth - 1):
            hidden, normed = self.forward.follow(hidden, drafts[-1], lengths, step, width)
            drafts.append(self._pick(normed, tree, step + 1, uniforms))
        tree.token_ids[:, 1:] = torch.stack(drafts, dim=1)

    def _pick(self, normed: Tensor, tree: Tree, step: int, uniforms: Tensor) -> Tensor:
        """A draft from normalised output [B, 1, d], int64 [B]; what it was drawn from goes to the tree."""
        output = self.head(normed[:, 0])
        if self.sampling.greedy:
            return self._likeliest(output)
        probabilities = tree.probabilities[:, step]
        probabilities.copy_(self.sampling.probabilities(output.dense_logits(probabilities.shape[-1])))
        return draw(probabilities, uniforms[:, step])


class Nodes(NamedTuple):
    """The nodes of a tree's layer that are expanded."""

    token_ids: Tensor  # int64 [B, K]
    scores: Tensor  # fp32 [B, K], log-probabilities of their paths
    places: Tensor  # int64 [B, K], theirs in the pool of all nodes
    hidden: Tensor  # [B, K, d], the draft's output for their parents
    seen: Tensor  # bool [B, K, N], the nodes above each, as ``forward.grow`` takes it


class Pool(NamedTuple):
    """A layer's part of all nodes: each of its last layer's nodes has ``top_k`` children, one after another."""

    token_ids: Tensor  # int64 [B, P]
    scores: Tensor  # fp32 [B, P]
    parents: Tensor  # int64 [B, P], places in the pool; -1 is the root


class TreeDrafter:
    """Grows a tree layer by layer and keeps its ``shape.num_tokens`` most probable nodes.

    A node's score is the log-probability of its path. It is never above its parent's, and ties go to the shallower
    node, so that what is kept hangs together.
    """

    def __init__(self, forward: DraftForward, head: Head, shape: DraftShape, fuse: Fuse) -> None:
        self.forward, self.head, self.shape = forward, head, shape
        self._begin, self._choose, self._keep = fuse(children_of_root), fuse(children_of_nodes), fuse(keep_best)

    def __call__(self, verified: Verified, tree: Tree, uniforms: Tensor, width: int) -> None:
        """Read what was verified, then write the next tree; ``uniforms`` are not looked at: nothing is drawn."""
        hidden, normed, lengths = read_verified(self.forward, verified, width)
        pool, nodes = self._begin(*self._best(normed), hidden, self.shape.num_expanded)
        pools = [pool]
        for step in range(self.shape.depth - 1):
            hidden, normed, seen = self.forward.grow(nodes.hidden, nodes.token_ids, nodes.seen, lengths, step, width)
            pool, nodes = self._choose(*self._best(normed), nodes, hidden, seen, self.forward.steps[step])
            pools.append(pool)
        self._keep(pools, tree, self.shape.depth)

    def _best(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The ``top_k`` best tokens after each node and their log-probabilities: [B * K, top_k] for [B, K, d]."""
        return self.head.top_n(normed.flatten(0, 1), self.shape.top_k)


def children_of_root(ids: Tensor, log_probs: Tensor, hidden: Tensor, num_expanded: int) -> tuple[Pool, Nodes]:
    """The first layer, all of which is expanded.

    Args:
        ids, log_probs: [B, top_k], the head's best; ``hidden``: [B, 1, d], what it saw, before the norm.
        num_expanded: nodes that the draft will read.
    """
    batch_size, top_k = ids.shape
    token_ids, places = ids.long(), torch.arange(top_k, device=ids.device).expand(batch_size, -1)
    seen = torch.zeros(batch_size, top_k, num_expanded, dtype=torch.bool, device=ids.device)
    return (Pool(token_ids, log_probs, torch.full_like(token_ids, -1)),
            Nodes(token_ids, log_probs, places, hidden.expand(-1, top_k, -1), seen))


def children_of_nodes(
    ids: Tensor, log_probs: Tensor, nodes: Nodes, hidden: Tensor, seen: Tensor, step: Tensor
) -> tuple[Pool, Nodes]:
    """The next layer, and its best nodes.

    Args:
        ids, log_probs: [B * K, top_k], the head's best after each of ``nodes``.
        hidden, seen, step: of ``forward.grow``.
    """
    batch_size, top_k = nodes.token_ids.shape
    token_ids = ids.long().view(batch_size, -1)
    scores = (log_probs.view(batch_size, top_k, top_k) + nodes.scores[:, :, None]).flatten(1)
    best, chosen = scores.topk(top_k)
    above = chosen // top_k
    places = top_k + step * top_k**2 + chosen  # behind all layers before
    return (Pool(token_ids, scores, nodes.places[:, :, None].expand(-1, -1, top_k).flatten(1)),
            Nodes(token_ids.gather(1, chosen), best, places, take(hidden, above), take(seen, above)))


def keep_best(pools: list[Pool], tree: Tree, depth: int) -> None:
    """Write the best nodes of all layers to the tree."""
    token_ids, scores, parents = (torch.cat(parts, dim=1) for parts in zip(*pools, strict=True))
    batch_size, num_drafts = len(token_ids), tree.token_ids.shape[1] - 1
    order = scores.sort(dim=1, descending=True, stable=True).indices
    kept = order[:, :num_drafts].sort(dim=1).values  # layer by layer: parents come first
    nodes = torch.arange(1, num_drafts + 1, device=kept.device).expand(batch_size, -1)
    node_at = kept.new_zeros(batch_size, scores.shape[1] + 1)  # of each place, shifted by one for the root
    node_at.scatter_(1, kept + 1, nodes)
    tree.token_ids[:, 1:] = token_ids.gather(1, kept)
    tree.parents[:, 1:] = node_at.gather(1, parents.gather(1, kept) + 1)
    tree.ancestors.copy_(ancestors_of(tree.parents, depth))
    tree.depths.copy_(tree.ancestors.sum(-1) - 1)


def read_verified(forward: DraftForward, verified: Verified, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Step 0 at the new positions: see ``forward.read``."""
    return forward.read(verified.features, verified.next_ids, verified.starts, verified.num_new, width)


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

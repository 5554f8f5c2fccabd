"""Clusters of tokens, of which a router picks some at every step (DynaSpec, https://arxiv.org/abs/2510.13847).

The rows of ``lm_head`` are clustered by direction, once. A small router on the draft's hidden state then says which
clusters the next token may be in, and exact logits are computed for the tokens of the likeliest ones. The router is
linear and starts from the clusters' mean rows, so that it scores a cluster by its mean logit before any training.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from specvocab_kernels.gather_dot import gather_dot
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from specvocab_model.config import ConfigError
from specvocab_model.heads.base import Head, HeadOutput

if TYPE_CHECKING:
    from specvocab_model.target import Target

ROWS_AT_ONCE = 8192  # rows of lm_head compared with all centroids at one time
BATCH_SIZE, LEARNING_RATE = 256, 1e-3  # of the router's training


class ClusterRouter(nn.Module):
    """Which tokens form a cluster, and which clusters a hidden state calls for.

    Args:
        hidden_size: ``d``.
        clusters: int64 [V], the cluster of every token, from 0 on; −1 for those that are always kept.
        num_clusters: ``K``.
    """

    sizes: Tensor  # int64 [K]
    tokens: Tensor  # int64 [V - S], cluster after cluster, ascending within each: small ids are the frequent ones
    always_keep: Tensor  # int64 [S]

    def __init__(self, hidden_size: int, clusters: Tensor, num_clusters: int) -> None:
        super().__init__()
        kept = clusters == -1
        self.register_buffer("always_keep", kept.nonzero()[:, 0])
        self.register_buffer("tokens", torch.argsort(clusters, stable=True)[int(kept.sum()) :])
        self.register_buffer("sizes", torch.bincount(clusters[~kept], minlength=num_clusters))
        self.score = nn.Linear(hidden_size, num_clusters)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens) + len(self.always_keep)

    def forward(self, hidden: Tensor) -> Tensor:
        """Scores of the clusters, fp32 [N, K], of normalised draft output [N, d]."""
        return self.score(hidden.float())

    def shortlist(self, hidden: Tensor, size: int) -> Tensor:
        """The tokens that are always kept, then cluster after cluster by falling score until there are ``size``.

        The last cluster is cut: engines capture the head in a graph of fixed shapes.

        Returns:
            int64 [N, size], distinct within a row.
        """
        order = self(hidden).argsort(dim=-1, descending=True, stable=True)
        sizes = self.sizes[order]
        ends = sizes.cumsum(-1)
        places = torch.arange(size - len(self.always_keep), device=hidden.device).expand(len(hidden), -1).contiguous()
        turn = torch.searchsorted(ends, places, right=True)  # how many clusters come before each place
        within = places - (ends - sizes).gather(-1, turn)
        starts = self.sizes.cumsum(0) - self.sizes
        chosen = self.tokens[starts[order.gather(-1, turn)] + within]
        return torch.cat([self.always_keep.expand(len(hidden), -1), chosen], -1)

    @classmethod
    def fit(
        cls,
        lm_head_weight: Tensor,
        always_keep: Iterable[int],
        hidden: Tensor,
        labels: Tensor,
        *,
        num_clusters: int = 256,
        num_epochs: int = 10,
        seed: int = 0,
    ) -> ClusterRouter:
        """Cluster the vocabulary, then train the router to name the cluster of ``labels``.

        It is a classifier, trained by cross-entropy with one label a state. Labels that are always kept teach nothing.

        Args:
            lm_head_weight: ``U`` [V, d].
            hidden: [N, d], normalised draft output (``draft_states.collect_draft_states``).
            labels: int64 [N], the token that the full head, or the target, would choose there.
            num_clusters: at most the number of tokens that are not always kept.

        Raises:
            ConfigError: more clusters than tokens, or no state to learn from.
        """
        vocab_size, device = len(lm_head_weight), lm_head_weight.device
        others = torch.ones(vocab_size, dtype=torch.bool)
        others[sorted(set(always_keep))] = False
        ids = others.nonzero()[:, 0].to(device)
        if not 1 <= num_clusters <= len(ids):
            raise ConfigError(f"num_clusters={num_clusters} must lie between 1 and the {len(ids)} tokens to cluster")
        clusters = torch.full((vocab_size,), -1, device=device)
        clusters[ids] = spherical_kmeans(lm_head_weight[ids].float(), num_clusters, seed=seed)
        wanted = clusters[labels.to(device)]
        hidden, wanted = hidden.to(device)[wanted >= 0].detach(), wanted[wanted >= 0]
        if not len(wanted):
            raise ConfigError("no state has a label outside the tokens that are always kept; give more text")
        router = cls(lm_head_weight.shape[1], clusters, num_clusters).to(device)
        router._train(lm_head_weight, hidden, wanted, num_epochs, seed)
        return router.eval().requires_grad_(False)

    @torch.enable_grad()
    def _train(self, lm_head_weight: Tensor, hidden: Tensor, wanted: Tensor, num_epochs: int, seed: int) -> None:
        of_token = torch.repeat_interleave(torch.arange(len(self.sizes), device=hidden.device), self.sizes)
        with torch.no_grad():
            self.score.weight.zero_().index_add_(0, of_token, lm_head_weight[self.tokens].float())
            self.score.weight.div_(self.sizes.clamp_min(1)[:, None])
            self.score.bias.zero_()
        optimizer = torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(num_epochs):
            for at in torch.randperm(len(hidden), generator=generator).to(hidden.device).split(BATCH_SIZE):
                loss = cross_entropy(self(hidden[at]), wanted[at])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


@torch.no_grad()
def spherical_kmeans(rows: Tensor, num_clusters: int, *, seed: int = 0, num_rounds: int = 30) -> Tensor:
    """Clusters by direction (Dhillon and Modha 2001): the centroid with the largest cosine, then means, normalised.

    It ends when no row changes its cluster, or after ``num_rounds``. A cluster that loses all its rows takes the one
    that is farthest from its centroid.

    Args:
        rows: fp32 [n, d], n at least ``num_clusters``.

    Returns:
        int64 [n], in ``range(num_clusters)``.
    """
    directions = normalize(rows, dim=-1)
    start = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:num_clusters]
    centroids = directions[start.to(rows.device)]
    clusters = torch.full((len(rows),), -1, device=rows.device)
    for _ in range(num_rounds):
        closest = [(chunk @ centroids.mT).max(-1) for chunk in directions.split(ROWS_AT_ONCE)]
        cosines, found = torch.cat([best.values for best in closest]), torch.cat([best.indices for best in closest])
        empty = (torch.bincount(found, minlength=num_clusters) == 0).nonzero()[:, 0]
        found[cosines.argsort(dim=-1, stable=True)[: len(empty)]] = empty
        if torch.equal(found, clusters):
            break
        clusters = found
        centroids = normalize(torch.zeros_like(centroids).index_add_(0, clusters, directions), dim=-1)
    return clusters


class ClusterHead(Head):
    """Exact logits for the tokens of the clusters that the router picks.

    Args:
        size: tokens at every position, those that are always kept among them.
        lm_head: the draft's own output embedding ``[V, d]``; by default the target's.

    Raises:
        ConfigError: ``size`` has no room for these, or the router belongs to a vocabulary of another size.
    """

    def __init__(self, target: Target, router: ClusterRouter, size: int, lm_head: Tensor | None = None) -> None:
        special, vocab_size = len(router.always_keep), target.spec.vocab_size
        if router.vocab_size != vocab_size:
            raise ConfigError(f"the router knows {router.vocab_size} tokens, but {target.spec.name} has {vocab_size}; "
                              "fit one to this target")
        if not special < size <= vocab_size:
            raise ConfigError(f"size={size} must be above the {special} tokens that are always kept and at most the "
                              f"{vocab_size} of the target")
        self.target, self.router, self.size = target, router.to(target.device), size
        self.lm_head = (target.lm_head_weight if lm_head is None else lm_head).detach()

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> HeadOutput:
        """Logits ``[N, size]`` of normalised hidden states ``[N, d]``."""
        ids = self.router.shortlist(hidden, self.size).int()
        return HeadOutput(ids, self.target.scale_and_cap(gather_dot(hidden, self.lm_head, ids)))

"""Which drafts stay, for all sequences at once and without asking the host.

A tree has ``T`` nodes, the first of which is the newest token of the text; a node's index is above its parent's, and
children of one node are different tokens. A chain is a tree in which everyone has one child.

**Trees, sampled.** The drafts are the likeliest tokens, not drawn ones: given the text, what is proposed is certain.
Multi-round rejection without replacement (SpecInfer, https://arxiv.org/abs/2305.09781; EAGLE) then accepts the first
child ``x`` with probability ``p(x)``, else takes ``x`` out of ``p``, normalises and goes on with the next child; what
is left in the end draws the token. Every token ``y`` comes out with probability ``p(y)``, and it continues the walk
exactly if it is a child. So each node draws ``y ~ p`` once, and the walk goes where it was drafted: the greedy rule
with a drawn token in the place of the largest logit.

**Chains, sampled**, are drawn from the draft and verified as ``sampling.verify_sampled`` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specvocab_model.sampling import draw


def choices_agree(token_ids: Tensor, parents: Tensor, choices: Tensor) -> Tensor:
    """Whether each node is what the target chose after its parent; the root is.

    Args:
        token_ids, parents: int64 [B, T]; a root's parent is itself.
        choices: int64 [B, T], the target's token after each node.

    Returns:
        bool [B, T]
    """
    is_root = torch.arange(token_ids.shape[1], device=token_ids.device) == 0
    return is_root | (token_ids == choices.gather(1, parents))


def draws_agree(token_ids: Tensor, target_probs: Tensor, draft_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Whether each draft of a chain passes its test, if those before it did; the root does.

    Args:
        token_ids: int64 [B, T], the root and the drafts.
        target_probs: fp64 [B, T, V], after each of them; ``draft_probs``: fp64 [B, T - 1, V], what drafts are from.
        uniforms: fp64 [B, T - 1] in [0, 1).
    """
    columns = token_ids[:, 1:, None]
    target, draft = target_probs[:, :-1].gather(2, columns)[..., 0], draft_probs.gather(2, columns)[..., 0]
    agree = torch.ones_like(token_ids, dtype=torch.bool)
    agree[:, 1:] = uniforms * draft < target
    return agree


def accepted_path(agree: Tensor, ancestors: Tensor, depths: Tensor, limits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The accepted nodes: those that agree with all their ancestors, down to the limit.

    Args:
        agree: bool [B, T]; ``ancestors``: bool [B, T, T], row ``t`` marks node ``t`` and what is above it.
        depths: int64 [B, T], the root's is 0; ``limits``: int64 [B], the depth of the deepest node that is judged.
        size: nodes on the longest path, with the root.

    Returns:
        path int64 [B, size], the nodes from the root down, then the root; and how many drafts are on it [B].
    """
    broken = (ancestors & ~agree[:, None]).any(-1)
    accepted = ~broken & (depths <= limits[:, None])
    indices, places = torch.arange(agree.shape[1], device=agree.device), torch.arange(size, device=agree.device)
    here = accepted[:, None] & (depths[:, None] == places[:, None])  # at most one node of each depth
    return (here * indices).sum(-1), accepted.sum(-1) - 1


def next_of_chain(
    target_probs: Tensor, draft_probs: Tensor, num_accepted: Tensor, limits: Tensor, uniforms: Tensor
) -> Tensor:
    """The token after the accepted drafts of a sampled chain, int64 [B].

    Drawn from the residual where a draft was rejected, and from the target's own distribution where none was left.
    Arguments as above; ``uniforms`` fp64 [B].
    """
    rows = torch.arange(len(num_accepted), device=num_accepted.device)
    target = target_probs[rows, num_accepted]
    residual = (target - draft_probs[rows, num_accepted.clamp_max(draft_probs.shape[1] - 1)]).clamp_min(0)
    # p = q up to rounding leaves no residual; a rejection then has probability of the order of the rounding itself.
    rejected = (num_accepted < limits) & (residual.sum(-1) > 0)
    return draw(torch.where(rejected[:, None], residual, target), uniforms)

"""What becomes of the embedding and the head that a public draft brings.

EAGLE-3 trains a reduced head of its own, ``W`` [D, d], which the draft's output is fitted to. Without training, a head
over the full vocabulary can be

    target   the target's ``U``: right where ``W`` began as rows of ``U``, and nonsense where it began at random;
    own      ``W`` for its tokens and ``U M`` for the others, where ``M`` [d, d] brings ``U``'s rows of those tokens
             nearest to ``W``: the linear change of basis from one head's space to the other's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from specvocab_model.config import ConfigError
from specvocab_model.draft_states import DraftStates
from specvocab_model.heads.static import OwnHead
from specvocab_model.public_drafts import PublicDraft
from specvocab_model.target import Target
from specvocab_model.vocab import VocabMap

LM_HEADS = ("target", "own")
SAME = 0.01  # relative difference of two copies of a weight that only rounding can have made
ROWS = 4096  # of a matrix that exist in fp32 at one time
STATES = 128  # whose logits over the whole vocabulary exist at one time


def check_embedding(draft: PublicDraft, target: Target) -> None:
    """See that the draft was trained with the target's embedding, which a checkpoint shares.

    Raises:
        ConfigError: it brings another.
    """
    theirs = target.model.get_input_embeddings().weight
    ours = draft.embed_tokens
    if ours is not None and (ours.shape != theirs.shape or not same_weight(ours, theirs)):
        raise ConfigError(f"the draft brings an embedding {list(ours.shape)} that is not {target.spec.name}'s, and a "
                          "SpecVocab draft shares the target's; it was trained for another target, or has trained its "
                          "embedding and cannot be converted")


def own_head_of(draft: PublicDraft, target: Target) -> OwnHead | None:
    """The head that the draft brings, unless that is a copy of rows of the target's ``lm_head``."""
    own = draft.model.own_head
    if own is None or same_weight(own.weight, target.lm_head_weight[own.ids.to(target.device)]):
        return None
    return own.to(target.device)


def full_heads(own: OwnHead | None, target: Target) -> dict[str, OwnHead | None]:
    """What each of ``LM_HEADS`` would be; ``None`` is the target's own."""
    heads: dict[str, OwnHead | None] = {"target": None}
    if own is not None:
        heads["own"] = own if own.is_full else extended(own, target.lm_head_weight)
    return heads


@torch.no_grad()
def extended(own: OwnHead, lm_head: Tensor) -> OwnHead:
    """A reduced head, continued to all tokens of ``lm_head`` [V, d]; its own rows stay what they are."""
    rows = lm_head[own.ids].double()
    # Least squares by the normal equations; a pseudo-inverse, as there may be fewer kept tokens than dimensions.
    basis = torch.linalg.pinv(rows.T @ rows, hermitian=True) @ (rows.T @ own.weight.to(rows))
    full = OwnHead(lm_head.shape[1], VocabMap.from_ids(torch.arange(len(lm_head)), len(lm_head)))
    weight = torch.cat([part.float() @ basis.float() for part in lm_head.split(ROWS)])
    weight[own.ids] = own.weight.to(weight)
    full.weight = nn.Parameter(weight.to(lm_head.dtype))
    return full.to(lm_head.device)


@torch.no_grad()
def agreement(states: DraftStates, target: Target, own: OwnHead | None) -> float:
    """How often the draft's most probable token under ``own``, or under the target's ``lm_head``, is the target's."""
    weight = target.lm_head_weight if own is None else own.weight.to(target.lm_head_weight.dtype)
    best = torch.cat([linear(part, weight).argmax(-1) for part in states.hidden.flatten(0, 1).split(STATES)])
    tokens = best if own is None else own.ids[best]
    return states.share(tokens.view(states.draft_ids.shape) == states.target_ids)


def same_weight(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices of one shape differ by no more than roundings to 16 bits."""
    difference = total = 0.0
    for mine, theirs in zip(one.split(ROWS), other.split(ROWS), strict=True):
        expected = theirs.detach().float().cpu()
        difference += float((mine.detach().float().cpu() - expected).square().sum())
        total += float(expected.square().sum())
    return difference <= SAME**2 * total

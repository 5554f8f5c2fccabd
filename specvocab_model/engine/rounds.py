"""What a round changes: functions of tensors alone, so that each can be compiled into a few kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from specvocab_model.engine.drafting import Tree, Verified
from specvocab_model.engine.texts import Texts
from specvocab_model.engine.verification import accepted_path, choices_agree
from specvocab_model.target import TargetSpec, scale_and_cap

NUM_COUNTS = 3  # columns of the report in front of the tokens: tokens that came out, drafts accepted, drafts judged


@dataclass(slots=True)
class State:
    """What a round changes, beside the caches."""

    texts: Texts
    verified: Verified
    tree: Tree
    report: Tensor  # int64 [B, NUM_COUNTS + path_size], what the host reads
    ends: Tensor  # int64 [E], the EOS ids


def likeliest(final_hidden: Tensor, lm_head_weight: Tensor, spec: TargetSpec) -> Tensor:
    """The token of the largest logit, int64 [..], of hidden states [.., d]."""
    return scale_and_cap(linear(final_hidden, lm_head_weight).float(), spec).argmax(-1)


def accept(state: State, choices: Tensor, max_length: int, depth: int) -> Tensor:
    """Those drafts that are the target's ``choices`` int64 [B, T] enter the text, and the choice after them.

    Returns:
        The path of ``accepted_path``.
    """
    tree, limits = state.tree, state.texts.most_accepted(max_length, depth)
    agree = choices_agree(tree.token_ids, tree.parents, choices)
    path, num_accepted = accepted_path(agree, tree.ancestors, tree.depths, limits, state.verified.next_ids.shape[1])
    following = choices.gather(1, path).gather(1, num_accepted[:, None])[:, 0]
    emit(state, path, num_accepted, limits, following)
    return path


def emit(state: State, path: Tensor, num_accepted: Tensor, limits: Tensor, following: Tensor) -> None:
    """Add accepted drafts and the token after them to the text, up to an EOS; write the report.

    Args:
        state: whose ``verified.starts`` are the lengths of the texts before this. They are not set here: in inductor's
            code (torch 2.11, 2.13) a copy of one argument to another sees what is written to the first afterwards.
        path: int64 [B, path_size], the nodes of the drafts, from the root down; those on it that count, beside the
            root, are ``num_accepted``, of ``limits`` that were judged; ``following``: the token after them; int64 [B].
    """
    texts, verified, tree = state.texts, state.verified, state.tree
    places = torch.arange(path.shape[1], device=path.device)
    drafts = tree.token_ids.gather(1, pad(path[:, 1:], (0, 1)))
    tokens = torch.where(places < num_accepted[:, None], drafts, following[:, None])
    ends = (tokens[:, :, None] == state.ends).any(-1) & (places <= num_accepted[:, None])
    stopped = ends.any(-1)
    counts = torch.where(stopped, ends.int().argmax(-1), num_accepted) + 1
    moving = ~texts.finished
    verified.next_ids.copy_(tokens)
    verified.num_new.copy_(num_accepted + 1)
    tree.token_ids[:, 0] = torch.where(moving, following, tree.token_ids[:, 0])
    texts.lengths += moving * (num_accepted + 1)
    texts.remaining -= moving * counts
    texts.finished |= stopped | (texts.remaining <= 0)
    counted = torch.stack([counts, torch.minimum(num_accepted, counts), limits], dim=1)
    state.report.copy_(torch.cat([counted, tokens], dim=1))

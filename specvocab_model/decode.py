"""Speculative decoding of a frozen target with a SpecVocab (EAGLE-3) draft: chains of drafts, batch of one.

The output is the target's own: token for token when greedy (up to rounding, where the target's two best logits tie),
in distribution when sampled. A round runs the target once over the newest token and the drafts after it, keeps the
accepted prefix and the target's token after it, and drafts the next chain:

    target   reads x[t] at position t and gives features[t] and p[t]
    step 0   at every newly verified t: features[t] with the token x[t+1], rotary position t -> x[t+2]
    step i   at the last t: its own pre-norm output with the draft for x[t+1+i], rotary position t+i -> x[t+2+i]

The draft's cache holds the step-0 keys of all verified positions; a chain's later keys are dropped when the next one
starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from specvocab_model.attention import DraftCache
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads import Head
from specvocab_model.sampling import Sampling, verify_greedy, verify_sampled
from specvocab_model.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """One decoded continuation and what it took."""

    sequences: list[int]  # the new tokens alone; a final EOS is kept
    num_target_forwards: int  # the prefill and every verification
    accepted_per_round: list[int]  # drafts kept by each verification
    proposals: list[int]  # drafts judged by each verification
    finish_reason: Literal["stop", "length"]  # an EOS, or max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A chain of ``n`` drafted tokens."""

    token_ids: Tensor  # int64 [n]
    probabilities: Tensor  # fp64 [n, V], what each token was drawn from; [0, V] when greedy
    hidden: Tensor  # [n, d], normalised draft output that each token was read from
    candidates: tuple[Tensor | None, ...]  # n times int32 [k], the tokens that the head could name; None: all

    @classmethod
    def empty(cls, target: Target) -> Proposal:
        weight = target.lm_head_weight
        return cls(
            token_ids=weight.new_empty(0, dtype=torch.int64),
            probabilities=weight.new_empty(0, weight.shape[0], dtype=torch.float64),
            hidden=weight.new_empty(0, weight.shape[1]),
            candidates=(),
        )

    @classmethod
    def join(cls, chain: Sequence[Proposal]) -> Proposal:
        return cls(
            token_ids=torch.cat([part.token_ids for part in chain]),
            probabilities=torch.cat([part.probabilities for part in chain]),
            hidden=torch.cat([part.hidden for part in chain]),
            candidates=tuple(ids for part in chain for ids in part.candidates),
        )


Observer = Callable[[Proposal, Tensor, int], None]
"""Sees every verification: the proposal, the target's logits [n + 1, V], and how many tokens it added to the text: the
accepted drafts and the target's next one, or those up to an EOS."""


def place_draft(model: SpecVocabDraft, target: Target) -> SpecVocabDraft:
    """Move a draft to the target's device and cast its parameters to the target's dtype, in place.

    ``model.to(dtype)`` would also round the rotary frequencies, which are a buffer and stay fp32 as in the target.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(target.lm_head_weight.dtype)
    return model.to(target.device)


def check_draft(target: Target, model: SpecVocabDraft) -> None:
    """
    Raises:
        ValueError: the draft has another dtype or device than the target, or reads other feature layers than it gives.
    """
    weight, expected = model.draft.fc.weight, target.lm_head_weight
    if (weight.dtype, weight.device) != (expected.dtype, expected.device):
        raise ValueError(
            f"the draft is {weight.dtype} on {weight.device}, the target {expected.dtype} on {expected.device}; "
            "move it with place_draft(model, target)"
        )
    if model.architecture.feature_layers != target.feature_layers:
        raise ValueError(
            f"the draft reads the feature layers {model.architecture.feature_layers}, the target gives "
            f"{target.feature_layers}; load the target with feature_layers=model.architecture.feature_layers"
        )


def speculative_generate(
    target: Target,
    model: SpecVocabDraft,
    head: Head,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    num_draft_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    observer: Observer | None = None,
) -> DecodeOutput:
    """Continue a prompt as the target would, in fewer target forwards.

    Args:
        target: the model whose output this is.
        model: the draft, on the target's device and of its dtype.
        head: turns draft output into logits (``heads.build_head``).
        input_ids: int64 [1, T], T >= 1.
        max_new_tokens: never exceeded; an EOS stops earlier, also inside an accepted run.
        num_draft_tokens: length of a chain; fewer where ``max_new_tokens`` or ``max_position_embeddings`` is near.
        temperature, top_k, top_p: see ``Sampling``; drafts are drawn the same way.
        generator: source of randomness when sampling, on the target's device.
        observer: called after every verification of at least one draft.

    Raises:
        ValueError: shapes or limits that make no sense, or a draft of another dtype or device than the target, or one
            that reads other feature layers than the target gives.
    """
    check_draft(target, model)
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens={num_draft_tokens} must not be negative")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    drafter = ChainDrafter(target, model, head, num_draft_tokens, sampling, generator)
    return _decode(target, drafter, input_ids, max_new_tokens, sampling, generator, observer)


def autoregressive_generate(
    target: Target,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> DecodeOutput:
    """The baseline: the same engine and caches without a draft, one token a forward. Arguments as above."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    return _decode(target, None, input_ids, max_new_tokens, sampling, generator, None)


class ChainDrafter:
    """The draft's side of one sequence: its cache and how it proposes the next chain."""

    def __init__(
        self,
        target: Target,
        model: SpecVocabDraft,
        head: Head,
        num_draft_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None,
    ):
        self.target, self.draft, self.head = target, model.draft, head
        self.num_draft_tokens = num_draft_tokens
        self.max_length = min(target.spec.max_position_embeddings, model.architecture.max_position_embeddings)
        self.sampling, self.generator = sampling, generator
        self.cache = DraftCache()
        self.num_verified = 0

    def room(self, length: int, num_remaining: int) -> int:
        """Drafts worth making for a sequence of ``length`` tokens; once 0 or less, it stays so."""
        # A round emits one token more than it accepts.
        return min(self.num_draft_tokens, num_remaining - 1, self.max_length - length)

    def propose(self, features: Tensor, next_ids: Tensor, num_tokens: int) -> Proposal:
        """Take in the newly verified positions, then draft from the last of them.

        Args:
            features: [1, m, 3d], the target's at those positions.
            next_ids: int64 [1, m], the token after each of them.
            num_tokens: length of the chain, at least 1.
        """
        self.cache.truncate(self.num_verified)  # the last chain's own keys
        start, self.num_verified = self.num_verified, self.num_verified + next_ids.shape[1]
        positions = torch.arange(start, self.num_verified, device=next_ids.device)[None]
        hidden = self._step(self.draft.fuse(features), next_ids, positions)[:, -1:]

        chain = [self._pick(hidden)]
        for i in range(1, num_tokens):
            hidden = self._step(hidden, chain[-1].token_ids[None], positions[:, -1:] + i)
            chain.append(self._pick(hidden))
        return Proposal.join(chain)

    def _step(self, hidden: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
        return self.draft.forward_cached(hidden, self.target.embed(token_ids), positions, self.cache)

    def _pick(self, hidden: Tensor) -> Proposal:
        """One token from the draft's pre-norm output [1, 1, d]."""
        hidden = self.draft.norm(hidden[:, 0])
        output = self.head(hidden)
        candidates = (None if output.ids is None else output.ids[0],)
        vocab_size = self.target.spec.vocab_size
        if self.sampling.greedy:
            no_rows = hidden.new_empty(0, vocab_size, dtype=torch.float64)
            return Proposal(
                token_ids=output.greedy_tokens(), probabilities=no_rows, hidden=hidden, candidates=candidates
            )
        probabilities = self.sampling.probabilities(output.dense_logits(vocab_size))
        token_ids = torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]
        return Proposal(token_ids=token_ids, probabilities=probabilities, hidden=hidden, candidates=candidates)


@torch.inference_mode()
def _decode(
    target: Target,
    drafter: ChainDrafter | None,
    input_ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    observer: Observer | None,
) -> DecodeOutput:
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}, but must be [1, T] with at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")

    # Made without the model's config, every layer keeps all positions. A sliding-window layer would forget the ones
    # that slide out while drafts are checked and could not take them back; the window is applied by the mask anyway.
    cache = DynamicCache()
    eos_token_ids = target.spec.eos_token_ids
    unseen, proposal = input_ids, Proposal.empty(target)  # unseen [1, m]: verified tokens that the target has not read
    new_tokens: list[int] = []
    accepted_per_round: list[int] = []
    proposals: list[int] = []
    if drafter is not None:
        drafter.head.begin(input_ids[0])
    while True:
        num_drafts = len(proposal.token_ids)
        inputs = torch.cat([unseen, proposal.token_ids[None]], dim=1)
        output = target.forward(inputs, past_key_values=cache)
        logits = target.logits(output.final_hidden[0, -(num_drafts + 1) :])
        num_accepted, next_id = _verify(logits, proposal, sampling, generator)
        num_rejected = num_drafts - num_accepted
        if num_rejected:
            cache.crop(-num_rejected)
        emitted = _up_to_eos(torch.cat([proposal.token_ids[:num_accepted], next_id]).tolist(), eos_token_ids)
        if drafter is not None:
            drafter.head.verified(input_ids.new_tensor(emitted), logits[: len(emitted)])
        if observer is not None and num_drafts:
            observer(proposal, logits, len(emitted))

        new_tokens += emitted
        accepted_per_round.append(min(num_accepted, len(emitted)))
        proposals.append(num_drafts)
        stopped = new_tokens[-1] in eos_token_ids
        if stopped or len(new_tokens) >= max_new_tokens:
            return DecodeOutput(
                sequences=new_tokens,
                num_target_forwards=len(proposals),
                accepted_per_round=accepted_per_round[1:],  # the first is the prefill
                proposals=proposals[1:],
                finish_reason="stop" if stopped else "length",
            )

        unseen, proposal = next_id[None], Proposal.empty(target)
        num_remaining = max_new_tokens - len(new_tokens)
        if drafter is not None and (room := drafter.room(input_ids.shape[1] + len(new_tokens), num_remaining)) > 0:
            num_verified = inputs.shape[1] - num_rejected
            next_ids = torch.cat([inputs[:, 1:num_verified], unseen], dim=1)
            proposal = drafter.propose(output.features[:, :num_verified], next_ids, room)


def _verify(
    logits: Tensor, proposal: Proposal, sampling: Sampling, generator: torch.Generator | None
) -> tuple[int, Tensor]:
    """How many of ``n`` drafts stay by ``logits`` [n + 1, V], and the target's token after them, int64 [1]."""
    if sampling.greedy:
        return verify_greedy(logits, proposal.token_ids)
    return verify_sampled(sampling.probabilities(logits), proposal.probabilities, proposal.token_ids, generator)


def _up_to_eos(token_ids: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    for i, token_id in enumerate(token_ids):
        if token_id in eos_token_ids:
            return token_ids[: i + 1]
    return token_ids

"""Whether an engine serves a checkpoint as it was trained: its draft's logits, its acceptance, and why that is low.

To add an engine, write a class with the signature of ``ServedDraft`` and give it a line in ``scripts/serve_check.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specvocab_model.attention import DraftCache
from specvocab_model.decode import speculative_generate
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads import build_head
from specvocab_model.target import Target, TargetSpec, default_feature_layers

SLACK = 2.0  # times the trainer's rounding that an engine's may be: it adds up and rounds in another order
LEAST_ERROR = 1e-5  # of either, relative: where the trainer's own is next to nothing
LEAST_LOSS = 0.02  # of candidates, as a share: with an 8-bit vocab_proj kernels round the other factor too
FEW = 0.5  # accepted drafts a round; an untrained draft has next to none, a trained one at least 1
ROWS = 8  # that engines are asked for at one time: of many, our plugins score every token where that is faster on a GPU
SIGMAS = 2.0  # standard errors that acceptance on different texts may be apart
LOST_ACCEPTANCE = 0.05  # share of our own decoder's accepted drafts that an engine may lose


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Greedy answers to prompts, with drafts."""

    answers: list[list[int]]  # new tokens, one list a prompt
    num_rounds: int  # verifications of drafts
    accepted_per_position: list[int]  # drafts kept, by position in the chain

    @property
    def accepted(self) -> float:
        """Mean number of drafts kept in a round."""
        return sum(self.accepted_per_position) / max(1, self.num_rounds)

    @property
    def standard_error(self) -> float:
        """Of ``accepted``, as if rounds were drawn at random."""
        rounds = max(1, self.num_rounds)
        square = sum((2 * place + 1) * kept for place, kept in enumerate(self.accepted_per_position)) / rounds
        return ((square - self.accepted**2) / rounds) ** 0.5


class ServedDraft(Protocol):
    """A checkpoint in an engine, read by the engine's own loader."""

    name: str  # of the engine, with its version

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """What the engine takes features from, as indices into HF's ``hidden_states``."""
        ...

    def logits(self, features: Tensor, next_ids: Tensor) -> Tensor:
        """Logits fp32 [T, V] of the first draft at every position of one text, −inf where a token is no candidate.

        Args:
            features: [T, 3d], the target's at positions 0 … T-1.
            next_ids: int64 [T], the token after each of them.
        """
        ...

    def serve(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Served:
        """Answer the prompts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far logits are from the trainer's in a wider type: the engine's, and the trainer's in the type served."""

    engine_error: float  # root mean square over common candidates, relative to that of the logits
    rounding_error: float
    engine_candidates: float  # those that the reference has too, as a share of the larger of both sets
    rounding_candidates: float
    head: str  # what the engine's logits are of: "speculative", "static" or "full"

    @property
    def equal(self) -> bool:
        """Within rounding, of which the trainer's own is the measure. Only a speculator's choice can be rounded."""
        lost = SLACK * (1 - self.rounding_candidates) + LEAST_LOSS if self.head == "speculative" else 0.0
        return (
            self.engine_error <= SLACK * self.rounding_error + LEAST_ERROR and 1 - self.engine_candidates <= lost
        )


@torch.inference_mode()
def compare_logits(served: ServedDraft, model: SpecVocabDraft, target: Target, input_ids: Tensor) -> Agreement:
    """The engine's draft and the trainer's on the same features, the target's for a text.

    Args:
        model: the checkpoint, of the target's type.
        input_ids: int64 [1, T], T > 1.
    """
    features, next_ids = target.forward(input_ids).features[0, :-1], input_ids[0, 1:]
    theirs = served.logits(features, next_ids).cpu()
    head = "speculative" if model.speculator is not None and theirs.isneginf().any() else "full"
    if model.own_head is not None and not model.own_head.is_full:
        head = "static"
    dtype = target.lm_head_weight.dtype
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    ours, reference = (trained_logits(model, target, features, next_ids, kind, head) for kind in (dtype, wide))
    (engine_error, engine_candidates), (rounding_error, rounding_candidates) = (
        _distance(logits.to(wide), reference) for logits in (theirs, ours)
    )
    return Agreement(engine_error=engine_error, rounding_error=rounding_error, engine_candidates=engine_candidates,
                     rounding_candidates=rounding_candidates, head=head)


def trained_logits(
    model: SpecVocabDraft, target: Target, features: Tensor, next_ids: Tensor, dtype: torch.dtype, head: str
) -> Tensor:
    """``ServedDraft.logits`` by the trainer's draft and the definition of its head, with the layer run in ``dtype``."""
    draft = copy.deepcopy(model.draft)
    for parameter in draft.parameters():
        parameter.data = parameter.data.to(dtype)
    positions = torch.arange(len(next_ids), device=next_ids.device)
    hidden = draft.forward_cached(
        draft.fuse(features.to(dtype))[None], target.embed(next_ids).to(dtype)[None], positions[None], DraftCache()
    )
    normed = draft.norm(hidden)[0]
    wide = torch.promote_types(dtype, torch.float32)
    own = model.own_head if head == "static" else None
    weight = model.lm_head_weight(target) if own is None else own.weight
    logits = target.scale_and_cap(normed.to(wide) @ weight.to(wide).T).to(dtype).to(wide)
    if head == "full":
        return logits.cpu()
    masked = logits.new_full((len(next_ids), target.spec.vocab_size), -torch.inf)
    if own is not None:
        return masked.index_copy_(1, own.ids, logits).cpu()
    assert model.speculator is not None
    speculator = copy.deepcopy(model.speculator).to(wide)
    ids = speculator.selection.select(speculator(normed.to(wide)))
    return masked.scatter_(1, ids, logits.gather(1, ids)).cpu()


def _distance(logits: Tensor, reference: Tensor) -> tuple[float, float]:
    kept, theirs = ~reference.isneginf(), ~logits.isneginf()  # a NaN is a candidate, with an error that is NaN
    common = kept & theirs
    difference = (logits[common] - reference[common]).square().mean().sqrt()
    share = common.sum() / torch.maximum(kept.sum(), theirs.sum())
    return float(difference / reference[common].square().mean().sqrt()), float(share)


def decode(
    target: Target, model: SpecVocabDraft, head: str, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
    num_draft_tokens: int
) -> Served:
    """What our own decoder makes of the prompts."""
    built = build_head(head, target, model)
    answers, num_rounds, accepted = [], 0, [0] * num_draft_tokens
    for prompt in prompts:
        output = speculative_generate(target, model, built, torch.tensor([list(prompt)], device=target.device),
                                      max_new_tokens=max_new_tokens, num_draft_tokens=num_draft_tokens)
        answers.append(output.sequences)
        for proposed, kept in zip(output.proposals, output.accepted_per_round, strict=True):
            num_rounds += proposed > 0
            for position in range(kept):
                accepted[position] += 1
    return Served(answers=answers, num_rounds=num_rounds, accepted_per_position=accepted)


def problems(
    served: ServedDraft, model: SpecVocabDraft, spec: TargetSpec, training: dict[str, Any] | None, agreement: Agreement
) -> list[str]:
    """What makes an engine serve something else than was trained, one line each.

    Args:
        training: what ``Provenance.config`` holds: the resolved configuration of the training, or what another command
            has recorded in its place, which does not know how the draft was trained.
    """
    found = []
    layers = model.architecture.feature_layers
    if served.feature_layers != layers:
        found.append(f"{served.name} takes features from layers {list(served.feature_layers)}, but the draft reads "
                     f"{list(layers)}: check eagle_aux_hidden_state_layer_ids of config.json, which counts inputs of "
                     "layers at the top level and outputs in eagle_config")
    if training is not None and "draft" in training:
        trained = tuple(training["draft"]["feature_layers"] or default_feature_layers(spec.num_hidden_layers))
        if trained != layers:
            found.append(f"config.json names the feature layers {list(layers)}, but the draft was trained on "
                         f"{list(trained)} (specvocab.json): config.json was changed, export again")
    if not agreement.equal:
        found.append(f"{served.name} computes other logits than the trainer's draft on the same features: it reads "
                     "RoPE, norms, head or weights in another way than config.json means; export again with this "
                     "release, and if that does not help, try the version of the engine that docs/SERVING.md names")
    if model.speculator is not None and agreement.head != "speculative":
        found.append(f"{served.name} serves the full vocabulary, not the speculated one: install specvocab into the "
                     "engine's environment, and see that no setting of the engine (VLLM_PLUGINS) leaves it out; where "
                     "it is there, all of lm_head was measured to be faster than the candidates of this head")
    return found


def acceptance_problems(engine: Served, own: Served, recorded_tau: float | None) -> list[str]:
    """What to look at where drafts are rejected, one line each; empty where both decoders accept what can be expected.

    Args:
        recorded_tau: what ``scripts/evaluate.py`` measured on its own prompts, if it did.
    """
    found = []
    chance = 0.0
    if engine.answers != own.answers:  # rounding has led to other texts, with drafts of their own
        chance = SIGMAS * (engine.standard_error**2 + own.standard_error**2) ** 0.5
    if engine.accepted + chance < (1 - LOST_ACCEPTANCE) * own.accepted:
        found.append(f"the engine accepts {engine.accepted:.2f} drafts a round, our own decoder {own.accepted:.2f} on "
                     "the same prompts: where logits agree, the engine feeds the draft something else than the "
                     "target's features (the algorithm must be eagle3, in vLLM \"method\": \"eagle3\"), or positions "
                     "beyond the draft's max_position_embeddings")
    if own.accepted < FEW:
        found.append(f"our own decoder accepts {own.accepted:.2f} drafts a round, too: the draft itself does not know "
                     "such answers; it was trained on too little, on other chats, or for other feature layers")
    least = 1 + own.accepted + SIGMAS * own.standard_error
    if recorded_tau is not None and least < (1 - LOST_ACCEPTANCE) * recorded_tau:
        found.append(f"our own decoder emits {own.accepted + 1:.2f} tokens a round here, and {recorded_tau:.2f} in the "
                     "evaluation that the checkpoint records: other prompts, or another chat template than in training")
    return found

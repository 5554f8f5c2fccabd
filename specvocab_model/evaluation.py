"""Measures drafts on prompts: acceptance length, candidate recall, speed, and that the output is the target's own."""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specvocab_model.decode import DecodeOutput, Proposal, autoregressive_generate, speculative_generate
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads import FullHead, Head
from specvocab_model.target import Target

WARM_UP_TOKENS = 8
IN_THE_BAR = ("full", "speculative", "static")  # whose τ the progress bar has room for
RECALL_ROWS = 128  # positions whose full-vocabulary logits exist at one time


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPrompt:
    """One question of one or more turns.

    ``encode_turn(answers)`` gives the token ids of turn ``len(answers)``, with the answers to the turns before.
    """

    id: str
    category: str
    num_turns: int
    encode_turn: Callable[[Sequence[str]], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where an output leaves the autoregressive one."""

    id: str
    turn: int
    position: int  # index of the first new token that differs
    top2_gap: float  # the target's best logit there minus its second best; of the order of rounding for a tie


@dataclass(slots=True)
class Measurement:
    """Sums over all decoded turns of one way to decode."""

    num_tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by category
    num_target_forwards: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: float = 0.0
    num_proposed: list[int] = field(default_factory=list)  # by position in the chain
    num_accepted: list[int] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    recall: CandidateRecall | None = None

    def add(self, category: str, output: DecodeOutput, seconds: float) -> None:
        self.num_tokens[category] += len(output.sequences)
        self.num_target_forwards[category] += output.num_target_forwards
        self.seconds += seconds
        longest = max(output.proposals, default=0)
        for counts in (self.num_proposed, self.num_accepted):
            counts.extend([0] * (longest - len(counts)))
        for proposed, accepted in zip(output.proposals, output.accepted_per_round, strict=True):
            for i in range(proposed):
                self.num_proposed[i] += 1
                self.num_accepted[i] += i < accepted

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per target forward, pooled."""
        return sum(self.num_tokens.values()) / sum(self.num_target_forwards.values())

    @property
    def tokens_per_second(self) -> float:
        return sum(self.num_tokens.values()) / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything a report needs, as JSON types."""
        return {
            "tau": self.tau,
            "tau_per_category": {
                name: tokens / self.num_target_forwards[name] for name, tokens in self.num_tokens.items()
            },
            "acceptance_per_position": [
                accepted / proposed for accepted, proposed in zip(self.num_accepted, self.num_proposed, strict=True)
            ],
            "tokens_per_second": self.tokens_per_second,
            "num_tokens": sum(self.num_tokens.values()),
            "num_target_forwards": sum(self.num_target_forwards.values()),
            "seconds": self.seconds,
            "differences": [asdict(difference) for difference in self.differences],
            "candidate_recall": self.recall.to_dict() if self.recall is not None else None,
        }


class CandidateRecall:
    """Share of judged draft positions whose reference token is among the head's candidates.

    Judged are the accepted drafts of a chain and the first rejected one: what follows a rejection, or an EOS, continues
    a text that does not exist. References: the target's argmax there (``target_top1``), and the argmax of the full head
    on the same draft output (``draft_top1``).
    """

    def __init__(self, full_head: Head):
        self.full_head = full_head
        self.hidden: list[Tensor] = []
        self.candidates: list[Tensor] = []
        self.target_ids: list[Tensor] = []
        self.num_positions = self.num_target_hits = self.num_draft_hits = 0

    def observe(self, proposal: Proposal, target_logits: Tensor, num_emitted: int) -> None:
        """Remember one verification; cheap, because it happens inside the measured time."""
        num_judged = min(num_emitted, len(proposal.token_ids))
        self.hidden.append(proposal.hidden[:num_judged])
        for ids in proposal.candidates[:num_judged]:
            assert ids is not None
            self.candidates.append(ids)
        self.target_ids.append(target_logits[:num_judged].argmax(-1))

    @torch.inference_mode()
    def count(self) -> tuple[int, int, int]:
        """Add what was remembered to the counts and forget it.

        Returns:
            What was added: judged positions, and those where the target's and the draft's token was a candidate.
        """
        if not self.hidden:
            return 0, 0, 0
        before = self.num_positions, self.num_target_hits, self.num_draft_hits
        hidden, target_ids, remembered = torch.cat(self.hidden), torch.cat(self.target_ids), self.candidates
        self.hidden, self.target_ids, self.candidates = [], [], []
        for start in range(0, len(hidden), RECALL_ROWS):
            at = slice(start, start + RECALL_ROWS)
            rows, ids, candidates = hidden[at], target_ids[at], torch.stack(remembered[at])
            self.num_positions += len(rows)
            self.num_target_hits += int((candidates == ids[:, None]).any(-1).sum())
            self.num_draft_hits += int((candidates == self.full_head(rows).greedy_tokens()[:, None]).any(-1).sum())
        return self.num_positions - before[0], self.num_target_hits - before[1], self.num_draft_hits - before[2]

    def to_dict(self) -> dict[str, float | int | None]:
        share = (lambda hits: hits / self.num_positions) if self.num_positions else (lambda hits: None)
        return {
            "target_top1": share(self.num_target_hits),
            "draft_top1": share(self.num_draft_hits),
            "num_positions": self.num_positions,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One draft with one head."""

    model: SpecVocabDraft
    head: Head


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a prompt, decoded with one variant."""

    variant: str
    prompt: EvalPrompt
    number: int
    num_prompt_tokens: int
    output: DecodeOutput
    seconds: float
    num_baseline_tokens: int  # of autoregressive decoding; when sampled it ends where it likes
    baseline_seconds: float
    recall: tuple[int, int, int] | None  # of ``CandidateRecall.count``
    difference: Difference | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What ``evaluate`` found."""

    autoregressive: Measurement
    variants: dict[str, Measurement]
    greedy: bool

    @property
    def lossless(self) -> bool | None:
        """Every output equals the autoregressive one token for token; None when sampled."""
        return all(not measured.differences for measured in self.variants.values()) if self.greedy else None

    def to_dict(self) -> dict[str, Any]:
        """JSON types; ``candidate_recall`` is that of the last head that has candidates."""
        everything = {"autoregressive": self.autoregressive} | self.variants
        recalls = [measured.recall.to_dict() for measured in self.variants.values() if measured.recall is not None]
        return {
            "tau": {name: measured.tau for name, measured in self.variants.items()},
            "candidate_recall": recalls[-1] if recalls else None,
            "lossless": self.lossless,
            "tokens_per_second": {name: measured.tokens_per_second for name, measured in everything.items()},
            "details": {name: measured.to_dict() for name, measured in everything.items()},
        }


def evaluate(
    target: Target,
    variants: Mapping[str, Variant],
    prompts: Sequence[EvalPrompt],
    *,
    max_new_tokens: int,
    num_draft_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    show_progress: bool = True,
    on_turn: Callable[[Turn], None] | None = None,
) -> Evaluation:
    """Decode every turn autoregressively and with every variant, one after the other.

    Taking turns on each prompt lets all of them feel the machine's slow and fast moments alike. A later turn follows
    on the autoregressive answers, so that all variants see the same prompts.

    Args:
        variants: name -> draft and head, each draft placed with ``decode.place_draft``.
        prompts: at least one.
        max_new_tokens, num_draft_tokens, temperature: see ``decode.speculative_generate``.
        seed: of the sampled tokens, when the temperature is not 0. With the prompt's id it decides them, whichever
            prompts and variants are decoded beside it.
        on_turn: called when a variant has decoded a turn.

    Raises:
        ValueError: there are no prompts.
    """
    if not prompts:
        raise ValueError("there are no prompts to evaluate on; give a file with at least one")
    limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    baseline = partial(autoregressive_generate, target, **limits)
    decoders = {
        name: partial(speculative_generate, target, v.model, v.head, num_draft_tokens=num_draft_tokens, **limits)
        for name, v in variants.items()
    }
    for decode in (baseline, *decoders.values()):  # the first calls pay for allocation and compilation
        decode(_input_ids(target, prompts[0], []), max_new_tokens=min(max_new_tokens, WARM_UP_TOKENS))

    evaluation = Evaluation(
        autoregressive=Measurement(),
        variants={name: Measurement(recall=_recall(target, variant)) for name, variant in variants.items()},
        greedy=temperature == 0,
    )
    with tqdm(total=sum(prompt.num_turns for prompt in prompts), unit="turn", disable=not show_progress) as progress:
        for prompt in prompts:
            answers: list[str] = []
            for turn in range(prompt.num_turns):
                input_ids = _input_ids(target, prompt, answers)
                timed = partial(_timed, input_ids=input_ids, seed=seed + zlib.crc32(prompt.id.encode()))
                reference, baseline_seconds = timed(baseline)
                evaluation.autoregressive.add(prompt.category, reference, baseline_seconds)
                for name, decode in decoders.items():
                    measured = evaluation.variants[name]
                    output, seconds = timed(decode, **_observing(measured.recall))
                    measured.add(prompt.category, output, seconds)
                    recalled = None if measured.recall is None else measured.recall.count()
                    difference = None
                    if evaluation.greedy and output.sequences != reference.sequences:
                        position, gap = first_difference(target, input_ids, reference.sequences, output.sequences)
                        difference = Difference(id=prompt.id, turn=turn, position=position, top2_gap=gap)
                        measured.differences.append(difference)
                    if on_turn is not None:
                        on_turn(Turn(variant=name, prompt=prompt, number=turn, num_prompt_tokens=input_ids.shape[1],
                                     output=output, seconds=seconds, num_baseline_tokens=len(reference.sequences),
                                     baseline_seconds=baseline_seconds, recall=recalled, difference=difference))
                answers.append(str(target.tokenizer.decode(reference.sequences, skip_special_tokens=True)))
                shown = [name for name in IN_THE_BAR if name in variants] or list(variants)[:1]
                progress.set_postfix({f"tau {name}": f"{evaluation.variants[name].tau:.2f}" for name in shown})
                progress.update()
    return evaluation


def _timed(
    decode: Callable[..., DecodeOutput], *, input_ids: Tensor, seed: int, **options: Any
) -> tuple[DecodeOutput, float]:
    """Decode once; the wall-clock seconds include the prefill. Tokens come back as a list, so the device is done."""
    generator = torch.Generator(input_ids.device).manual_seed(seed)
    start = time.perf_counter()
    output = decode(input_ids, generator=generator, **options)
    return output, time.perf_counter() - start


def _input_ids(target: Target, prompt: EvalPrompt, answers: Sequence[str]) -> Tensor:
    return torch.tensor([prompt.encode_turn(answers)], device=target.device)


def _recall(target: Target, variant: Variant) -> CandidateRecall | None:
    """A meter for heads that have candidates, found out by asking for some."""
    hidden = target.lm_head_weight.new_zeros(1, target.spec.hidden_size)
    if variant.head(hidden).ids is None:
        return None
    return CandidateRecall(FullHead(target, variant.model.lm_head_weight(target)))


def _observing(recall: CandidateRecall | None) -> dict[str, Any]:
    return {} if recall is None else {"observer": recall.observe}


@torch.inference_mode()
def first_difference(
    target: Target, input_ids: Tensor, expected: Sequence[int], actual: Sequence[int]
) -> tuple[int, float]:
    """Index of the first differing token, and the gap between the target's two best logits there."""
    pairs = zip(expected, actual, strict=False)  # one may be longer
    position = next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(expected), len(actual)))
    context = torch.cat([input_ids, input_ids.new_tensor([expected[:position]])], dim=1)
    best, second = target.logits(target.forward(context).final_hidden[0, -1]).topk(2).values.tolist()
    return position, best - second

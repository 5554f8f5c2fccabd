"""Measures drafts on prompts: acceptance length, candidate recall, speed, and that the output is the target's own."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specvocab_model.config import ConfigError
from specvocab_model.decode import DecodeOutput, autoregressive_generate, speculative_generate
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads import FullHead, Head
from specvocab_model.measurement import CandidateRecall, Difference, Measurement
from specvocab_model.target import Target

WARM_UP_TOKENS = 8
IN_THE_BAR = ("full", "speculative", "static")  # whose τ the progress bar has room for


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
    finished: Mapping[str, Any] | None = None,
    on_prompt: Callable[[dict[str, Any]], None] | None = None,
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
        on_prompt: called after each prompt with all that was measured, as JSON types; given to another call for the
            same prompts and variants as ``finished``, that one decodes the prompts that are left.

    Raises:
        ValueError: there are no prompts.
        ConfigError: see ``check_finite``.
    """
    if not prompts:
        raise ValueError("there are no prompts to evaluate on; give a file with at least one")
    limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    baseline = partial(autoregressive_generate, target, **limits)
    decoders = {
        name: partial(speculative_generate, target, v.model, v.head, num_draft_tokens=num_draft_tokens, **limits)
        for name, v in variants.items()
    }
    first_ids = _input_ids(target, prompts[0], [])
    check_finite(target, first_ids)
    for decode in (baseline, *decoders.values()):  # the first calls pay for allocation and compilation
        decode(first_ids, max_new_tokens=min(max_new_tokens, WARM_UP_TOKENS))

    evaluation = Evaluation(
        autoregressive=Measurement(),
        variants={name: Measurement(recall=_recall(target, variant)) for name, variant in variants.items()},
        greedy=temperature == 0,
    )
    measurements = {"autoregressive": evaluation.autoregressive} | evaluation.variants
    num_finished = 0 if finished is None else finished["num_prompts"]
    if finished is not None:
        for name, measured in measurements.items():
            measured.restore(finished["measurements"][name])
    turns, done = (sum(prompt.num_turns for prompt in prompts[:end]) for end in (None, num_finished))
    with tqdm(total=turns, initial=done, unit="turn", disable=not show_progress) as progress:
        for index, prompt in enumerate(prompts[num_finished:], start=num_finished + 1):
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
                        ((position, gap),) = first_differences(target, input_ids, reference.sequences,
                                                               [output.sequences])
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
            if on_prompt is not None:
                on_prompt({"num_prompts": index, "measurements": {name: measured.state()
                                                                  for name, measured in measurements.items()}})
    return evaluation


@torch.inference_mode()
def check_finite(target: Target, input_ids: Tensor) -> None:
    """See that the target computes numbers for ``input_ids``, int64 [1, T].

    Of logits that are none, greedy decoding takes the same token every time, with every draft: all would seem lossless,
    at the best acceptance length.

    Raises:
        ConfigError: a logit is not finite.
    """
    logits = target.logits(target.forward(input_ids).final_hidden[0, -1])
    if not logits.isfinite().all():
        dtype = str(target.lm_head_weight.dtype).removeprefix("torch.")
        raise ConfigError(f"the logits of {target.spec.name} in {dtype} are not finite, so nothing can be measured; "
                          "evaluate in another type (eval.dtype), or bring weights that are whole")


def _timed(
    decode: Callable[..., DecodeOutput], *, input_ids: Tensor, seed: int, **options: Any
) -> tuple[DecodeOutput, float]:
    """Decode once; the wall-clock seconds include the prefill. Tokens come back as a list, so the device is done."""
    generator = torch.Generator(input_ids.device).manual_seed(seed)
    start = time.perf_counter()
    output = decode(input_ids, generator=generator, **options)
    return output, time.perf_counter() - start


def _input_ids(target: Target, prompt: EvalPrompt, answers: Sequence[str]) -> Tensor:
    """int64 [1, T]."""
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
def first_differences(
    target: Target, input_ids: Tensor, expected: Sequence[int], outputs: Sequence[Sequence[int]]
) -> list[tuple[int, float]]:
    """Where each output leaves the expected one: index of the first token that differs, and the gap between the
    target's two best logits there. One forward of the target serves all.

    Args:
        input_ids: int64 [1, T], the prompt.
        expected, outputs: new tokens; every output differs from the expected ones.
    """
    positions = [_first_difference(expected, output) for output in outputs]
    text = torch.cat([input_ids, input_ids.new_tensor([expected[: max(positions)]])], dim=1)
    hidden = target.forward(text).final_hidden[0, input_ids.shape[1] - 1 :]  # the first predicts expected[0]
    best, second = target.logits(hidden[positions]).topk(2).values.unbind(-1)
    return list(zip(positions, (best - second).tolist(), strict=True))


def _first_difference(expected: Sequence[int], output: Sequence[int]) -> int:
    pairs = zip(expected, output, strict=False)  # one may be longer
    return next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(expected), len(output)))

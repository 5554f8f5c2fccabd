"""The figures of an evaluation, recomputed by other means."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from specvocab_model import evaluation
from specvocab_model.config import ConfigError, DraftConfig, HeadConfig
from specvocab_model.decode import (
    DecodeOutput,
    Proposal,
    autoregressive_generate,
    place_draft,
    speculative_generate,
)
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.evaluation import EvalPrompt, Evaluation, Variant, evaluate
from specvocab_model.heads import build_head
from specvocab_model.measurement import Difference, Measurement
from specvocab_model.target import Target
from tests.tiny import tile_candidates, tiny_target

LIMITS = {"max_new_tokens": 12, "num_draft_tokens": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def variants(target: Target) -> dict[str, Variant]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = place_draft(SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(num_candidates=60)), target)
    model.speculator.initialise("svd", target.lm_head_weight)
    return {kind: Variant(model=model, head=build_head(kind, target, model)) for kind in ("full", "speculative")}


class Conversation:
    """Two turns; remembers the answers it was given."""

    def __init__(self, target: Target, text: str) -> None:
        self.tokenizer, self.text, self.given = target.tokenizer, text, []

    def __call__(self, answers: Sequence[str]) -> list[int]:
        self.given.append(list(answers))
        return self.tokenizer(self.text + "|".join(answers))["input_ids"]


def prompt(target: Target, name: str, category: str, num_turns: int = 1) -> EvalPrompt:
    return EvalPrompt(id=name, category=category, num_turns=num_turns, encode_turn=Conversation(target, name))


def test_tau_pools_tokens_over_forwards(target: Target, variants: dict[str, Variant]):
    prompts = [prompt(target, "What is it", "a"), prompt(target, "Where", "b"), prompt(target, "Who", "b")]
    result = evaluate(target, variants, prompts, **LIMITS, show_progress=False)
    for name, variant in variants.items():
        outputs = [
            speculative_generate(target, variant.model, variant.head, torch.tensor([p.encode_turn([])]), **LIMITS)
            for p in prompts
        ]
        tokens = [len(output.sequences) for output in outputs]
        forwards = [output.num_target_forwards for output in outputs]
        measured = result.variants[name].to_dict()
        assert measured["tau"] == sum(tokens) / sum(forwards)
        assert measured["tau_per_category"] == {
            "a": tokens[0] / forwards[0],
            "b": (tokens[1] + tokens[2]) / (forwards[1] + forwards[2]),
        }
        assert measured["num_tokens"] == sum(tokens)
        assert measured["tokens_per_second"] == pytest.approx(measured["num_tokens"] / measured["seconds"])
    assert result.autoregressive.tau == 1.0
    assert result.lossless is True


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_target_whose_logits_are_no_numbers_is_refused(broken, target: Target, variants, monkeypatch):
    logits = target.logits
    monkeypatch.setattr(target, "logits", lambda hidden: logits(hidden).index_fill(-1, torch.tensor([5]), broken))
    with pytest.raises(ConfigError, match=r"logits of .* in float32 are not finite, so nothing can be measured"):
        evaluate(target, variants, [prompt(target, "What", "a")], **LIMITS, show_progress=False)


def test_the_type_that_overflows_is_named(tmp_path):
    narrow = tiny_target("llama", tmp_path, dtype=torch.float16)
    narrow.model.model.norm.weight.fill_(60000.0)
    with pytest.raises(ConfigError, match=r"in float16 are not finite, .* in another type"):
        evaluation.check_finite(narrow, torch.arange(9)[None])


def test_later_turns_follow_on_the_autoregressive_answers(target: Target, variants: dict[str, Variant]):
    talk = prompt(target, "Tell me", "a", num_turns=3)
    result = evaluate(target, variants, [talk], **LIMITS, show_progress=False)
    answers: list[str] = []
    num_tokens = 0
    for _ in range(3):
        input_ids = torch.tensor([Conversation(target, "Tell me")(answers)])
        output = autoregressive_generate(target, input_ids, max_new_tokens=12)
        num_tokens += len(output.sequences)
        answers.append(target.tokenizer.decode(output.sequences, skip_special_tokens=True))
    assert talk.encode_turn.given[-3:] == [[], answers[:1], answers[:2]]
    assert [m.to_dict()["num_tokens"] for m in result.variants.values()] == [num_tokens] * 2


def test_acceptance_by_position_counts_survivors():
    measured = Measurement()
    output = DecodeOutput(
        sequences=[0] * 9,
        num_target_forwards=5,
        accepted_per_round=[3, 0, 1, 0],
        proposals=[3, 3, 2, 0],
        finish_reason="length",
    )
    measured.add("a", output, 2.0)
    measured.add("a", replace(output, accepted_per_round=[1], proposals=[1], num_target_forwards=2), 1.0)
    assert measured.to_dict()["acceptance_per_position"] == [3 / 4, 1 / 3, 1 / 2]
    assert measured.tau == 18 / 7
    assert measured.tokens_per_second == 6.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recall_is_that_of_the_judged_positions(target: Target, variants: dict[str, Variant], temperature: float):
    prompts = [prompt(target, "What is it", "a"), prompt(target, "Where", "b")]
    result = evaluate(target, variants, prompts, **LIMITS, temperature=temperature, seed=7, show_progress=False)

    speculator = variants["speculative"].model.speculator
    target_hits, draft_hits = [], []

    def observe(proposal: Proposal, target_logits: torch.Tensor, num_emitted: int) -> None:
        for i in range(min(num_emitted, len(proposal.token_ids))):
            hidden = proposal.hidden[i]
            candidates = tile_candidates(speculator(hidden).tolist(), num_tiles=3, keep=20)
            target_hits.append(int(target_logits[i].argmax()) in candidates)
            draft_hits.append(int((target.lm_head_weight @ hidden).argmax()) in candidates)

    for p in prompts:
        speculative_generate(
            target,
            variants["speculative"].model,
            variants["speculative"].head,
            torch.tensor([p.encode_turn([])]),
            **LIMITS,
            temperature=temperature,
            generator=torch.Generator().manual_seed(7 + zlib.crc32(p.id.encode())),
            observer=observe,
        )
    assert result.to_dict()["candidate_recall"] == {
        "target_top1": sum(target_hits) / len(target_hits),
        "draft_top1": sum(draft_hits) / len(draft_hits),
        "num_positions": len(target_hits),
    }
    assert 0 < sum(target_hits) < len(target_hits) and sum(draft_hits) > 0
    assert result.variants["full"].to_dict()["candidate_recall"] is None


def test_all_candidates_recall_everything(target: Target, variants: dict[str, Variant]):
    model = variants["speculative"].model
    model = SpecVocabDraft(model.architecture, HeadConfig(num_candidates=target.spec.vocab_size))
    everything = {"speculative": Variant(model=model, head=build_head("speculative", target, model))}
    recall = evaluate(target, everything, [prompt(target, "x", "a")], **LIMITS, show_progress=False).to_dict()
    assert recall["candidate_recall"]["target_top1"] == recall["candidate_recall"]["draft_top1"] == 1.0


def test_a_changed_output_is_listed_with_the_targets_gap(
    target: Target, variants: dict[str, Variant], monkeypatch: pytest.MonkeyPatch
):
    def corrupted(*args: object, **kwargs: object) -> DecodeOutput:
        output = speculative_generate(*args, **kwargs)
        if args[3].shape[1] != len("Where"):
            return output
        return replace(output, sequences=[*output.sequences[:4], output.sequences[4] + 1, *output.sequences[5:]])

    monkeypatch.setattr(evaluation, "speculative_generate", corrupted)
    prompts = [prompt(target, "What is it", "a"), prompt(target, "Where", "b", num_turns=2)]
    result = evaluate(target, {"full": variants["full"]}, prompts, **LIMITS, show_progress=False)
    assert result.lossless is False

    input_ids = torch.tensor([prompts[1].encode_turn([])])
    text = input_ids[0].tolist() + autoregressive_generate(target, input_ids, max_new_tokens=4).sequences
    best, second = target.model(torch.tensor([text])).logits[0, -1].topk(2).values.tolist()
    (found,) = result.variants["full"].differences
    assert found == Difference(id="Where", turn=0, position=4, top2_gap=pytest.approx(best - second, rel=1e-3))


def test_an_output_that_ends_early_differs_at_its_end(target: Target):
    ((position, _),) = evaluation.first_differences(target, torch.tensor([[1, 2]]), [5, 6, 7], [[5, 6]])
    assert position == 2


def test_outputs_of_one_turn_share_a_forward_and_find_their_own_gaps(target: Target):
    expected, outputs = [5, 6, 7, 8], [[5, 6, 7, 9], [4], [5, 6]]
    found = evaluation.first_differences(target, torch.tensor([[1, 2]]), expected, outputs)
    assert [position for position, _ in found] == [3, 0, 2]
    for position, gap in found:
        text = torch.tensor([[1, 2, *expected[:position]]])
        best, second = target.model(text).logits[0, -1].topk(2).values.tolist()
        assert gap == pytest.approx(best - second, rel=1e-3)


def test_sampled_outputs_are_repeatable_and_not_called_lossless(target: Target, variants: dict[str, Variant]):
    run = partial(evaluate, target, variants, [prompt(target, "Where", "a")], **LIMITS, show_progress=False)
    first, second, other = (run(temperature=1.0, seed=seed) for seed in (0, 0, 1))

    def counts(result: Evaluation) -> list[object]:
        return [(m.num_accepted, m.num_proposed, m.recall and m.recall.to_dict()) for m in result.variants.values()]

    assert first.lossless is None
    assert counts(first) == counts(second) != counts(other)


def test_what_is_sampled_does_not_depend_on_what_else_is_decoded(target: Target, variants: dict[str, Variant]):
    """A comparison that is resumed, or given another head, would otherwise put other second turns to it."""
    prompts = [prompt(target, name, "a", num_turns=2) for name in ("Where", "When")]
    alone: list[tuple[object, ...]] = []
    beside: list[tuple[object, ...]] = []
    run = partial(evaluate, target, **LIMITS, temperature=1.0, show_progress=False)
    for turns, names, asked in ((beside, ["speculative", "full"], prompts), (alone, ["full"], prompts[1:])):
        run({name: variants[name] for name in names}, asked, on_turn=lambda turn, turns=turns: turns.append(
            (turn.variant, turn.prompt.id, turn.number, turn.num_baseline_tokens, turn.output)))
    assert [turn for turn in beside if turn[:2] == ("full", "When")] == alone
    assert prompts[1].encode_turn.given[-1] == prompts[1].encode_turn.given[1]


class Killed(Exception):
    pass


def test_a_killed_evaluation_goes_on_with_the_prompts_that_are_left(
    target: Target, variants: dict[str, Variant], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluation, "_timed", lambda decode, *, input_ids, seed, **options: (
        decode(input_ids, generator=torch.Generator().manual_seed(seed), **options), 0.5))
    prompts = [prompt(target, "What", "a"), prompt(target, "Where", "b", num_turns=2), prompt(target, "Who", "a")]
    run = partial(evaluate, target, variants, prompts, max_new_tokens=6, num_draft_tokens=3, show_progress=False)
    saved: list[str] = []

    def killed_after_two(state: dict[str, object]) -> None:
        saved.append(json.dumps(state))
        if len(saved) == 2:
            raise Killed

    with pytest.raises(Killed):
        run(on_prompt=killed_after_two)
    asked = len(prompts[0].encode_turn.given) + len(prompts[1].encode_turn.given)
    resumed = run(finished=json.loads(saved[-1]), on_prompt=lambda state: saved.append(json.dumps(state)))
    assert len(prompts[0].encode_turn.given) + len(prompts[1].encode_turn.given) == asked + 1  # to warm up
    assert resumed.to_dict() == run().to_dict()
    assert run(finished=json.loads(saved[-1])).to_dict() == resumed.to_dict() and len(saved) == 3


def test_the_result_is_json(target: Target, variants: dict[str, Variant]):
    result = evaluate(target, variants, [prompt(target, "Where", "a")], **LIMITS, show_progress=False).to_dict()
    assert json.loads(json.dumps(result)) == result
    assert set(result["tau"]) == {"full", "speculative"}
    assert set(result["tokens_per_second"]) == {"autoregressive", "full", "speculative"}


def test_without_prompts_there_is_nothing_to_measure(target: Target, variants: dict[str, Variant]):
    with pytest.raises(ValueError, match="no prompts"):
        evaluate(target, variants, [], **LIMITS)

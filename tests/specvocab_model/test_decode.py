"""Speculative decoding: the target's own output, in fewer forwards, with every index where the design puts it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specvocab_model.attention import DraftCache
from specvocab_model.config import DraftConfig, HeadConfig
from specvocab_model.decode import (
    DecodeOutput,
    Proposal,
    autoregressive_generate,
    place_draft,
    speculative_generate,
)
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads import ClusterRouter, Head, HeadOutput, build_head
from specvocab_model.sampling import Sampling
from specvocab_model.target import Target
from specvocab_model.vocab import VocabMap
from tests.tiny import KINDS, tiny_config, tiny_target

NUM_DRAFTS = 4
NO_EOS = (10_000,)
MISSES = {2, 5, 9, 10, 17, 18, 21, 30, 33, 41, 42, 50}  # leave runs of every length


@pytest.fixture(scope="module", params=[(kind, tie) for kind in KINDS for tie in (True, False)], ids=str)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    kind, tie = request.param
    return tiny_target(kind, tmp_path_factory.mktemp("target"), tie=tie)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target("llama", tmp_path_factory.mktemp("target"))


def untrained(target: Target, **head: object) -> SpecVocabDraft:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(**{"num_candidates": 40} | head))
    return place_draft(model, target)


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(target: Target, input_ids: Tensor, max_new_tokens: int, eos: tuple[int, ...] | None = None) -> list[int]:
    """The independent path: transformers' own greedy generate with its own caches."""
    output = target.model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(eos or target.spec.eos_token_ids),
    )
    return output[0, input_ids.shape[1] :].tolist()


def with_spec(target: Target, **changes: object) -> Target:
    return Target(replace(target.spec, **changes), target.model, target.tokenizer, target.feature_layers)


class Oracle(Head):
    """A head that knows the continuation, save for the tokens at ``misses``; as observer it follows the rounds."""

    def __init__(self, continuation: list[int], vocab_size: int, misses: Container[int] = (), restricted: bool = False):
        self.continuation, self.vocab_size = continuation, vocab_size
        self.misses, self.restricted = misses, restricted
        self.start, self.step = 1, 0  # the prefill gives token 0

    def __call__(self, hidden: Tensor) -> HeadOutput:
        index = self.start + self.step
        self.step += 1
        token = self.continuation[index] if index < len(self.continuation) else 0
        if index in self.misses:
            token = (token + 1) % self.vocab_size
        if self.restricted:
            others = [(token + 7) % self.vocab_size, token, (token + 9) % self.vocab_size]
            return HeadOutput(torch.tensor([others]), torch.tensor([[0.0, 1.0, -1.0]]))
        return HeadOutput(None, torch.nn.functional.one_hot(torch.tensor([token]), self.vocab_size).float())

    def observe(self, proposal: Proposal, target_logits: Tensor, num_emitted: int) -> None:
        self.start, self.step = self.start + num_emitted, 0


def decode_with_oracle(
    target: Target,
    input_ids: Tensor,
    continuation: list[int],
    *,
    max_new_tokens: int,
    num_drafts: int = NUM_DRAFTS,
    **how: Any,
) -> DecodeOutput:
    oracle = Oracle(continuation, target.spec.vocab_size, **how)
    return speculative_generate(
        target,
        untrained(target),
        oracle,
        input_ids,
        max_new_tokens=max_new_tokens,
        num_draft_tokens=num_drafts,
        observer=oracle.observe,
    )


def check_counts(output: DecodeOutput) -> None:
    rounds = len(output.accepted_per_round)
    assert output.num_target_forwards == rounds + 1 == len(output.proposals) + 1
    pairs = zip(output.accepted_per_round, output.proposals, strict=True)
    assert all(accepted <= proposed for accepted, proposed in pairs)


@pytest.mark.parametrize("length", [1, 13])
def test_greedy_output_is_that_of_generate(target: Target, length: int):
    input_ids = prompt(length)
    expected = generate(target, input_ids, 24)
    model = untrained(target)
    outputs = [
        speculative_generate(
            target, model, build_head(kind, target, model), input_ids, max_new_tokens=24, num_draft_tokens=NUM_DRAFTS
        )
        for kind in ("full", "speculative")
    ]
    outputs.append(autoregressive_generate(target, input_ids, max_new_tokens=24))
    for output in outputs:
        assert output.sequences == expected
        check_counts(output)


@pytest.mark.parametrize("restricted", [False, True])
def test_greedy_output_is_that_of_generate_when_many_drafts_are_right(target: Target, restricted: bool):
    target = with_spec(target, eos_token_ids=NO_EOS)
    input_ids = prompt(11, seed=1)
    expected = generate(target, input_ids, 60)  # ten sliding windows
    output = decode_with_oracle(target, input_ids, expected, max_new_tokens=60, misses=MISSES, restricted=restricted)
    assert output.sequences == expected
    check_counts(output)
    assert set(output.accepted_per_round) == {0, 1, 2, 3, NUM_DRAFTS}
    assert output.num_target_forwards < 0.5 * len(expected)


@pytest.mark.parametrize("position", range(1, 8))
def test_stops_at_the_first_eos_inside_an_accepted_run(llama: Target, position: int):
    input_ids = prompt(9, seed=3)
    free = generate(llama, input_ids, 20, NO_EOS)
    eos = (free[12], free[position])
    first = min(free.index(token) for token in eos)
    target = with_spec(llama, eos_token_ids=eos)
    assert generate(target, input_ids, 20, eos) == free[: first + 1]
    output = decode_with_oracle(target, input_ids, free, max_new_tokens=20, num_drafts=7)
    assert output.sequences == free[: first + 1]
    assert output.finish_reason == "stop"
    assert output.num_target_forwards == (1 if first == 0 else 2)
    assert sum(output.accepted_per_round) == min(first, 7)


def test_the_observer_sees_what_entered_the_text(llama: Target):
    input_ids = prompt(9, seed=3)
    free = generate(llama, input_ids, 40, NO_EOS)
    end = next(i for i, token in enumerate(free) if i > 10 and i % 5 and token not in free[:i])  # inside a chain
    target, model = with_spec(llama, eos_token_ids=(free[end],)), untrained(llama)
    oracle = Oracle(free, target.spec.vocab_size, misses={4, 5})
    seen: list[int] = []

    def observe(proposal: Proposal, target_logits: Tensor, num_emitted: int) -> None:
        seen.append(num_emitted)
        oracle.observe(proposal, target_logits, num_emitted)

    output = speculative_generate(
        target, model, oracle, input_ids, max_new_tokens=40, num_draft_tokens=NUM_DRAFTS, observer=observe
    )
    assert output.sequences == free[: end + 1]
    assert seen[:2] == [4, 1]  # 1, 2, 3 and the target's 4; the target's 5
    assert 1 + sum(seen) == len(output.sequences)


def test_an_eos_as_the_last_allowed_token_is_a_stop(llama: Target):
    input_ids = prompt(9, seed=3)
    free = generate(llama, input_ids, 5, NO_EOS)
    index = next(i for i, token in enumerate(free) if i and token not in free[:i])
    target = with_spec(llama, eos_token_ids=(free[index],))
    assert autoregressive_generate(target, input_ids, max_new_tokens=index + 1).finish_reason == "stop"
    assert autoregressive_generate(target, input_ids, max_new_tokens=index).finish_reason == "length"


@pytest.mark.parametrize("max_new_tokens", range(1, 13))
def test_max_new_tokens_is_exact_and_no_draft_is_made_in_vain(llama: Target, max_new_tokens: int):
    target = with_spec(llama, eos_token_ids=NO_EOS)
    input_ids = prompt(5, seed=2)
    expected = generate(target, input_ids, 20)
    output = decode_with_oracle(target, input_ids, expected, max_new_tokens=max_new_tokens)
    assert output.sequences == expected[:max_new_tokens]
    assert output.finish_reason == "length"
    assert output.num_target_forwards == 1 + math.ceil((max_new_tokens - 1) / (NUM_DRAFTS + 1))
    assert output.accepted_per_round == output.proposals  # a perfect draft: nothing was cut off


def test_no_drafts_is_plain_decoding(llama: Target):
    input_ids, model = prompt(6), untrained(llama)
    plain = autoregressive_generate(llama, input_ids, max_new_tokens=15)
    output = speculative_generate(
        llama, model, build_head("full", llama, model), input_ids, max_new_tokens=15, num_draft_tokens=0
    )
    assert output == plain
    assert plain.num_target_forwards == len(plain.sequences)


@pytest.mark.parametrize("limited", ["target", "draft"])
def test_drafts_stop_before_max_position_embeddings(llama: Target, limited: str):
    input_ids, max_length = prompt(10), 21
    target = with_spec(llama, eos_token_ids=NO_EOS)
    model = untrained(target)
    expected = generate(target, input_ids, 20)
    if limited == "target":
        target = with_spec(target, max_position_embeddings=max_length)
    else:
        model.architecture = replace(model.architecture, max_position_embeddings=max_length)
    fed: list[int] = []
    forward = target.forward
    target.forward = lambda ids, **kwargs: (fed.append(ids.shape[1]), forward(ids, **kwargs))[1]  # type: ignore[method-assign]

    oracle = Oracle(expected, target.spec.vocab_size)
    output = speculative_generate(
        target, model, oracle, input_ids, max_new_tokens=20, num_draft_tokens=NUM_DRAFTS, observer=oracle.observe
    )
    assert output.sequences == expected  # goes on past the limit as generate does
    assert output.proposals == [4, 4] + [0] * 9  # 11, 16, 21 tokens after each round, then one by one
    assert fed == [10, 5, 5] + [1] * 9


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_every_draft_is_computed_as_if_from_scratch(kind: str, tmp_path: Path):
    """Each chain's hidden states equal those of a fresh cache over true features of the whole verified text."""
    target = with_spec(tiny_target(kind, tmp_path), eos_token_ids=NO_EOS)
    model, input_ids = untrained(target), prompt(8, seed=4)
    expected = generate(target, input_ids, 30)
    oracle = Oracle(expected, target.spec.vocab_size, misses=MISSES)
    length, num_rounds = 1, 0

    def compare(proposal: Proposal, target_logits: Tensor, num_emitted: int) -> None:
        nonlocal length, num_rounds
        text = torch.cat([input_ids, torch.tensor([expected[:length]])], dim=1)  # x[0..T]; features of x[0..T-1]
        last = text.shape[1] - 2
        features = target.forward(text).features[:, :-1]
        cache = DraftCache()
        hidden = model.draft.forward_cached(
            model.draft.fuse(features), target.embed(text[:, 1:]), torch.arange(last + 1)[None], cache
        )[:, -1:]
        for i, token in enumerate(proposal.token_ids):
            torch.testing.assert_close(proposal.hidden[i], model.draft.norm(hidden[0, 0]), rtol=1e-4, atol=1e-4)
            hidden = model.draft.forward_cached(
                hidden, target.embed(token.view(1, 1)), torch.tensor([[last + i + 1]]), cache
            )
        drafted = torch.cat([text, proposal.token_ids[None]], dim=1)
        logits = target.logits(target.forward(drafted).final_hidden[0, last + 1 :])
        torch.testing.assert_close(target_logits, logits, rtol=1e-4, atol=1e-4)
        num_rounds += 1
        length += num_emitted
        oracle.observe(proposal, target_logits, num_emitted)

    output = speculative_generate(
        target, model, oracle, input_ids, max_new_tokens=30, num_draft_tokens=NUM_DRAFTS, observer=compare
    )
    assert output.sequences == expected
    assert num_rounds > 5 and len(set(output.accepted_per_round)) > 2


def tiny_vocabulary_target(llama: Target) -> Target:
    """Six tokens, the last of which is EOS: few enough to enumerate every text."""
    config = tiny_config("llama", vocab_size=300, num_hidden_layers=4, tie=False)
    config.vocab_size, config.pad_token_id, config.eos_token_id = 6, None, 5
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=1.3 / parameter.shape[1] ** 0.5)
    spec = replace(llama.spec, vocab_size=6, num_hidden_layers=4, eos_token_ids=(5,))
    return Target(spec, model, llama.tokenizer, feature_layers=(1, 2, 3))


def enumerate_texts(target: Target, input_ids: Tensor, sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """Exact probability of every continuation, cut after ``length`` tokens or an EOS."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for text, probability in texts.items():
            if text and text[-1] in target.spec.eos_token_ids:
                grown[text] = probability
                continue
            context = torch.cat([input_ids, torch.tensor([text], dtype=torch.int64)], dim=1)
            logits = target.model(context).logits[:, -1]
            for token, p in enumerate(sampling.probabilities(logits)[0].tolist()):
                if p > 0:
                    grown[(*text, token)] = probability * p
        texts = grown
    return texts


@pytest.mark.parametrize(
    ("kind", "sampling", "num_samples"),
    [
        ("full", Sampling(temperature=1.0), 500),
        ("speculative", Sampling(temperature=1.3, top_k=5, top_p=0.9), 500),
        *((kind, Sampling(temperature=2.0), 150) for kind in ("static", "cluster", "in_context")),
    ],
)
@torch.no_grad()
def test_sampled_output_has_the_targets_distribution(llama: Target, kind: str, sampling: Sampling, num_samples: int):
    target = tiny_vocabulary_target(llama)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        architecture = replace(untrained(llama).architecture, vocab_size=6, feature_layers=(1, 2, 3))
        model = place_draft(SpecVocabDraft(architecture, HeadConfig(num_candidates=3)), target)
        router = ClusterRouter(model.architecture.hidden_size, torch.tensor([0, 1, 0, 1, 1, -1]), 2)
    options = {"static": {"vocab": VocabMap.from_ids([0, 2, 5], 6)}, "cluster": {"router": router, "size": 3},
               "in_context": {"size": 3, "always_keep": [5]}}
    head, input_ids = build_head(kind, target, model, **options.get(kind, {})), torch.tensor([[0, 3]])
    expected: Counter[tuple[int, ...]] = Counter()
    for text, probability in enumerate_texts(target, input_ids, sampling, length=3).items():
        expected[text[1:]] += probability  # the first token comes from the prefill

    generator = torch.Generator().manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    num_accepted = num_proposed = 0
    for _ in range(num_samples):
        output = speculative_generate(
            target,
            model,
            head,
            input_ids,
            max_new_tokens=4,
            num_draft_tokens=2,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            generator=generator,
        )
        counts[tuple(output.sequences[1:3])] += 1
        num_accepted += sum(output.accepted_per_round)
        num_proposed += sum(output.proposals)
    assert 0.15 < num_accepted / num_proposed < 0.9  # both branches of the rule are exercised
    assert set(counts) <= set(expected)
    assert chi_square_excess(counts, expected, num_samples) < 3.5


def chi_square_excess(counts: Counter, expected: Counter, num_samples: int) -> float:
    """Pearson's statistic in standard deviations above its mean; rare texts share one cell."""
    statistic, num_cells, rare_count, rare_expected = 0.0, 0, 0, 0.0
    for text, probability in expected.items():
        if num_samples * probability < 5:
            rare_count, rare_expected = rare_count + counts[text], rare_expected + num_samples * probability
        else:
            statistic += (counts[text] - num_samples * probability) ** 2 / (num_samples * probability)
            num_cells += 1
    if rare_expected:
        statistic += (rare_count - rare_expected) ** 2 / rare_expected
        num_cells += 1
    assert num_cells > 8
    return (statistic - (num_cells - 1)) / math.sqrt(2 * (num_cells - 1))


def test_sampling_repeats_with_the_same_seed(llama: Target):
    model = untrained(llama)
    head = build_head("speculative", llama, model)

    def sample(seed: int) -> DecodeOutput:
        generator = torch.Generator().manual_seed(seed)
        return speculative_generate(
            llama, model, head, prompt(4), max_new_tokens=12, num_draft_tokens=3, temperature=1.0, generator=generator
        )

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_what_makes_no_sense_is_refused(llama: Target):
    model = untrained(llama)
    head = build_head("full", llama, model)
    for shape in ((1, 0), (2, 3), (3,)):
        with pytest.raises(ValueError, match="input_ids has shape"):
            autoregressive_generate(llama, torch.zeros(shape, dtype=torch.int64), max_new_tokens=3)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        autoregressive_generate(llama, prompt(3), max_new_tokens=0)
    with pytest.raises(ValueError, match="num_draft_tokens=-1"):
        speculative_generate(llama, model, head, prompt(3), max_new_tokens=3, num_draft_tokens=-1)
    other_layers = Target(llama.spec, llama.model, llama.tokenizer, feature_layers=(1, 3, 6))
    with pytest.raises(ValueError, match=r"reads the feature layers \(2, 4, 5\), the target gives \(1, 3, 6\); load"):
        speculative_generate(other_layers, model, head, prompt(3), max_new_tokens=3, num_draft_tokens=2)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    with pytest.raises(ValueError, match="place_draft"):
        speculative_generate(llama, model, head, prompt(3), max_new_tokens=3, num_draft_tokens=2)


def test_placing_a_draft_keeps_its_rotary_frequencies(llama: Target):
    model = SpecVocabDraft.build(llama.spec, DraftConfig(), HeadConfig())
    frequencies = model.draft.rotary.inv_freq.clone()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    place_draft(model, llama)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.draft.rotary.inv_freq, frequencies)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_on_a_gpu(kind: str, tmp_path: Path):
    target = tiny_target(kind, tmp_path)
    target.model.to("cuda")
    input_ids, model = prompt(9).cuda(), untrained(target)
    expected = generate(target, input_ids, 30)
    for head_kind in ("full", "speculative"):
        head = build_head(head_kind, target, model)
        output = speculative_generate(target, model, head, input_ids, max_new_tokens=30, num_draft_tokens=NUM_DRAFTS)
        assert output.sequences == expected
        sampled = [
            speculative_generate(
                target, model, head, input_ids, max_new_tokens=30, num_draft_tokens=NUM_DRAFTS, temperature=1.0,
                generator=torch.Generator("cuda").manual_seed(0),
            )
            for _ in range(2)
        ]
        assert sampled[0] == sampled[1]

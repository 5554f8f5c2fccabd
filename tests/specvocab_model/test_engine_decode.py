"""The decode engine: the target's own output whatever is drafted, and the statistics and states of ``decode.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specvocab_model.attention import DraftCache
from specvocab_model.config import ConfigError, HeadConfig
from specvocab_model.decode import DecodeOutput, Proposal, place_draft, speculative_generate
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.engine import EAGLE2, DecodeEngine, DraftShape
from specvocab_model.engine.drafting import ChainDrafter
from specvocab_model.heads import Head, HeadOutput, InContextHead, StaticHead, build_head
from specvocab_model.measurement import Measurement
from specvocab_model.sampling import Sampling
from specvocab_model.target import Target
from specvocab_model.vocab import VocabMap
from tests.specvocab_model.test_decode import (
    MISSES,
    NO_EOS,
    Oracle,
    check_counts,
    chi_square_excess,
    enumerate_texts,
    generate,
    tiny_vocabulary_target,
    untrained,
    with_spec,
)
from tests.tiny import tiny_target

LENGTHS = (1, 13, 30)  # the last is longer than four chunks
CHUNK = 7
CHAIN = DraftShape(4)
TREE = DraftShape(depth=4, top_k=4, num_tokens=16)
SHAPES = (DraftShape(0), CHAIN, TREE)
NAMES = ("plain", "chain", "tree")


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(request.param, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target("llama", tmp_path_factory.mktemp("target"))


def make_engine(
    target: Target, shape: DraftShape, head: Head | str = "full", model: SpecVocabDraft | None = None, **options: object
) -> DecodeEngine:
    options = {"capacity": 128, "prefill_chunk": CHUNK} | options
    if not shape.depth:
        return DecodeEngine(target, shape=shape, **options)
    model = model or untrained(target)
    made = build_head(head, target, model) if isinstance(head, str) else head
    return DecodeEngine(target, model, made, shape=shape, **options)


def tokens(outputs: list[DecodeOutput]) -> list[list[int]]:
    return [output.sequences for output in outputs]


def expected_of(target: Target, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    return [generate(target, torch.tensor([prompt]), max_new_tokens) for prompt in prompts]


def plain_of(target: Target, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """The engine's own plain output, which the first test compares with ``generate``'s; all prompts at once."""
    engine = make_engine(target, DraftShape(0), batch_size=len(prompts))
    return tokens(engine.generate(prompts, max_new_tokens=max_new_tokens))


class Knowing(Head):
    """Knows every row's continuation, save for the tokens at ``misses``, where the right one comes second.

    ``texts`` are prompts with their continuations. What it is asked for follows from what the engine has verified.
    """

    def __init__(self, texts: list[list[int]], vocab_size: int, misses: Container[int] = ()) -> None:
        self.texts, self.vocab_size, self.misses = texts, vocab_size, misses
        self.engine: DecodeEngine | None = None
        self.num_prompt = [0] * len(texts)
        self.calls = 0
        self.seen: list[Tensor] = []  # the hidden states that it was given

    def attach(self, engine: DecodeEngine, prompts: list[list[int]]) -> DecodeEngine:
        self.engine, self.calls = engine, 0
        self.num_prompt = [len(prompt) for prompt in prompts]
        self.seen.clear()
        return engine

    def __call__(self, hidden: Tensor) -> HeadOutput:
        logits = torch.zeros(len(hidden), self.vocab_size)
        if self.engine is None:  # asked for its size
            return HeadOutput(None, logits)
        self.seen.append(hidden)
        step = self.calls % self.engine.shape.depth
        self.calls += 1
        lengths = (self.engine.verified.starts + self.engine.verified.num_new).tolist()
        for row, out in enumerate(logits.view(len(lengths), -1, self.vocab_size)[: len(self.texts)]):
            text, index = self.texts[row], lengths[row] + 1 + step
            token = text[index] if index < len(text) else 0
            missed = index - self.num_prompt[row] in self.misses
            out[:, token] = 20.0
            out[:, (token + 1) % self.vocab_size] = 20.1 if missed else 10.0
        return HeadOutput(None, logits)


def knowing_engine(
    target: Target, shape: DraftShape, prompts: list[list[int]], answers: list[list[int]],
    misses: Container[int] = (), **options: object,
) -> tuple[DecodeEngine, Knowing]:
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    head = Knowing(texts, target.spec.vocab_size, misses)
    return head.attach(make_engine(target, shape, head, **options), prompts), head


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_greedy_output_is_that_of_generate(target: Target, shape: DraftShape):
    prompts = prompts_of(LENGTHS)
    expected = expected_of(target, prompts, 12)
    engine = make_engine(target, shape, "speculative", batch_size=3)
    outputs = engine.generate(prompts, max_new_tokens=12)
    assert tokens(outputs) == expected
    assert tokens(engine.generate(prompts[1:2], max_new_tokens=7)) == [expected[1][:7]]  # fewer, on used caches
    for output in outputs:
        check_counts(output)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3"])
def test_a_tree_that_is_often_right(kind: str, tmp_path: Path):
    """Paths through all columns of the tree stay, and their keys move; gemma2's attention is transformers' eager."""
    target = with_spec(tiny_target(kind, tmp_path), eos_token_ids=NO_EOS)
    prompts = prompts_of((5, 1, 26), seed=1)
    expected = plain_of(target, prompts, 26)  # four sliding windows
    engine, _ = knowing_engine(target, TREE, prompts, expected, MISSES, batch_size=3)
    for output, wanted in zip(engine.generate(prompts, max_new_tokens=26), expected, strict=True):
        assert output.sequences == wanted
        check_counts(output)
        assert output.num_target_forwards == 1 + 5  # 25 tokens, five a round: what is missed is the second best


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_an_observer_sees_all_tokens_and_which_are_drafts(llama: Target, shape: DraftShape):
    prompts = prompts_of((5, 1), seed=1)
    texts = plain_of(llama, prompts, 20)
    target = with_spec(llama, eos_token_ids=(texts[0][9],))
    expected = plain_of(target, prompts, 20)
    engine = make_engine(target, shape, batch_size=2)
    if shape.depth:
        engine, _ = knowing_engine(target, shape, prompts, texts, MISSES, batch_size=2)
    seen: list[list[tuple[list[int], int]]] = [[], []]
    outputs = engine.generate(prompts, max_new_tokens=20,
                              on_tokens=lambda row, new_ids, accepted: seen[row].append((new_ids, accepted)))
    for output, calls, wanted in zip(outputs, seen, expected, strict=True):
        assert [token for new_ids, _ in calls for token in new_ids] == output.sequences == wanted
        assert [accepted for _, accepted in calls] == [0, *output.accepted_per_round]  # the first is the prompt's
        ended = calls[-1][0][-1] in target.spec.eos_token_ids
        assert all(len(new_ids) - accepted == 1 for new_ids, accepted in (calls[:-1] if ended else calls))


def test_a_chain_is_that_of_decode(target: Target):
    """Same drafts from the same states, whatever was accepted before them; same statistics."""
    target, model = with_spec(target, eos_token_ids=NO_EOS), untrained(target)
    head = build_head("full", target, model)
    engine = make_engine(target, CHAIN, head, model, batch_size=2)
    prompts = prompts_of((4, 11), seed=2)
    outputs = engine.generate(prompts, max_new_tokens=10)
    plain = [
        speculative_generate(target, model, head, torch.tensor([prompt]), max_new_tokens=10,
                             num_draft_tokens=CHAIN.depth)
        for prompt in prompts
    ]
    assert outputs == plain
    measured, reference = Measurement(), Measurement()
    for ours, theirs in zip(outputs, plain, strict=True):
        measured.add("all", ours, 1.0)
        reference.add("all", theirs, 1.0)
    assert measured.to_dict() == reference.to_dict()


def test_the_states_of_a_chain_are_those_of_decode(target: Target):
    target, model = with_spec(target, eos_token_ids=NO_EOS), untrained(target)
    prompts = prompts_of((9,), seed=3)
    expected = plain_of(target, prompts, 26)
    engine, knowing = knowing_engine(target, CHAIN, prompts, expected, MISSES, model=model)
    (output,) = engine.generate(prompts, max_new_tokens=26)
    assert output.sequences == expected[0]

    oracle, proposals = Oracle(expected[0], target.spec.vocab_size, MISSES), []

    def observe(proposal: Proposal, target_logits: Tensor, num_emitted: int) -> None:
        proposals.append(proposal.hidden)
        oracle.observe(proposal, target_logits, num_emitted)

    assert output == speculative_generate(
        target, model, oracle, torch.tensor(prompts), max_new_tokens=26, num_draft_tokens=CHAIN.depth, observer=observe)
    assert len(set(output.accepted_per_round)) > 3
    rounds = torch.cat(knowing.seen).view(-1, CHAIN.depth, target.spec.hidden_size)
    for ours, theirs in zip(rounds, proposals, strict=False):  # the engine drafts once more than is verified
        torch.testing.assert_close(ours[: len(theirs)], theirs, rtol=1e-4, atol=1e-4)


class Sharp(Head):
    """A head that is surer of itself: an untrained draft's flat distribution makes trees of two layers."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def __call__(self, hidden: Tensor) -> HeadOutput:
        output = self.head(hidden)
        return HeadOutput(output.ids, 12 * output.logits)


def brute_force_tree(target: Target, model: SpecVocabDraft, head: Head, text: list[int], shape: DraftShape) -> set:
    """EAGLE-2's tree after ``text``, path by path, each with a cache of its own."""
    features = target.forward(torch.tensor([text])).features[:, :-1]
    last = len(text) - 2

    def outputs(path: tuple[int, ...]) -> list[tuple[tuple[int, ...], float]]:
        cache, draft = DraftCache(), model.draft
        hidden = draft.forward_cached(draft.fuse(features), target.embed(torch.tensor([text[1:]])),
                                      torch.arange(last + 1)[None], cache)[:, -1:]
        for i, token in enumerate(path, 1):
            hidden = draft.forward_cached(hidden, target.embed(torch.tensor([[token]])),
                                          torch.tensor([[last + i]]), cache)
        best = head(draft.norm(hidden[:, 0])).dense_logits(target.spec.vocab_size).log_softmax(-1)[0].topk(shape.top_k)
        return [((*path, token), score) for score, token in zip(*(part.tolist() for part in best), strict=True)]

    pool: dict[tuple[int, ...], float] = {}
    beam: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(shape.depth):
        children = {child: score + step for path, score in beam.items() for child, step in outputs(path)}
        pool |= children
        beam = dict(sorted(children.items(), key=lambda item: -item[1])[: shape.top_k])
    return set(sorted(pool, key=lambda path: -pool[path])[: shape.num_tokens])


def test_a_tree_holds_the_most_probable_paths(target: Target, monkeypatch: pytest.MonkeyPatch):
    target, model = with_spec(target, eos_token_ids=NO_EOS), untrained(target)
    made = Sharp(build_head("speculative", target, model))
    engine = make_engine(target, TREE, made, model, batch_size=2)
    trees: list[list[set]] = []
    draft = engine.draft

    def drafting(width: int) -> None:
        draft(width)
        tree = engine.tree
        trees.append([
            {tuple(ids[node].item() for node in range(1, len(ids)) if above[node]) for above in ancestors[1:]}
            for ids, ancestors in zip(tree.token_ids, tree.ancestors, strict=True)
        ])

    monkeypatch.setattr(engine, "draft", drafting)
    prompts = prompts_of((4, 11), seed=4)
    outputs = engine.generate(prompts, max_new_tokens=6)
    assert max(len(path) for rows in trees for paths in rows for path in paths) == TREE.depth
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        length = len(prompt) + 1
        for number, accepted in enumerate([*output.accepted_per_round, None]):
            text = (prompt + output.sequences)[:length]
            assert len(text) == length
            with torch.no_grad():
                assert trees[number][row] == brute_force_tree(target, model, made, text, TREE)
            if accepted is None or length + accepted + 1 >= len(prompt) + len(output.sequences):
                break
            length += accepted + 1


def test_a_tree_accepts_at_least_what_its_best_chain_does(llama: Target):
    target = with_spec(llama, eos_token_ids=NO_EOS)
    prompts = prompts_of((8, 3), seed=5)
    expected = plain_of(target, prompts, 31)
    forwards = {}
    for shape in (CHAIN, TREE):
        engine, _ = knowing_engine(target, shape, prompts, expected, MISSES, batch_size=2)
        forwards[shape] = sum(output.num_target_forwards for output in engine.generate(prompts, max_new_tokens=31))
    assert forwards[TREE] < 0.7 * forwards[CHAIN]


def test_the_published_tree(llama: Target):
    prompts = prompts_of((6,), seed=6)
    engine = make_engine(llama, EAGLE2, "speculative", capacity=64)
    assert tokens(engine.generate(prompts, max_new_tokens=12)) == expected_of(llama, prompts, 12)
    assert engine.tree.token_ids.shape == (1, 61)
    assert int(engine.tree.depths.max()) <= 8


@pytest.mark.parametrize("kind", ["static", "low_rank"])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=NAMES[1:])
def test_every_head_gives_the_targets_output(llama: Target, kind: str, shape: DraftShape):
    model = untrained(llama)
    options = {"vocab": VocabMap(torch.arange(0, 277, 3), 277)} if kind == "static" else {}
    engine = make_engine(llama, shape, build_head(kind, llama, model, **options), model)
    prompts = prompts_of((10,), seed=7)
    assert tokens(engine.generate(prompts, max_new_tokens=16)) == expected_of(llama, prompts, 16)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=NAMES[1:])
@pytest.mark.parametrize("position", [2, 5])
def test_stops_at_the_first_eos_inside_an_accepted_run(llama: Target, shape: DraftShape, position: int):
    prompts = prompts_of((9, 14, 2), seed=3)
    free = plain_of(with_spec(llama, eos_token_ids=NO_EOS), prompts, 20)
    eos = (free[0][position], free[1][12])
    target = with_spec(llama, eos_token_ids=eos)
    engine, _ = knowing_engine(target, shape, prompts, free, batch_size=3)
    outputs = engine.generate(prompts, max_new_tokens=20)
    for output, answer in zip(outputs, free, strict=True):
        ends = [i for i, token in enumerate(answer) if token in eos]
        assert output.sequences == answer[: ends[0] + 1 if ends else None]
        assert output.finish_reason == ("stop" if ends else "length")
        check_counts(output)
    first = free[0].index(next(token for token in free[0] if token in eos))
    assert outputs[0].num_target_forwards == (1 if first == 0 else 1 + -(-first // 5))
    assert sum(outputs[0].accepted_per_round) == first - first // 5


@pytest.mark.parametrize("shape", SHAPES[1:], ids=NAMES[1:])
def test_max_new_tokens_is_exact_and_nothing_is_judged_in_vain(llama: Target, shape: DraftShape):
    target = with_spec(llama, eos_token_ids=NO_EOS)
    prompts = prompts_of((5, 8), seed=2)
    answers = plain_of(target, prompts, 11)
    engine, knowing = knowing_engine(target, shape, prompts, answers, batch_size=2)
    for max_new_tokens in (1, 2, 5, 6, 7, 11):
        knowing.attach(engine, prompts)
        for output, answer in zip(engine.generate(prompts, max_new_tokens=max_new_tokens), answers, strict=True):
            assert output.sequences == answer[:max_new_tokens]
            assert output.finish_reason == "length"
            assert output.num_target_forwards == 1 + -(-(max_new_tokens - 1) // 5)
            assert output.accepted_per_round == output.proposals  # a perfect draft: nothing was cut off


@pytest.mark.parametrize("limited", ["target", "draft"])
def test_nothing_is_judged_beyond_max_position_embeddings(llama: Target, limited: str):
    prompts, target = prompts_of((10,), seed=0), with_spec(llama, eos_token_ids=NO_EOS)
    model, answers = untrained(target), plain_of(target, prompts, 20)
    if limited == "target":
        target = with_spec(target, max_position_embeddings=21)
    else:
        model.architecture = replace(model.architecture, max_position_embeddings=21)
    engine, _ = knowing_engine(target, CHAIN, prompts, answers, model=model)
    (output,) = engine.generate(prompts, max_new_tokens=20)
    assert output.sequences == answers[0]
    assert output.proposals == [4, 4] + [0] * 9  # as decode.py


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_growing_widths_change_nothing(llama: Target, shape: DraftShape):
    """A text that crosses 256 columns, read in full chunks, in a cache that is cut at every width."""
    target = with_spec(llama, eos_token_ids=NO_EOS)
    prompts = prompts_of((248, 30), seed=8)
    expected = expected_of(target, prompts, 14)
    engine = make_engine(target, shape, capacity=400, batch_size=2, prefill_chunk=64)
    assert tokens(engine.generate(prompts, max_new_tokens=14)) == expected


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [(DraftShape(2), Sampling(temperature=1.0)), (DraftShape(2), Sampling(temperature=1.3, top_k=5, top_p=0.9)),
     (DraftShape(2, 2, 5), Sampling(temperature=1.0))],
    ids=["chain", "chain-filtered", "tree"],
)
@torch.no_grad()
def test_sampled_output_has_the_targets_distribution(llama: Target, shape: DraftShape, sampling: Sampling):
    target = tiny_vocabulary_target(llama)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        architecture = replace(untrained(llama).architecture, vocab_size=6, feature_layers=(1, 2, 3))
        model = place_draft(SpecVocabDraft(architecture, HeadConfig(num_candidates=3)), target)
    batch_size, num_calls = 60, 12
    engine = make_engine(target, shape, "speculative", model, sampling=sampling, batch_size=batch_size, capacity=16)
    expected: Counter[tuple[int, ...]] = Counter()
    for text, probability in enumerate_texts(target, torch.tensor([[0, 3]]), sampling, length=3).items():
        expected[text] += probability

    generator = torch.Generator().manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    num_accepted = num_judged = 0
    for _ in range(num_calls):
        for output in engine.generate([[0, 3]] * batch_size, max_new_tokens=4, generator=generator):
            counts[tuple(output.sequences[:3])] += 1
            num_accepted += sum(output.accepted_per_round)
            num_judged += sum(output.proposals)
    assert 0.15 < num_accepted / num_judged < 0.9  # both branches of the rule are exercised
    assert set(counts) <= set(expected)
    assert chi_square_excess(counts, expected, num_calls * batch_size) < 3.5


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_sampling_repeats_with_the_same_seed(llama: Target, shape: DraftShape):
    engine = make_engine(llama, shape, sampling=Sampling(temperature=1.0))
    one, again, other = (
        engine.generate([[1, 2, 3]], max_new_tokens=12, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert one == again != other


def test_the_speculative_head_names_its_best_tokens(llama: Target):
    model = untrained(llama)
    head = build_head("speculative", llama, model)
    hidden = torch.randn(5, llama.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    for ours, plain in zip(head.top_n(hidden, 6), Head.top_n(head, hidden, 6), strict=True):
        torch.testing.assert_close(ours, plain, check_dtype=False)


def test_what_makes_no_sense_is_refused(llama: Target):
    model = untrained(llama)
    engine = make_engine(llama, DraftShape(0), capacity=20, batch_size=2)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: engine.generate([], max_new_tokens=3), "0 prompts were given"),
        (lambda: engine.generate([[1]] * 3, max_new_tokens=3), "3 prompts were given, but it must be 1 to batch_size"),
        (lambda: engine.generate([[1], []], max_new_tokens=3), "prompts of 0 to 1 tokens"),
        (lambda: engine.generate([[1] * 18], max_new_tokens=3), "capacity=20"),
        (lambda: engine.generate([[1]], max_new_tokens=0), "max_new_tokens=0"),
        (lambda: DecodeEngine(llama, model, shape=CHAIN, capacity=20), "belong together"),
        (lambda: DecodeEngine(llama, shape=CHAIN, capacity=20), "belong together"),
        (lambda: DecodeEngine(llama, capacity=1), "capacity=1"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ConfigError, match="in_context"):
        make_engine(llama, CHAIN, InContextHead(llama, 40, [1, 2]), model)
    few = StaticHead(llama, VocabMap(torch.arange(2), llama.spec.vocab_size))
    with pytest.raises(ConfigError, match="top_k=4 needs a head of as many tokens, and this one has 2"):
        make_engine(llama, TREE, few, model)
    assert isinstance(make_engine(llama, CHAIN, few, model).drafter, ChainDrafter)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_graphs_change_nothing(kind: str, temperature: float, shape: DraftShape, tmp_path: Path):
    target = tiny_target(kind, tmp_path)
    target.model.to("cuda")
    target = with_spec(target, eos_token_ids=NO_EOS)
    prompts, model = prompts_of((3, 11, 28), seed=9), untrained(target)
    for head in ("full", "speculative"):
        outputs = []
        for graphs in (True, False):
            engine = make_engine(target, shape, head, model, batch_size=3, graphs=graphs,
                                 sampling=Sampling(temperature=temperature))
            for _ in range(2):  # the first pass captures
                generator = torch.Generator("cuda").manual_seed(0)
                outputs.append(engine.generate(prompts, max_new_tokens=40, generator=generator))
        assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
        if not temperature:
            for prompt, output in zip(prompts, outputs[0], strict=True):
                assert output.sequences == generate(target, torch.tensor([prompt]).cuda(), 40)

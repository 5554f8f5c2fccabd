"""Heads over part of the vocabulary: their distributions on hand-made examples, and decoding with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specvocab_model.config import ConfigError, DraftConfig, HeadConfig
from specvocab_model.decode import place_draft, speculative_generate
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.evaluation import EvalPrompt, Variant, evaluate
from specvocab_model.export import Provenance, save_checkpoint
from specvocab_model.heads import ClusterHead, ClusterRouter, FullHead, Head, InContextHead, build_head
from specvocab_model.heads.cluster import spherical_kmeans
from specvocab_model.heads.static import OwnHead, StaticHead, prune, write_token_map
from specvocab_model.target import Target
from specvocab_model.vocab import VocabMap, special_ids
from tests.tiny import EOS_IDS, tiny_target

NUM_ROWS, INF = 6, torch.inf


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Tied; the other soft-caps its logits. Both multiply them by a constant."""
    target = tiny_target(request.param, tmp_path_factory.mktemp("target"))
    target.spec = replace(target.spec, logit_scale=0.5)
    return target


@pytest.fixture(scope="module")
def model(target: Target) -> SpecVocabDraft:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(rank=9, num_candidates=40))
    model.speculator.initialise("svd", target.lm_head_weight)
    return place_draft(model, target)


@pytest.fixture(scope="module")
def hidden(target: Target) -> Tensor:
    return 3 * torch.randn(NUM_ROWS, target.spec.hidden_size, generator=torch.Generator().manual_seed(0))


def specials(target: Target) -> list[int]:
    return special_ids(target.tokenizer, target.spec.eos_token_ids, target.spec.vocab_size)


def fit_router(target: Target, num_clusters: int = 12) -> ClusterRouter:
    states = torch.randn(1500, target.spec.hidden_size, generator=torch.Generator().manual_seed(1))
    labels = FullHead(target)(states).greedy_tokens()
    return ClusterRouter.fit(target.lm_head_weight, specials(target), states, labels, num_clusters=num_clusters)


def reduced_heads(target: Target, model: SpecVocabDraft, size: int = 30) -> dict[str, Head]:
    options = {"static": {"vocab": VocabMap.from_ids([*specials(target), *range(60, 60 + size - 4)],
                                                     target.spec.vocab_size)},
               "cluster": {"router": fit_router(target), "size": size}, "in_context": {"size": size}}
    return {kind: build_head(kind, target, model, **more) for kind, more in options.items()}


def two_dimensional(target: Target, rows: list[list[float]]) -> Target:
    """A target whose ``lm_head`` is ``rows``, without scale and cap; only its head can be used."""
    weight = torch.tensor(rows)

    class Small(Target):
        lm_head_weight = weight
        device = weight.device

        def __init__(self) -> None:
            self.spec = replace(target.spec, vocab_size=len(rows), hidden_size=2, logit_scale=1.0, logit_softcap=None)

    return Small()


ROWS = [[1.0, 0.0], [0.0, 1.0], [2.0, 0.1], [-1.0, 0.0], [0.1, 2.0], [-2.0, 0.1]]


def test_static_on_a_hand_made_example(target: Target):
    small = two_dimensional(target, ROWS)
    head = StaticHead(small, VocabMap.from_ids([4, 0, 3], 6))
    output = head(torch.tensor([[1.0, 3.0], [-1.0, 0.0]]))
    assert output.dense_logits(6).tolist() == [
        [1.0, -INF, -INF, -1.0, pytest.approx(6.1), -INF], [-1.0, -INF, -INF, 1.0, pytest.approx(-0.1), -INF]
    ]
    assert output.greedy_tokens().tolist() == [4, 3]
    own = StaticHead(small, VocabMap.from_ids([1, 5], 6), torch.tensor([[1.0, 1.0], [0.0, -1.0]]))
    assert own(torch.tensor([[1.0, 3.0]])).dense_logits(6).tolist() == [[-INF, 4.0, -INF, -INF, -INF, -3.0]]


def test_in_context_on_a_hand_made_example(target: Target):
    small = two_dimensional(target, ROWS)
    head = InContextHead(small, size=4, always_keep=[5], num_top=1)

    def support() -> list[int]:
        return head(torch.tensor([[0.0, 1.0]])).ids[0].tolist()

    assert support() == [0, 1, 2, 5]  # nothing was seen: the smallest ids
    head.begin(torch.tensor([4, 3, 3]))
    assert support() == [0, 3, 4, 5]  # of which 4 is the draft's favourite
    logits = torch.tensor([[0.0, 9.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 9.0]])
    head.verified(torch.tensor([1, 5]), logits)
    assert support() == [1, 3, 4, 5]  # 1 came in, and 0, which had only filled up, went
    head.verified(torch.tensor([0]), logits[:1])
    assert support() == [0, 1, 4, 5]  # 3 was seen before 4, which the draft has just wanted
    head.begin(torch.tensor([2]))
    assert support() == [0, 1, 2, 5]  # a new sequence knows nothing of the last


def test_cluster_on_a_hand_made_example(target: Target):
    small = two_dimensional(target, ROWS)
    router = ClusterRouter(2, torch.tensor([0, 1, 0, 2, 1, -1]), 3)
    router.forward = lambda hidden: torch.cat([hidden, -hidden[:, :1]], -1)  # its three directions
    head = ClusterHead(small, router, size=4)
    output = head(torch.tensor([[1.0, 0.5], [-1.0, 0.5]]))
    assert output.ids.tolist() == [[5, 0, 2, 1], [5, 3, 1, 4]]  # clusters 0 and, cut, 1; clusters 2 and 1
    exact = torch.tensor([[1.0, 0.5], [-1.0, 0.5]]) @ torch.tensor(ROWS).T
    torch.testing.assert_close(output.logits, exact.gather(-1, output.ids.long()))


def test_low_rank_is_the_speculators_own_distribution(target: Target, model: SpecVocabDraft, hidden: Tensor):
    output = build_head("low_rank", target, model)(hidden)
    down, vocab = (proj.weight.double() for proj in (model.speculator.down_proj, model.speculator.vocab_proj))
    expected = 0.5 * (hidden.double() @ down.T @ vocab.T)
    if target.spec.logit_softcap is not None:
        expected = target.spec.logit_softcap * torch.tanh(expected / target.spec.logit_softcap)
    assert output.ids is None and output.logits.dtype == torch.float32
    torch.testing.assert_close(output.logits.double(), expected, rtol=1e-4, atol=1e-4)


def test_logits_are_the_full_heads_and_special_tokens_are_always_there(target, model, hidden):
    full = FullHead(target)(hidden).logits
    for name, head in reduced_heads(target, model).items():
        output = head(hidden)
        assert output.ids.dtype == torch.int32 and output.ids.shape == output.logits.shape == (NUM_ROWS, 30), name
        for row in output.ids.tolist():
            assert len(set(row)) == 30 and set(specials(target)) <= set(row), name
        torch.testing.assert_close(output.logits, full.gather(-1, output.ids.long()), rtol=1e-5, atol=1e-5)


def test_with_every_token_they_are_the_full_head(target, model, hidden):
    vocab_size = target.spec.vocab_size
    everything = VocabMap.from_ids(range(vocab_size), vocab_size)
    for head in (StaticHead(target, everything), build_head("in_context", target, model, size=vocab_size + 5),
                 build_head("cluster", target, model, router=fit_router(target), size=vocab_size)):
        torch.testing.assert_close(head(hidden).dense_logits(vocab_size), FullHead(target)(hidden).logits,
                                   rtol=1e-5, atol=1e-5)


def test_sizes_and_vocabularies_that_do_not_fit_are_refused(target, model):
    router, vocab_size = fit_router(target), target.spec.vocab_size
    for size in (4, vocab_size + 1):
        with pytest.raises(ConfigError, match=f"size={size} must be above the 4 .* at most the {vocab_size}"):
            build_head("cluster", target, model, router=router, size=size)
    with pytest.raises(ConfigError, match="size=4 must be above the 4"):
        build_head("in_context", target, model, size=4)
    with pytest.raises(ConfigError, match="the router knows 7 tokens"):
        build_head("cluster", target, model, router=ClusterRouter(48, torch.zeros(7).long(), 1), size=5)
    with pytest.raises(ConfigError, match="part of 99 tokens"):
        build_head("static", target, model, vocab=VocabMap.from_ids([1], 99))
    states = torch.randn(5, 48)
    with pytest.raises(ConfigError, match="num_clusters=274 must lie between 1 and the 273"):
        ClusterRouter.fit(target.lm_head_weight, specials(target), states, torch.zeros(5).long(), num_clusters=274)
    with pytest.raises(ConfigError, match="no state has a label outside"):
        ClusterRouter.fit(target.lm_head_weight, EOS_IDS, states, torch.full((5,), EOS_IDS[0]), num_clusters=3)


def test_clusters_are_those_of_the_directions():
    generator = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(5, 16, generator=generator), dim=-1)
    true = torch.arange(200) % 5
    lengths = 10 ** torch.rand(200, 1, generator=generator)  # of no importance
    rows = lengths * (centres[true] + 0.05 * torch.randn(200, 16, generator=generator))
    found = [spherical_kmeans(rows, 5, seed=seed) for seed in range(8)]

    def cohesion(clusters: Tensor) -> float:
        directions = torch.nn.functional.normalize(rows, dim=-1)
        return float(torch.zeros(5, 16).index_add_(0, clusters, directions).norm(dim=-1).sum())

    best = max(found, key=cohesion)
    assert len({(int(a), int(b)) for a, b in zip(true, best, strict=True)}) == 5  # up to their names
    assert torch.equal(spherical_kmeans(rows, 5, seed=3), found[3])
    assert set(spherical_kmeans(torch.ones(6, 2), 3).tolist()) == {0, 1, 2}  # none is left without a row


def test_a_fitted_router_finds_the_tokens_of_states_it_has_not_seen(target):
    states = torch.randn(400, target.spec.hidden_size, generator=torch.Generator().manual_seed(9))
    labels = FullHead(target)(states).greedy_tokens()

    def recall(router: ClusterRouter) -> float:
        return float((router.shortlist(states, 100) == labels[:, None]).any(-1).float().mean())

    trained = fit_router(target)
    untrained = ClusterRouter(target.spec.hidden_size, torch.zeros(target.spec.vocab_size).long(), 1)
    assert recall(trained) > recall(untrained) + 0.1
    assert torch.equal(trained.shortlist(states, 50), fit_router(target).shortlist(states, 50))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_with_them_gives_the_targets_output(target, model, temperature):
    input_ids = torch.randint(0, 200, (1, 9), generator=torch.Generator().manual_seed(2))
    expected = target.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=16,
                                     do_sample=False)[0, 9:].tolist()
    target = Target(replace(target.spec, logit_scale=1.0), target.model, target.tokenizer, target.feature_layers)
    for kind, head in {**reduced_heads(target, model), "low_rank": build_head("low_rank", target, model)}.items():
        runs = [speculative_generate(target, model, head, input_ids, max_new_tokens=16, num_draft_tokens=3,
                                     temperature=temperature, generator=torch.Generator().manual_seed(4))
                for _ in range(2)]
        assert runs[0] == runs[1], kind  # nothing is left of the sequence before
        assert temperature or runs[0].sequences == expected, kind


def test_recall_is_of_the_candidates_that_a_head_had_when_it_drafted(target, model):
    supports: list[Tensor] = []

    class Recording(InContextHead):
        def __call__(self, hidden: Tensor):
            output = super().__call__(hidden)
            supports.append(output.ids[0])
            return output

    head = Recording(target, 12, specials(target))
    judged: list[bool] = []

    def observe(proposal, target_logits, num_emitted):
        used = supports[-len(proposal.token_ids):]
        for ids, logits in list(zip(used, target_logits, strict=False))[:min(num_emitted, len(used))]:
            judged.append(int(logits.argmax()) in ids.tolist())

    prompt = EvalPrompt(id="a", category="a", num_turns=1,
                        encode_turn=lambda answers: target.tokenizer("What is it")["input_ids"])
    limits = {"max_new_tokens": 12, "num_draft_tokens": 3}
    result = evaluate(target, {"head": Variant(model=model, head=head)}, [prompt], show_progress=False, **limits)
    input_ids = torch.tensor([prompt.encode_turn([])])
    speculative_generate(target, model, head, input_ids, observer=observe, **limits)
    recall = result.variants["head"].recall.to_dict()
    assert recall["num_positions"] == len(judged)
    assert recall["target_top1"] == pytest.approx(sum(judged) / len(judged))


def test_they_take_the_rows_of_a_full_head_of_the_drafts_own(target, model, hidden):
    vocab_size = target.spec.vocab_size
    owner = SpecVocabDraft(model.architecture, HeadConfig(type="static", draft_vocab_size=vocab_size))
    owner.own_head.initialise(VocabMap.from_ids(range(vocab_size), vocab_size), -target.lm_head_weight)
    opposite = reduced_heads(target, owner)
    for name, head in reduced_heads(target, model).items():
        torch.testing.assert_close(opposite[name](hidden).logits, -head(hidden).logits)


def test_a_pruned_checkpoint_has_the_logits_of_the_full_head_at_its_tokens(target, model, hidden, tmp_path):
    vocab = VocabMap.from_ids([*specials(target), 5, 77, 31], target.spec.vocab_size)
    pruned = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(rank=9))
    pruned.load_state_dict(model.state_dict())
    prune(pruned, target.lm_head_weight, vocab)
    save_checkpoint(tmp_path / "pruned", pruned, target.spec, Provenance(), dtype=torch.float32)
    read = SpecVocabDraft.from_pretrained(tmp_path / "pruned", target_spec=target.spec)
    assert read.speculator is None and read.head_config.draft_vocab_size == len(vocab) == 7
    assert read.head_config.type == "static"
    full, output = FullHead(target)(hidden).logits, build_head("static", target, read)(hidden)
    assert output.ids[0].tolist() == vocab.ids.tolist()
    torch.testing.assert_close(output.logits, full[:, vocab.ids], rtol=1e-5, atol=1e-5)


def test_a_head_takes_only_a_vocabulary_of_its_size():
    head = OwnHead.of_size(4, 3, 10)
    assert len(OwnHead.of_size(4, 30, 10).ids) == 10
    for vocab in (VocabMap.from_ids([1, 2], 10), VocabMap.from_ids([1, 2, 3], 11)):
        with pytest.raises(ValueError, match="over 3 of 10 tokens cannot take"):
            head.initialise(vocab, torch.zeros(11, 4))
    lm_head = torch.arange(40.0).view(10, 4)
    head.initialise(VocabMap.from_ids([7, 0, 4], 10), lm_head)
    assert head.vocab.ids.tolist() == [0, 4, 7] and torch.equal(head.weight.detach(), lm_head[[0, 4, 7]])


def test_the_token_map_is_a_saved_list_of_ids(tmp_path):
    write_token_map(tmp_path / "map.pt", VocabMap.from_ids([9, 2, 4], 12))
    assert torch.load(tmp_path / "map.pt", weights_only=True) == [2, 4, 9]

"""The judge of engines, on an engine of our own that can be told to go wrong."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specvocab_model.config import DraftConfig, HeadConfig
from specvocab_model.decode import autoregressive_generate, place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads.static import prune
from specvocab_model.serving.check import Served, acceptance_problems, compare_logits, decode, problems
from specvocab_model.target import Target
from specvocab_model.vocab import VocabMap
from tests.our_engine import OurEngine
from tests.tiny import tiny_target

PROMPTS = [[3, 50, 7], [9, 9, 60, 2, 1]]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def target(request, tmp_path_factory) -> Target:
    return tiny_target("llama", tmp_path_factory.mktemp("target"), dtype=request.param)


@pytest.fixture(scope="module")
def model(target) -> SpecVocabDraft:
    torch.manual_seed(0)
    model = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(rank=12, num_candidates=40))
    model.speculator.initialise("svd", target.lm_head_weight)
    for projection in (model.draft.midlayer.self_attn.q_proj, model.draft.midlayer.self_attn.k_proj):
        torch.nn.init.normal_(projection.weight, std=0.3)  # attention that has its favourites, and so depends on RoPE
    return place_draft(model, target)


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randint(0, 250, (1, 60), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("head", ["full", "speculative"])
def test_a_faithful_engine_is_equal(head, target, model, text):
    engine = OurEngine(target, model, head)
    found = compare_logits(engine, model, target, text)
    assert found.equal and found.head == head
    lines = problems(engine, model, target.spec, {"draft": {"feature_layers": None}}, found)
    assert ["serves the full vocabulary" in line for line in lines] == [True] * (head == "full")


def test_a_static_head_is_compared_on_its_own_tokens(target, model, text):
    pruned = copy.deepcopy(model)
    vocab = VocabMap.from_ids(torch.arange(0, target.spec.vocab_size - 1, 3), target.spec.vocab_size)
    prune(pruned, target.lm_head_weight, vocab)
    engine = OurEngine(target, pruned, "static")
    found = compare_logits(engine, pruned, target, text)
    assert found.equal and found.head == "static" and problems(engine, pruned, target.spec, None, found) == []
    engine.model.own_head.ids += 1  # a map that is not the head's
    assert not compare_logits(engine, pruned, target, text).equal


def spoil_norm(draft) -> None:
    draft.norm.weight.data *= 1.1


def spoil_rope(draft) -> None:
    draft.rotary.inv_freq *= 0.8


def spoil_attention(draft) -> None:
    draft.midlayer.self_attn.k_proj.weight.data.zero_()


@pytest.mark.parametrize("spoil", [spoil_norm, spoil_rope, spoil_attention])
@pytest.mark.parametrize("head", ["full", "speculative"])
def test_a_draft_that_is_read_wrongly_is_different(head, spoil, target, model, text):
    engine = OurEngine(target, model, head)
    spoil(engine.model.draft)
    found = compare_logits(engine, model, target, text)
    assert not found.equal
    assert any("computes other logits" in line for line in problems(engine, model, target.spec, None, found))


@pytest.mark.parametrize(("head", "spoil"), [
    ("speculative", lambda logits: logits.index_fill(0, torch.tensor([5]), torch.nan)),
    ("full", lambda logits: logits.index_fill(1, torch.tensor([200]), torch.nan)),
    ("full", lambda logits: logits.index_fill(1, torch.tensor([200]), torch.inf)),
])
def test_a_part_that_cannot_be_compared_is_different(head, spoil, target, model, text, monkeypatch):
    engine = OurEngine(target, model, head)
    monkeypatch.setattr(engine, "logits", lambda *arguments: spoil(OurEngine.logits(engine, *arguments)))
    assert not compare_logits(engine, model, target, text).equal


def test_a_token_that_a_full_head_leaves_out_is_different(target, model, text, monkeypatch):
    full = copy.deepcopy(model)
    full.speculator, full.head_config = None, HeadConfig(type="full")
    engine = OurEngine(target, full, "full")
    assert compare_logits(engine, full, target, text).equal
    monkeypatch.setattr(engine, "logits", lambda *arguments: OurEngine.logits(engine, *arguments).index_fill(
        1, torch.tensor([200]), -torch.inf))
    found = compare_logits(engine, full, target, text)
    assert found.head == "full" and not found.equal


def test_the_full_vocabulary_without_a_token_is_not_the_speculated_one(target, model, text, monkeypatch):
    engine = OurEngine(target, model, "full")
    monkeypatch.setattr(engine, "logits", lambda *arguments: OurEngine.logits(engine, *arguments).index_fill(
        1, torch.tensor([200]), -torch.inf))
    assert not compare_logits(engine, model, target, text).equal


def test_other_candidates_are_different(target, model, text):
    engine = OurEngine(target, model, "speculative")
    engine.model.speculator.vocab_proj.weight.data = model.speculator.vocab_proj.weight.data.roll(1, 0)
    assert not compare_logits(engine, model, target, text).equal


def test_feature_layers_are_compared_with_the_drafts_and_with_those_of_training(target, model, text):
    engine = OurEngine(target, model, "speculative")
    found = replace(compare_logits(engine, model, target, text), engine_error=0.0, engine_candidates=1.0)
    engine.feature_layers = (1, 3, 4)
    lines = problems(engine, model, target.spec, {"draft": {"feature_layers": [3, 5, 6]}}, found)
    assert len(lines) == 2 and "takes features from layers [1, 3, 4]" in lines[0] and "on [3, 5, 6]" in lines[1]


def test_a_record_without_a_training_names_no_feature_layers(target, model, text):
    engine = OurEngine(target, model, "speculative")
    found = compare_logits(engine, model, target, text)
    assert problems(engine, model, target.spec, {"convert": {"draft": "folder"}}, found) == []


def test_decode_counts_rounds_and_positions(target, model):
    served = decode(target, model, "speculative", PROMPTS, max_new_tokens=12, num_draft_tokens=3)
    greedy = [autoregressive_generate(target, torch.tensor([prompt]), max_new_tokens=12).sequences
              for prompt in PROMPTS]
    if target.lm_head_weight.dtype == torch.float32:  # rounding may break a tie in bf16
        assert served.answers == greedy
    # A round that keeps n drafts adds n + 1 tokens; the first token of an answer comes of the prompt alone, and the
    # last round of all may have had no room for a draft.
    tokens = sum(map(len, served.answers)) - len(PROMPTS)
    assert 0 <= tokens - served.num_rounds - sum(served.accepted_per_position) <= len(PROMPTS)
    assert served.accepted_per_position == sorted(served.accepted_per_position, reverse=True)


def test_lost_acceptance_is_explained():
    own = Served(answers=[[1]], num_rounds=100, accepted_per_position=[80, 60, 40])
    assert own.accepted == pytest.approx(1.8)
    same, fewer = replace(own, accepted_per_position=[80, 58, 38]), replace(own, accepted_per_position=[80, 40, 20])
    assert acceptance_problems(same, own, None) == [] and acceptance_problems(same, own, 2.9) == []
    (line,) = acceptance_problems(fewer, own, None)
    assert "accepts 1.40 drafts a round, our own decoder 1.80" in line and '"method": "eagle3"' in line
    (line,) = acceptance_problems(own, own, 3.5)
    assert "2.80 tokens a round here, and 3.50 in the evaluation" in line
    few = replace(fewer, num_rounds=10, accepted_per_position=[8, 5, 3])
    (line,) = acceptance_problems(few, own, None)  # of the same answers, so chance has no part in it
    assert "accepts 1.60 drafts a round" in line
    assert acceptance_problems(replace(few, answers=[[2]]), own, None) == []
    assert acceptance_problems(replace(fewer, answers=[[2]]), own, None) != []
    poor = replace(own, accepted_per_position=[30, 10, 0])
    (line,) = acceptance_problems(poor, poor, None)
    assert "our own decoder accepts 0.40 drafts a round, too" in line

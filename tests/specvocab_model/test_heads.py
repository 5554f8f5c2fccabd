from __future__ import annotations

import dataclasses

import pytest
import torch
from specvocab_kernels.vocab_head import ExactSelection, HeadWeights, TileSelection

from specvocab_model.config import QUANTIZATIONS, SELECTIONS, DraftConfig, HeadConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads import (
    HEADS,
    ClusterHead,
    ClusterRouter,
    FullHead,
    HeadOutput,
    InContextHead,
    LowRankHead,
    SpeculativeHead,
    StaticHead,
    build_head,
)
from specvocab_model.speculator import VocabSpeculator, build_selection
from specvocab_model.vocab import VocabMap
from tests.tiny import tile_candidates, tiny_target

NUM_ROWS = 7


@pytest.fixture(params=["llama", "qwen3", "gemma2", "scaled"])
def target(request, tmp_path):
    """Tied, untied, soft-capped, and one whose logits are multiplied by a constant as Cohere's are."""
    if request.param != "scaled":
        return tiny_target(request.param, tmp_path)
    target = tiny_target("llama", tmp_path)
    target.spec = dataclasses.replace(target.spec, logit_scale=0.0625)
    return target


@pytest.fixture
def hidden(target) -> torch.Tensor:
    return 3 * torch.randn(NUM_ROWS, target.spec.hidden_size, generator=torch.Generator().manual_seed(0))


def speculator_for(target, rank: int = 6, **head) -> VocabSpeculator:
    """By default every token is a candidate."""
    vocab_size = target.spec.vocab_size
    selection = build_selection(HeadConfig(**(head or {"num_candidates": vocab_size})), vocab_size)
    speculator = VocabSpeculator(target.spec.hidden_size, rank, selection)
    speculator.initialise("svd", target.lm_head_weight)
    return speculator


def test_full_head_is_the_targets_own_output(target, hidden):
    output = FullHead(target)(hidden)
    assert output.ids is None and output.logits.dtype == torch.float32
    logits = (hidden.double() @ target.lm_head_weight.double().T) * target.spec.logit_scale
    if target.spec.logit_softcap is not None:
        logits = target.spec.logit_softcap * torch.tanh(logits / target.spec.logit_softcap)
    torch.testing.assert_close(output.logits.double(), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_with_every_token_a_candidate_speculative_equals_full(selection, target, hidden):
    vocab_size = target.spec.vocab_size
    speculator = speculator_for(target, selection=selection, num_candidates=vocab_size)
    full, speculative = FullHead(target)(hidden), SpeculativeHead(target, speculator)(hidden)
    torch.testing.assert_close(speculative.dense_logits(vocab_size), full.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(speculative.greedy_tokens(), full.greedy_tokens())


@pytest.mark.parametrize("quantization", [None, *QUANTIZATIONS])
@pytest.mark.parametrize(
    "head, num_tiles, keep",
    [({"selection": "exact", "num_candidates": 20}, 1, 20), ({"tile": 64, "keep": 3}, 5, 3),
     ({"num_candidates": 20}, 3, 7)],
)
def test_candidates_have_exact_logits_and_the_others_none(head, num_tiles, keep, quantization, target, hidden):
    speculator, vocab_size = speculator_for(target, **head), target.spec.vocab_size
    if quantization is not None:
        speculator.quantize(quantization)
    output = SpeculativeHead(target, speculator)(hidden)
    assert output.ids.shape == output.logits.shape == (NUM_ROWS, num_tiles * keep)
    assert output.logits.dtype == torch.float32
    inside = torch.zeros(NUM_ROWS, vocab_size, dtype=torch.bool)
    for row, scores in zip(inside, speculator(hidden).tolist(), strict=True):
        row[list(tile_candidates(scores, num_tiles, keep))] = True
    dense, full = output.dense_logits(vocab_size), FullHead(target)(hidden).logits
    torch.testing.assert_close(dense[inside], full[inside], rtol=1e-5, atol=1e-5)
    assert (dense[~inside] == -torch.inf).all()
    assert output.greedy_tokens().dtype == torch.int64
    assert torch.equal(output.greedy_tokens(), dense.argmax(-1))


def test_weights_are_laid_out_once(target, hidden, monkeypatch):
    head = SpeculativeHead(target, speculator_for(target, tile=64, keep=3))
    assert head.weights.lm_head.data_ptr() == target.lm_head_weight.data_ptr()
    expected = head(hidden)
    monkeypatch.delattr(HeadWeights, "build")
    monkeypatch.delattr(TileSelection, "arrange")
    assert torch.equal(head(hidden).logits, expected.logits)


def test_columns_belong_to_the_ids():
    output = HeadOutput(torch.tensor([[3, 0, 1]]), torch.tensor([[1.0, 2.0, -1.0]]))
    assert output.dense_logits(5).tolist() == [[2.0, -1.0, -torch.inf, 1.0, -torch.inf]]
    assert output.greedy_tokens().tolist() == [0]


def test_heads_are_built_by_name(tmp_path):
    target = tiny_target("llama", tmp_path)
    model = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(num_candidates=20))
    vocab_size = target.spec.vocab_size
    router = ClusterRouter(target.spec.hidden_size, torch.arange(vocab_size) % 5, 5)
    options = {"static": {"vocab": VocabMap.from_ids([1, 2], vocab_size)}, "cluster": {"router": router, "size": 9},
               "in_context": {"size": 9}}
    assert {kind: type(build_head(kind, target, model, **options.get(kind, {}))) for kind in HEADS} == {
        "full": FullHead, "speculative": SpeculativeHead, "static": StaticHead, "low_rank": LowRankHead,
        "cluster": ClusterHead, "in_context": InContextHead,
    }
    with pytest.raises(ValueError, match="head 'none' is not known; choose one of full, speculative, static"):
        build_head("none", target, model)
    without = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(type="full"))
    for kind in ("speculative", "low_rank"):
        with pytest.raises(ValueError, match=rf"no vocabulary speculator.*{kind}.*scripts/convert\.py"):
            build_head(kind, target, without)
    with pytest.raises(ValueError, match="no static head of its own; train one with head=static"):
        build_head("static", target, model)
    with pytest.raises(ValueError, match="covers 99 tokens"):
        SpeculativeHead(target, VocabSpeculator(target.spec.hidden_size, 4, ExactSelection(99, 10)))


def test_bf16_agrees_with_full_within_rounding(tmp_path):
    target = tiny_target("qwen3", tmp_path, dtype=torch.bfloat16)
    hidden = torch.randn(NUM_ROWS, target.spec.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    speculator = speculator_for(target).to(torch.bfloat16)
    dense = SpeculativeHead(target, speculator)(hidden).dense_logits(target.spec.vocab_size)
    torch.testing.assert_close(dense, FullHead(target)(hidden).logits, rtol=2**-7, atol=2**-9)

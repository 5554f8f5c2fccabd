from __future__ import annotations

import dataclasses

import pytest
import torch

from specvocab_model.config import DraftConfig, HeadConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads import HEADS, FullHead, HeadOutput, SpeculativeHead, build_head
from specvocab_model.speculator import VocabSpeculator
from tests.tiny import tiny_target

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


def speculator_for(target, num_candidates: int, rank: int = 6) -> VocabSpeculator:
    speculator = VocabSpeculator(target.spec.hidden_size, target.spec.vocab_size, rank, num_candidates)
    speculator.initialise("svd", target.lm_head_weight)
    return speculator


def test_full_head_is_the_targets_own_output(target, hidden):
    output = FullHead(target)(hidden)
    assert output.ids is None and output.logits.dtype == torch.float32
    logits = (hidden.double() @ target.lm_head_weight.double().T) * target.spec.logit_scale
    if target.spec.logit_softcap is not None:
        logits = target.spec.logit_softcap * torch.tanh(logits / target.spec.logit_softcap)
    torch.testing.assert_close(output.logits.double(), logits, rtol=1e-5, atol=1e-5)


def test_with_every_token_a_candidate_speculative_equals_full(target, hidden):
    vocab_size = target.spec.vocab_size
    full, speculative = FullHead(target)(hidden), SpeculativeHead(target, speculator_for(target, vocab_size))(hidden)
    torch.testing.assert_close(speculative.dense_logits(vocab_size), full.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(speculative.greedy_tokens(), full.greedy_tokens())


def test_candidates_have_exact_logits_and_the_others_none(target, hidden):
    num_candidates, vocab_size = 20, target.spec.vocab_size
    speculator = speculator_for(target, num_candidates)
    output = SpeculativeHead(target, speculator)(hidden)
    assert output.ids.shape == output.logits.shape == (NUM_ROWS, num_candidates)
    assert output.ids.dtype == torch.int64 and output.logits.dtype == torch.float32
    inside = torch.zeros(NUM_ROWS, vocab_size, dtype=torch.bool).scatter_(-1, speculator.candidates(hidden), True)
    dense, full = output.dense_logits(vocab_size), FullHead(target)(hidden).logits
    torch.testing.assert_close(dense[inside], full[inside], rtol=1e-5, atol=1e-5)
    assert (dense[~inside] == -torch.inf).all()
    assert torch.equal(output.greedy_tokens(), dense.argmax(-1))


def test_columns_belong_to_the_ids():
    output = HeadOutput(torch.tensor([[3, 0, 1]]), torch.tensor([[1.0, 2.0, -1.0]]))
    assert output.dense_logits(5).tolist() == [[2.0, -1.0, -torch.inf, 1.0, -torch.inf]]
    assert output.greedy_tokens().tolist() == [0]


def test_heads_are_built_by_name(tmp_path):
    target = tiny_target("llama", tmp_path)
    model = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(num_candidates=20))
    assert {kind: type(build_head(kind, target, model)) for kind in HEADS} == {
        "full": FullHead, "speculative": SpeculativeHead
    }
    with pytest.raises(ValueError, match="head 'static' is not known; choose one of full, speculative"):
        build_head("static", target, model)
    without = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(type="full"))
    with pytest.raises(ValueError, match=r"no vocabulary speculator.*scripts/convert\.py"):
        build_head("speculative", target, without)
    with pytest.raises(ValueError, match="covers 99 tokens"):
        SpeculativeHead(target, VocabSpeculator(target.spec.hidden_size, 99, 4, 10))


def test_bf16_agrees_with_full_within_rounding(tmp_path):
    target = tiny_target("qwen3", tmp_path, dtype=torch.bfloat16)
    hidden = torch.randn(NUM_ROWS, target.spec.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    speculator = speculator_for(target, target.spec.vocab_size).to(torch.bfloat16)
    dense = SpeculativeHead(target, speculator)(hidden).dense_logits(target.spec.vocab_size)
    torch.testing.assert_close(dense, FullHead(target)(hidden).logits, rtol=2**-7, atol=2**-9)

"""vLLM's CPU build answers prompts with our drafts: the target's own greedy text, and as many accepted drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from specvocab_model.config import HeadConfig
from specvocab_model.serving.check import LOST_ACCEPTANCE, Served, decode
from specvocab_model.serving.vllm_check import VllmDraft
from tests.serving.pairs import Pair, assert_same, greedy_answers, prompts, shifted_features, trained_pair

NEW_TOKENS, DRAFT_TOKENS = 40, 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return trained_pair(tmp_path_factory.mktemp("trained"), head=HeadConfig(rank=24, num_candidates=64))


@pytest.fixture(scope="module")
def greedy(pair) -> list[list[int]]:
    return greedy_answers(pair.target, prompts(8), NEW_TOKENS)


def serve(pair: Pair, checkpoint: Path, **arguments) -> Served:
    served = VllmDraft(checkpoint, str(pair.target_folder), dtype="float32", num_draft_tokens=DRAFT_TOKENS,
                       max_model_len=128, **arguments)
    return served.serve(prompts(8), NEW_TOKENS)


@pytest.fixture(scope="module")
def speculated(pair) -> Served:
    return serve(pair, pair.checkpoint)


@pytest.fixture
def own(pair, request) -> Served:
    return decode(pair.target, pair.model, request.param, prompts(8), max_new_tokens=NEW_TOKENS,
                  num_draft_tokens=DRAFT_TOKENS)


@pytest.mark.parametrize("own", ["speculative"], indirect=True)
def test_drafts_as_tokens(speculated, own, greedy):
    assert_same(speculated, own, greedy)


@pytest.mark.parametrize("own", ["speculative"], indirect=True)
def test_drafts_as_logits(pair, own, greedy):
    assert_same(serve(pair, pair.checkpoint, speculative={"use_local_argmax_reduction": False}), own, greedy)


@pytest.mark.parametrize("own", ["full"], indirect=True)
def test_without_the_plugin(pair, own, greedy, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert_same(serve(pair, pair.checkpoint), own, greedy)


@pytest.fixture
def a_core_each(monkeypatch):
    """Left to itself, vLLM wants a NUMA node for every rank."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


@pytest.mark.parametrize("own", ["speculative"], indirect=True)
def test_two_ranks(pair, own, greedy, a_core_each):
    assert_same(serve(pair, pair.checkpoint, tensor_parallel_size=2), own, greedy)


@pytest.mark.parametrize("own", ["speculative"], indirect=True)
def test_logits_of_two_ranks(pair, own, greedy, a_core_each):
    logits = {"use_local_argmax_reduction": False}
    assert_same(serve(pair, pair.checkpoint, speculative=logits, tensor_parallel_size=2), own, greedy)


def test_features_of_wrong_layers_cost_acceptance(pair, speculated, greedy, tmp_path):
    """The draft depends on its features, or the tests above would pass with any."""
    served = serve(pair, shifted_features(pair.checkpoint, tmp_path / "wrong"))
    print(served.num_rounds, served.accepted_per_position)
    assert served.answers == greedy
    assert served.accepted < (1 - 2 * LOST_ACCEPTANCE) * speculated.accepted

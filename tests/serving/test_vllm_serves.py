"""vLLM's CPU build answers prompts with our drafts: the target's own greedy text, and as many accepted drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specvocab_model.serving.check import Served
from specvocab_model.serving.vllm_check import VllmDraft
from tests.serving.pairs import (
    DRAFT_TOKENS,
    NEW_TOKENS,
    assert_features_matter,
    assert_same,
    prompts,
    shifted_features,
)

LOGITS = {"use_local_argmax_reduction": False}


@pytest.fixture(scope="module")
def serve(pair) -> Callable[..., Served]:
    def serve(checkpoint: Path, **arguments) -> Served:
        served = VllmDraft(checkpoint, str(pair.target_folder), dtype="float32", num_draft_tokens=DRAFT_TOKENS,
                           max_model_len=128, **arguments)
        return served.serve(prompts(8), NEW_TOKENS)

    return serve


def test_drafts_as_tokens(speculated, own, greedy):
    assert_same(speculated, own["speculative"], greedy)


def test_drafts_as_logits(serve, pair, own, greedy):
    assert_same(serve(pair.checkpoint, speculative=LOGITS), own["speculative"], greedy)


def test_without_the_plugin(serve, pair, own, greedy, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert_same(serve(pair.checkpoint), own["full"], greedy)


@pytest.fixture
def a_core_each(monkeypatch):
    """Left to itself, vLLM wants a NUMA node for every rank."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def test_two_ranks(serve, pair, own, greedy, a_core_each):
    assert_same(serve(pair.checkpoint, tensor_parallel_size=2), own["speculative"], greedy)


def test_logits_of_two_ranks(serve, pair, own, greedy, a_core_each):
    assert_same(serve(pair.checkpoint, speculative=LOGITS, tensor_parallel_size=2), own["speculative"], greedy)


def test_features_of_wrong_layers_cost_acceptance(serve, pair, speculated, greedy, tmp_path):
    assert_features_matter(serve(shifted_features(pair.checkpoint, tmp_path / "wrong")), speculated, greedy)

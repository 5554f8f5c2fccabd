"""SGLang answers prompts with our drafts on a CPU: the target's own greedy text, and as many accepted drafts.

Its scheduler, memory, workers and models are its own; the kernels, which it has for Intel's AMX only, are those of
``stubs/sgl_kernel``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from specvocab_model.config import HeadConfig
from specvocab_model.serving.check import LOST_ACCEPTANCE, Served, decode
from specvocab_model.serving.sglang_check import SGLangDraft
from tests.serving.pairs import Pair, assert_same, greedy_answers, prompts, shifted_features, trained_pair

NEW_TOKENS, DRAFT_TOKENS = 40, 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return trained_pair(tmp_path_factory.mktemp("trained"), head=HeadConfig(rank=24, num_candidates=64))


@pytest.fixture(scope="module")
def greedy(pair) -> list[list[int]]:
    return greedy_answers(pair.target, prompts(8), NEW_TOKENS)


def serve(pair: Pair, checkpoint: Path) -> Served:
    with SGLangDraft(checkpoint, str(pair.target_folder), dtype="float32", num_draft_tokens=DRAFT_TOKENS,
                     max_model_len=128) as served:
        return served.serve(prompts(8), NEW_TOKENS)


def decoded(pair: Pair, head: str) -> Served:
    return decode(pair.target, pair.model, head, prompts(8), max_new_tokens=NEW_TOKENS, num_draft_tokens=DRAFT_TOKENS)


@pytest.fixture(scope="module")
def speculated(pair) -> Served:
    return serve(pair, pair.checkpoint)


def test_drafts_from_candidates(pair, speculated, greedy):
    assert_same(speculated, decoded(pair, "speculative"), greedy)


def test_without_the_plugin(pair, greedy, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    assert_same(serve(pair, pair.checkpoint), decoded(pair, "full"), greedy)


def test_features_of_wrong_layers_cost_acceptance(pair, speculated, greedy, tmp_path):
    """The draft depends on its features, or the tests above would pass with any."""
    served = serve(pair, shifted_features(pair.checkpoint, tmp_path / "wrong"))
    print(served.num_rounds, served.accepted_per_position)
    assert served.answers == greedy
    assert served.accepted < (1 - 2 * LOST_ACCEPTANCE) * speculated.accepted

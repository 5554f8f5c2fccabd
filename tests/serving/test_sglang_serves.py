"""SGLang answers prompts with our drafts on a CPU: the target's own greedy text, and as many accepted drafts.

Its scheduler, memory, workers and models are its own; the kernels, which it has for Intel's AMX only, are those of
``stubs/sgl_kernel``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specvocab_model.serving.check import Served
from specvocab_model.serving.sglang_check import SGLangDraft
from tests.serving.pairs import (
    DRAFT_TOKENS,
    NEW_TOKENS,
    assert_features_matter,
    assert_same,
    prompts,
    shifted_features,
)


@pytest.fixture(scope="module")
def serve(pair) -> Callable[[Path], Served]:
    def serve(checkpoint: Path) -> Served:
        with SGLangDraft(checkpoint, str(pair.target_folder), dtype="float32", num_draft_tokens=DRAFT_TOKENS,
                         max_model_len=128) as served:
            return served.serve(prompts(8), NEW_TOKENS)

    return serve


def test_drafts_from_candidates(speculated, own, greedy):
    assert_same(speculated, own["speculative"], greedy)


def test_without_the_plugin(serve, pair, own, greedy, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    assert_same(serve(pair.checkpoint), own["full"], greedy)


def test_features_of_wrong_layers_cost_acceptance(serve, pair, speculated, greedy, tmp_path):
    assert_features_matter(serve(shifted_features(pair.checkpoint, tmp_path / "wrong")), speculated, greedy)

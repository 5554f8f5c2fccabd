"""Tests that need an engine; `bash scripts/test_serving.sh` runs them, each in the engine's own environment.

The fixtures are those of the two files in which an engine answers prompts. Each says in ``serve`` how its engine does:
a function of a checkpoint and, by name, of what is special to a test.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from specvocab_model.config import HeadConfig
from specvocab_model.serving.check import Served, decode
from tests.serving.pairs import DRAFT_TOKENS, NEW_TOKENS, Pair, greedy_answers, prompts, trained_pair

collect_ignore_glob = [f"test_{engine}_*.py" for engine in ("vllm", "sglang") if find_spec(engine) is None]


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Pair:
    return trained_pair(tmp_path_factory.mktemp("trained"), head=HeadConfig(rank=24, num_candidates=64))


@pytest.fixture(scope="session")
def greedy(pair) -> list[list[int]]:
    """The target's own answers."""
    return greedy_answers(pair.target, prompts(8), NEW_TOKENS)


@pytest.fixture(scope="session")
def own(pair) -> dict[str, Served]:
    """What our decoder does, by the draft's head."""
    return {head: decode(pair.target, pair.model, head, prompts(8), max_new_tokens=NEW_TOKENS,
                         num_draft_tokens=DRAFT_TOKENS) for head in ("speculative", "full")}


@pytest.fixture(scope="module")
def speculated(serve: Callable[..., Served], pair) -> Served:
    """What the engine does with the plugin."""
    return serve(pair.checkpoint)

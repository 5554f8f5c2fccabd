"""The size of a static vocabulary: the draft's cost against counted forwards, the search against brute force."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from specvocab_model.attention import DraftCache
from specvocab_model.config import ConfigError
from specvocab_model.draft import Draft, DraftArchitecture
from specvocab_model.tuning.flops import DraftFlops, draft_bytes
from specvocab_model.tuning.latency import draft_seconds
from specvocab_model.tuning.trim import TrimProblem, build_problem, exact, grid, pareto_front, pool, tpe
from specvocab_model.vocab import most_frequent

PROMPTS = Path(__file__).resolve().parents[2] / "data_gen/quickstart_prompts.jsonl"


def architecture(**changes) -> DraftArchitecture:
    sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                 vocab_size=128256, feature_layers=(2, 16, 29), rms_norm_eps=1e-5,
                 rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=512,
                 num_unroll_steps=1)
    return DraftArchitecture(**(sizes | changes))


SMALL = architecture(hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=2, head_dim=40,
                     vocab_size=3000)


def test_the_head_of_llama_3_8b_is_642_thousandths_of_the_draft():
    """The paper's figure is 64.2 %; its formula gives 64.15."""
    flops = DraftFlops.of(architecture())
    assert flops.head_share(128256) == pytest.approx(0.642, abs=1e-3)
    assert flops.body == 2 * 4096 * (3 * 4096 + 2 * 4096 + 2 * 2 * 1024 + 4096 + 3 * 14336)


@torch.no_grad()
@pytest.mark.parametrize("size", [100, 3000])
def test_flops_are_those_of_a_counted_forward(size):
    draft, cache = Draft(SMALL), DraftCache()
    head = torch.randn(size, 256)

    def token() -> None:
        hidden = draft.fuse(torch.randn(1, 1, 768))
        hidden = draft.forward_cached(hidden, torch.randn(1, 1, 256), torch.tensor([[cache.length]]), cache)
        torch.nn.functional.linear(draft.norm(hidden), head)

    token()
    with FlopCounterMode(display=False) as counter:
        token()
    assert DraftFlops.of(SMALL).total(size) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_bytes_are_those_of_the_weights_and_the_cache():
    weights = sum(parameter.numel() for parameter in Draft(SMALL).parameters()) + 100 * 256
    assert draft_bytes(SMALL, 100, itemsize=2, context=0) == 2 * weights
    assert draft_bytes(SMALL, 100, itemsize=2, context=7) == 2 * (weights + 2 * 7 * 2 * 40)


def test_a_draft_step_is_timed_for_every_size():
    body, heads = draft_seconds(SMALL, [64, 3000], batch=2, context=5, dtype=torch.float32, device=torch.device("cpu"))
    assert body > 0 and len(heads) == 2 and min(heads) > 0


def brute_force(counts: dict[str, list[int]], special: set[int], least: dict[str, float], alpha: float, first: int,
                step: int, head_cost: float) -> tuple[float, int]:
    """(U, −k) of the best size, one set of kept ids after another."""
    vocab_size = len(next(iter(counts.values())))
    pooled = [sum(column) for column in zip(*counts.values(), strict=True)]
    order = sorted(range(vocab_size), key=lambda i: (i not in special, -pooled[i] if i not in special else 0, i))
    best = (-1.0, 0)
    for size in range(1, vocab_size + 1):
        if size != vocab_size and size != first and (size < first or size % step):
            continue
        kept = order[:size]

        def share(of: list[int], kept: list[int] = kept) -> float:
            return sum(of[i] for i in kept) / sum(of)

        if all(share(of) >= least.get(name, 0) - 1e-12 for name, of in counts.items()):
            saved = 1 - (1 + head_cost * size) / (1 + head_cost * vocab_size)
            best = max(best, (alpha * share(pooled) + (1 - alpha) * saved, -size))
    return best


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_exact_scan_finds_what_brute_force_finds(data):
    vocab_size = data.draw(st.integers(4, 40))
    occurrences = st.lists(st.integers(0, 9), min_size=vocab_size, max_size=vocab_size).filter(any)
    counts = {name: data.draw(occurrences) for name in "ab"[: data.draw(st.integers(1, 2))]}
    special = data.draw(st.sets(st.integers(0, vocab_size - 1), max_size=3))
    least = {name: data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])) for name in counts}
    alpha, step = data.draw(st.sampled_from([0.1, 0.5, 0.9])), data.draw(st.integers(1, 5))
    first = max(data.draw(st.integers(1, 6)), len(special))
    problem = build_problem({name: np.array(of) for name, of in counts.items()}, lambda sizes: 1 + 0.3 * sizes,
                            always_keep=special, min_coverage=least, alpha=alpha, min_size=first, step=step)
    utility, _ = brute_force(counts, special, least, alpha, min(first, vocab_size), step, 0.3)
    found = exact(problem)
    assert found.utility == pytest.approx(utility)
    assert all(found.coverage_of[name] >= least[name] for name in counts)
    kept = most_frequent(torch.tensor(pool({n: np.array(c) for n, c in counts.items()}, equal_domains=False)),
                         found.size, special).ids.tolist()
    for name, of in counts.items():  # the map that is written covers what was promised
        assert found.coverage_of[name] == pytest.approx(sum(of[i] for i in kept) / sum(of))


def real_problem(**changes) -> TrimProblem:
    """Words and marks of the quickstart's prompts, beside twice as many ids that never occur."""
    words = Counter(re.findall(r"\w+|[^\w\s]", PROMPTS.read_text())).values()
    counts = np.array([*words, *[0] * 2 * len(words)])
    options = {"always_keep": [0, 3], "min_coverage": {}, "step": 8} | changes
    return build_problem({"real": counts}, lambda sizes: len(counts) / 1.8 + sizes, **options)


@pytest.mark.parametrize("least", [0.0, 0.97])
def test_tpe_comes_within_one_step_of_the_optimum_on_real_counts(least):
    problem = real_problem(min_coverage={"real": least})
    best, found = exact(problem), tpe(problem, num_trials=200, seed=0)
    assert len(problem.sizes) > 200 and best.size < problem.sizes[-1] / 2  # neither small nor at an end
    assert abs(found.size - best.size) <= 8 and found.utility <= best.utility
    assert found.coverage >= least
    assert tpe(problem, num_trials=30, seed=4) == tpe(problem, num_trials=30, seed=4)


def test_tpe_that_finds_nothing_feasible_says_so():
    problem = real_problem(min_coverage={"real": 0.9999})
    assert exact(problem).coverage >= 0.9999
    assert tpe(problem, num_trials=1, seed=0) is None or tpe(problem, num_trials=1, seed=0).coverage >= 0.9999
    assert tpe(real_problem(min_coverage={"real": 2.0}), num_trials=5, seed=0) is None


def test_the_front_holds_what_nothing_beats():
    problem = real_problem(step=64)
    front = pareto_front(problem)
    points = list(zip(problem.cost_ratio, problem.pooled, strict=True))
    unbeaten = [(cost, covered) for cost, covered in points
                if not any((c <= cost and v > covered) or (c < cost and v >= covered) for c, v in points)]
    assert [(one.cost_ratio, one.coverage) for one in front] == unbeaten and 1 < len(front) < len(points)


def test_equal_domains_are_not_outvoted():
    large, small = np.array([900, 90, 10, 0, 0]), np.array([0, 0, 0, 5, 1])
    assert pool({"large": large, "small": small}, equal_domains=False).argmax() == 0
    equal = pool({"large": large, "small": small}, equal_domains=True)
    assert np.argsort(-equal).tolist() == [0, 3, 4, 1, 2]
    problem = build_problem({"large": large, "small": small}, lambda sizes: sizes + 1.0, always_keep=[],
                            min_coverage={"small": 1.0}, min_size=1, step=1)
    assert exact(problem).size == 5  # its rare token is the last of all


@pytest.mark.parametrize("first, step, sizes", [
    (50, 64, [50, 64, 128, 150]), (64, 64, [64, 128, 150]), (150, 64, [150]), (500, 64, [150]), (1, 100, [1, 100, 150]),
])
def test_the_grid_has_both_ends(first, step, sizes):
    assert grid(150, first=first, step=step).tolist() == sizes


@pytest.mark.parametrize("counts, least, message", [
    ({}, {}, "no data"),
    ({"a": [0, 0, 0]}, {}, "no token was counted in a"),
    ({"a": [1, 0, 0], "b": [0, 0, 0]}, {}, "no token was counted in b"),
    ({"a": [1, 0, 0]}, {"b": 0.5}, "given for b, but the domains are a"),
])
def test_what_cannot_be_trimmed_is_refused(counts, least, message):
    with pytest.raises(ConfigError, match=message):
        build_problem({name: np.array(of) for name, of in counts.items()}, lambda sizes: sizes, always_keep=[],
                      min_coverage=least)

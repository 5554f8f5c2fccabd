"""The accept/replace rule, enumerated exactly, and the distributions it works on."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specvocab_model.sampling import Sampling, count_accepted, next_distribution, verify_greedy, verify_sampled

# Twelfths whose numerators divide 12: on the grid below, u * q < p is then true for exactly the right share of u.
GRID = (torch.arange(12, dtype=torch.float64) + 0.5) / 12


def twelfths(*numerators: int) -> torch.Tensor:
    assert sum(numerators) == 12
    return torch.tensor(numerators, dtype=torch.float64) / 12


TARGET_FIRST = twelfths(5, 4, 3, 0)
DRAFT_FIRST = twelfths(2, 4, 0, 6)  # no mass on token 2, too much on token 3, which the target never emits
TARGET_SECOND = torch.stack([twelfths(1, 1, 4, 6), twelfths(12, 0, 0, 0), twelfths(3, 3, 3, 3), twelfths(0, 6, 6, 0)])
DRAFT_SECOND = torch.stack([twelfths(6, 6, 0, 0), twelfths(0, 0, 0, 12), twelfths(3, 3, 3, 3), twelfths(4, 4, 4, 0)])


def test_one_draft_leaves_the_targets_distribution():
    emitted = torch.zeros(4, dtype=torch.float64)
    target = torch.stack([TARGET_FIRST, torch.full((4,), 0.25, dtype=torch.float64)])
    for x, u in itertools.product(range(4), GRID):
        weight = DRAFT_FIRST[x] / len(GRID)
        if count_accepted(target, DRAFT_FIRST[None], torch.tensor([x]), u[None]):
            emitted[x] += weight
        else:
            emitted += weight * next_distribution(target, DRAFT_FIRST[None], 0)
    torch.testing.assert_close(emitted, TARGET_FIRST, rtol=0, atol=1e-14)


def test_two_drafts_leave_the_targets_joint_distribution():
    joint = torch.zeros(4, 4, dtype=torch.float64)
    third = torch.full((4,), 0.25, dtype=torch.float64)
    for x, y in itertools.product(range(4), repeat=2):
        drafts = torch.tensor([x, y])
        target = torch.stack([TARGET_FIRST, TARGET_SECOND[x], third])
        draft = torch.stack([DRAFT_FIRST, DRAFT_SECOND[x]])
        weight = draft[0, x] * draft[1, y] / len(GRID) ** 2
        if weight == 0:
            continue
        for u, v in itertools.product(GRID, repeat=2):
            accepted = count_accepted(target, draft, drafts, torch.stack([u, v]))
            following = next_distribution(target, draft, accepted)
            if accepted == 0:  # the second token comes from the next round, which is the target's by the test above
                joint += weight * following[:, None] * TARGET_SECOND
            elif accepted == 1:
                joint[x] += weight * following
            else:
                joint[x, y] += weight
                torch.testing.assert_close(following, third)
    torch.testing.assert_close(joint, TARGET_FIRST[:, None] * TARGET_SECOND, rtol=0, atol=1e-14)


def test_equal_distributions_are_always_accepted_and_have_a_next_distribution():
    p = torch.rand(3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    almost_one = torch.full((2,), 1 - 2**-53, dtype=torch.float64)
    assert count_accepted(p, p[:2], torch.tensor([3, 49]), almost_one) == 2
    torch.testing.assert_close(next_distribution(p, p[:2], 0), p[0])  # no residual: not NaN


def test_impossible_drafts_are_rejected_even_at_uniform_zero():
    target = torch.stack([twelfths(12, 0, 0, 0), twelfths(3, 3, 3, 3)])
    draft = twelfths(6, 6, 0, 0)[None]
    assert count_accepted(target, draft, torch.tensor([1]), torch.zeros(1, dtype=torch.float64)) == 0
    torch.testing.assert_close(next_distribution(target, draft, 0), twelfths(12, 0, 0, 0))


def test_verify_sampled_draws_from_the_generator_alone():
    p = torch.rand(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).mul(5).softmax(-1)
    q = p[:3].roll(1, -1)
    drafts = torch.tensor([4, 5, 6])
    draws = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(7)
        draws.append([(n, int(token)) for n, token in (verify_sampled(p, q, drafts, generator) for _ in range(50))])
    assert draws[0] == draws[1]
    assert len({n for n, _ in draws[0]}) > 1


def test_verify_without_drafts_samples_the_target():
    p = twelfths(0, 12, 0, 0)[None]
    accepted, token = verify_sampled(p, p.new_empty(0, 4), torch.empty(0, dtype=torch.int64))
    assert (accepted, token.tolist()) == (0, [1])


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [([3, 1, 2], (3, [0])), ([3, 1, 0], (2, [2])), ([0, 1, 2], (0, [3])), ([3, 0, 2], (1, [1])), ([], (0, [3]))],
)
def test_verify_greedy(drafts: list[int], expected: tuple[int, list[int]]):
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 2, 0]), 5).float()[: len(drafts) + 1]
    accepted, token = verify_greedy(logits, torch.tensor(drafts, dtype=torch.int64))
    assert (accepted, token.tolist()) == expected


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    vocab_size=st.integers(2, 40),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.05, 1.0),
)
def test_probabilities_are_those_of_transformers(seed, vocab_size, temperature, top_k, top_p):
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    warped = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    actual = Sampling(temperature=temperature, top_k=top_k, top_p=top_p).probabilities(logits)
    torch.testing.assert_close(actual, warped.softmax(-1))


@settings(deadline=None, max_examples=100)
@given(
    first=st.integers(-40, 40),
    others=st.lists(st.integers(-40, 40) | st.none(), max_size=60),
    temperature=st.floats(0.1, 3.0),
    top_p=st.floats(0.01, 0.999),
)
def test_a_token_is_kept_if_those_of_larger_logits_have_less_than_top_p(first, others, temperature, top_p):
    """Many equal logits, in eighths, as bf16 targets have them; None is an impossible token."""
    logits = [-math.inf if each is None else each / 8 for each in (first, *others)]
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    in_front = [math.fsum(weight for weight, other in zip(weights, logits, strict=True) if other > logit)
                for logit in logits]
    assume(all(abs(mass / math.fsum(weights) - top_p) > 1e-9 for mass in in_front))  # rounding would decide
    kept = [weight if mass / math.fsum(weights) < top_p else 0.0
            for weight, mass in zip(weights, in_front, strict=True)]
    actual = Sampling(temperature=temperature, top_p=top_p).probabilities(torch.tensor([logits, logits[::-1]]))
    expected = torch.tensor(kept, dtype=torch.float64) / math.fsum(kept)
    torch.testing.assert_close(actual, torch.stack([expected, expected.flip(0)]))
    assert torch.equal(actual > 0, torch.stack([expected, expected.flip(0)]) > 0)


def test_probabilities_of_a_whole_vocabulary_are_those_of_their_fp64_order():
    """As tokens were dropped before: by their places in sorted probabilities. fp32 logits, several rows."""
    logits = torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.01], [1], [3], [9]])
    for top_p in (0.3, 0.95, 0.9999):
        probabilities, order = (logits.double() / 0.7).softmax(-1).sort(descending=True, stable=True)
        probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0
        expected = torch.zeros_like(probabilities).scatter(-1, order, probabilities)
        actual = Sampling(temperature=0.7, top_p=top_p).probabilities(logits)
        changed = ((actual > 0) != (expected > 0)).sum(-1)
        assert changed.max() <= 1, "at most the last token's equals are kept as well"
        torch.testing.assert_close(actual, expected / expected.sum(-1, keepdim=True), rtol=1e-3, atol=1e-9)


def test_probabilities_keep_impossible_tokens_impossible():
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    probabilities = Sampling(temperature=0.5, top_k=3, top_p=0.99).probabilities(logits)
    assert probabilities.dtype == torch.float64
    torch.testing.assert_close(probabilities, torch.tensor([[0.0, -math.inf, 2.0, -math.inf]]).double().softmax(-1))


@pytest.mark.parametrize("wrong", [
    {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": 1e-320},
    {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_p": math.nan},
])
def test_values_outside_their_range_are_refused(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_greedy_has_no_distribution():
    with pytest.raises(ValueError, match="argmax"):
        Sampling().probabilities(torch.zeros(1, 3))

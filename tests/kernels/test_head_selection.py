"""Selection rules, stored order and 8-bit rows of the inference head, against plain Python and float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specvocab_kernels.vocab_head import (
    ExactSelection,
    HeadWeights,
    TileSelection,
    dequantize_vocab_proj,
    quantize_vocab_proj,
)

TIES = st.sampled_from((1, 2, 10**6))  # all equal, two values, (almost) all different


def scores_of(batch, vocab, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(levels, (batch, vocab), generator=generator) / levels - 0.5


def rank(row, ids):
    """Best first, the lowest id among equals, NaN above all."""
    return sorted(ids, key=lambda i: (-math.inf if math.isnan(row[i]) else -row[i], not math.isnan(row[i]), i))


@settings(deadline=None)
@given(batch=st.integers(0, 3), vocab=st.integers(1, 200), k=st.integers(1, 220), levels=TIES, seed=st.integers(0, 99))
def test_exact_selection_is_the_sorted_head_of_the_ranking(batch, vocab, k, levels, seed):
    scores = scores_of(batch, vocab, levels, seed)
    ids = ExactSelection(vocab, k).select(scores)
    assert ids.shape == (batch, min(k, vocab))
    for row, found in zip(scores.tolist(), ids.tolist(), strict=True):
        assert found == sorted(rank(row, range(vocab))[:k])


@settings(deadline=None)
@given(
    batch=st.integers(0, 3),
    vocab=st.integers(1, 200),
    tile=st.sampled_from((1, 2, 16, 64)),
    keep=st.integers(1, 64),
    levels=TIES,
    seed=st.integers(0, 99),
)
def test_tile_selection_keeps_the_best_of_every_residue_class(batch, vocab, tile, keep, levels, seed):
    keep = min(keep, tile)
    selection = TileSelection(vocab, tile, keep)
    scores = scores_of(batch, vocab, levels, seed)
    ids = selection.select(scores)
    assert ids.shape == (batch, selection.num_candidates)
    for row, found in zip(scores.tolist(), ids.tolist(), strict=True):
        tiles = [range(t, vocab, selection.num_tiles) for t in range(selection.num_tiles)]
        assert found == [i for members in tiles for i in rank(row, members)[:keep]]


@pytest.mark.parametrize("selection", [ExactSelection(7, 3), TileSelection(7, 4, 1), TileSelection(7, 8, 8)])
def test_extreme_scores(selection):
    row = [-math.inf, -3e38, -0.0, 0.0, math.nan, -math.inf, math.inf]
    chosen = selection.select(torch.tensor([row, [-math.inf] * 7, [math.nan] * 7]))
    for found in chosen.tolist():
        assert len(set(found)) == len(found) and min(found) >= 0 and max(found) < 7
    assert 4 in chosen[0].tolist()
    if isinstance(selection, ExactSelection):  # zeros of both signs are equal: the lower id wins
        assert chosen.tolist() == [[2, 4, 6], [0, 1, 2], [0, 1, 2]]


@settings(deadline=None)
@given(vocab=st.integers(1, 300), tile=st.sampled_from((1, 2, 16, 64)), keep=st.integers(1, 64))
def test_stored_order(vocab, tile, keep):
    selection = TileSelection(vocab, tile, min(keep, tile))
    rows = torch.randn(vocab, 2)
    stored, ids = selection.arrange(rows), selection.ids_of_rows()
    assert stored.shape == (selection.num_rows, 2) and torch.equal(selection.restore(stored), rows)
    for place, i in enumerate(ids.tolist()):
        assert i == (place % tile) * selection.num_tiles + place // tile
        assert torch.equal(stored[place], rows[i] if i < vocab else torch.zeros(2))


@pytest.mark.parametrize("precision, bits", [("int8", 7), ("fp8", 3)])
def test_quantised_rows_are_within_half_a_step(precision, bits):
    weight = torch.randn(50, 33) * torch.logspace(-30, 30, 50).unsqueeze(1)
    weight[3] = 0
    q, scales = quantize_vocab_proj(weight, precision)
    error = (dequantize_vocab_proj(q, scales).double() - weight.double()).abs()
    largest = weight.double().abs().amax(1, keepdim=True)
    if precision == "int8":
        bound = 0.501 * largest / 127
    else:  # half a unit in the last place, or half the smallest subnormal (2^-9) of the scaled row
        bound = torch.maximum(weight.double().abs() * 2.0 ** -(bits + 1), largest / 448 * 2.0**-10) * 1.001
    assert (error <= bound).all()
    assert q.element_size() == 1 and scales.shape == (50,)
    assert (dequantize_vocab_proj(q, scales)[3] == 0).all()


def build(**changes):
    parts = dict(
        lm_head=torch.zeros(9, 4),
        down_proj=torch.zeros(2, 4),
        vocab_proj=torch.zeros(12, 2),
        selection=TileSelection(9, 4, 1),
        scales=None,
    )
    return HeadWeights(**{**parts, **changes})


BAD_CALLS = {
    "power of two": lambda: TileSelection(9, 3, 1),
    "more than tile": lambda: TileSelection(9, 4, 5),
    "must be at least 1": lambda: ExactSelection(9, 0),
    "a vocab_proj of 9": lambda: build(selection=ExactSelection(9, 3)),
    "a vocab_proj of 12": lambda: build(vocab_proj=torch.zeros(9, 2)),
    "share r": lambda: build(vocab_proj=torch.zeros(12, 3)),
    "lm_head is torch.int8": lambda: build(lm_head=torch.zeros(9, 4, dtype=torch.int8)),
    "has strides": lambda: build(lm_head=torch.zeros(4, 9).t()),
    "is on meta": lambda: build(down_proj=torch.zeros(2, 4, device="meta")),
    "scales belong": lambda: build(scales=torch.ones(12)),
    "scales must be": lambda: build(vocab_proj=torch.zeros(12, 2, dtype=torch.int8), scales=torch.ones(9)),
    "'int4' is not known": lambda: quantize_vocab_proj(torch.zeros(2, 2), "int4"),
    "not finite": lambda: quantize_vocab_proj(torch.full((2, 2), math.inf), "int8"),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_errors(message):
    with pytest.raises(ValueError, match=message):
        BAD_CALLS[message]()

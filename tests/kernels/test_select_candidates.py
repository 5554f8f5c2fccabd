"""select_candidates against a float64 sort."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specvocab_kernels import select_candidates


def assert_largest(scores: torch.Tensor, ids: torch.Tensor, k: int) -> None:
    """Ids unique and in range, and their scores, as a multiset, the k largest of their row."""
    batch, vocab = scores.shape
    assert ids.shape == (batch, min(k, vocab)) and ids.dtype == torch.int64
    assert all(len(set(row)) == len(row) and min(row) >= 0 and max(row) < vocab for row in ids.tolist())
    largest = scores.double().sort(dim=1, descending=True).values[:, :k]
    assert torch.equal(scores.double().gather(1, ids).sort(dim=1, descending=True).values, largest)


@settings(deadline=None)
@given(
    batch=st.integers(0, 4),
    vocab=st.integers(1, 300),
    k=st.integers(1, 320),
    levels=st.sampled_from((1, 2, 10**6)),  # all equal, two values, (almost) all different
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 2**16),
)
def test_largest_scores(device, batch, vocab, k, levels, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randint(levels, (batch, vocab), generator=generator) / levels).to(device, dtype)
    for impl in ("auto", "torch"):
        assert_largest(scores, select_candidates(scores, k, impl=impl), k)


@pytest.mark.parametrize("k", [1, 6, 7, 8])
@pytest.mark.parametrize("descending", [False, True])
def test_sorted_extreme_and_strided_scores(device, k, descending):
    row = torch.tensor([-math.inf, -3e38, -1.0, 0.0, 1.0, 3e38, math.inf], device=device)
    row = row.flip(0) if descending else row
    assert_largest(row.repeat(3, 1), select_candidates(row.repeat(3, 1), k), k)
    spread = torch.stack((row, -row), dim=1).t()  # columns two elements apart
    assert_largest(spread, select_candidates(spread, k), k)


def test_nan_is_selected_first(device):
    scores = torch.arange(40.0, device=device).repeat(2, 1)
    scores[1, (3, 5)] = math.nan
    ids = select_candidates(scores, 4)
    assert [sorted(row) for row in ids.tolist()] == [[36, 37, 38, 39], [3, 5, 38, 39]]


def lowest_ids_of_largest(scores, k):
    ids = range(scores.shape[1])
    return [sorted(sorted(ids, key=lambda i: (-row[i], i))[:k]) for row in scores.tolist()]


@pytest.mark.parametrize("vocab, k", [(1, 1), (300, 1), (300, 299), (300, 300), (300, 301), (5000, 4097)])
@pytest.mark.parametrize("levels", [1, 2, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_takes_the_lowest_ids_of_the_largest(device, vocab, k, levels, dtype):
    generator = torch.Generator().manual_seed(vocab + k)
    scores = (torch.randint(levels, (2, vocab), generator=generator) / levels - 0.5).to(device, dtype)
    ids = select_candidates(scores, k, impl="triton")
    assert ids.tolist() == lowest_ids_of_largest(scores, k)
    assert torch.equal(select_candidates(scores, k, impl="triton"), ids)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_triton_on_sorted_extreme_and_non_finite_scores(device):
    row = torch.tensor([-0.0, 1e-45, math.inf, -math.inf, 3e38, -3e38, 0.0, -math.inf], device=device)
    rows = torch.stack((row, row.sort().values, row.sort(descending=True).values, torch.full_like(row, -math.inf)))
    for k in range(1, 9):
        assert select_candidates(rows, k, impl="triton").tolist() == lowest_ids_of_largest(rows, k)
    rows[1, 6] = -math.nan
    assert select_candidates(rows, 1, impl="triton")[1].tolist() == [6]
    strided = torch.stack((row, -row), dim=1).t()
    assert select_candidates(strided, 3, impl="triton").tolist() == lowest_ids_of_largest(strided, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64])
def test_triton_at_full_size_and_in_a_graph(device, batch):
    scores = torch.randn(batch, 151936, device=device)
    select_candidates(scores, 2048, impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = select_candidates(scores, 2048, impl="triton")
    for values in (torch.randn_like(scores), scores.round(), torch.zeros_like(scores)):
        scores.copy_(values)
        captured.fill_(-1)
        graph.replay()
        assert torch.equal(captured, select_candidates(scores, 2048, impl="triton"))
        largest = scores.topk(2048, dim=1).values
        assert torch.equal(scores.gather(1, captured).sort(dim=1, descending=True).values, largest)
        assert (captured.diff(dim=1) > 0).all()


BAD_CALLS = {
    r"got torch.float32 \[4\]": lambda: select_candidates(torch.zeros(4), 1),
    r"\[2, 0\]": lambda: select_candidates(torch.zeros(2, 0), 1),
    "torch.int64": lambda: select_candidates(torch.zeros(2, 4, dtype=torch.int64), 1),
    "k=0 must be": lambda: select_candidates(torch.zeros(2, 4), 0),
    "got torch.float64": lambda: select_candidates(torch.zeros(2, 4).double(), 1, impl="triton"),
    "not known": lambda: select_candidates(torch.zeros(2, 4), 1, impl="cuda"),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_errors(message):
    with pytest.raises(ValueError, match=message):
        BAD_CALLS[message]()

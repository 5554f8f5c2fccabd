"""Attention of one new token per slot, the kernel and plain torch, against fp64 written out head by head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specvocab_kernels.slot_attention import slot_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # of the norm


def problem(slots, kv_heads, groups, head_dim, bounds, *, capacity=40, dtype=torch.float32, seed=0):
    """Query, keys, values, first, last; NaN in all columns that no slot may look at."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(slots, kv_heads * groups, head_dim, generator=generator)
    keys, values = torch.randn(2, slots, kv_heads, capacity, head_dim, generator=generator)
    first, last = torch.tensor([bounds[slot % len(bounds)] for slot in range(slots)]).unbind(1)
    for slot in range(slots):
        for stored in (keys, values):
            stored[slot, :, : first[slot]] = stored[slot, :, last[slot] + 1 :] = float("nan")
    query, keys, values = (each.to(DEVICE, dtype) for each in (query, keys, values))
    return query, keys, values, first.contiguous().to(DEVICE), last.contiguous().to(DEVICE)


def in_fp64(query, keys, values, first, last, scale):
    out = torch.empty(query.shape, dtype=torch.float64)
    groups = query.shape[1] // keys.shape[1]
    for slot in range(query.shape[0]):
        columns = slice(int(first[slot]), int(last[slot]) + 1)
        for head in range(query.shape[1]):
            own_keys, own_values = (each[slot, head // groups, columns].double().cpu() for each in (keys, values))
            scores = own_keys @ query[slot, head].double().cpu() * scale
            out[slot, head] = scores.softmax(0) @ own_values
    return out


def error(out, tensors, scale) -> float:
    truth = in_fp64(*tensors, scale)
    return float((out.double().cpu() - truth).norm() / truth.norm())


def triton_into_nan(tensors, scale, num_splits=None):
    from specvocab_kernels.slot_attention.kernel import slot_attention_triton

    out = torch.full_like(tensors[0], float("nan"))
    return slot_attention_triton(*tensors, scale, out, num_splits=num_splits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "groups"), [(64, 3), (80, 1), (96, 4), (128, 17), (256, 2), (24, 7)])
def test_every_shape_of_heads(head_dim, groups, dtype, monkeypatch):
    monkeypatch.setattr("specvocab_kernels.slot_attention.kernel.BLOCK_BYTES", 1)  # 16 columns, so several blocks
    tensors = problem(3, 2, groups, head_dim, [(0, 39), (0, 0), (5, 33)], dtype=dtype)
    scale = head_dim**-0.5
    for num_splits in (1, 3):
        assert error(triton_into_nan(tensors, scale, num_splits), tensors, scale) < TOLERANCE[dtype]
    assert error(slot_attention(*tensors, scale, impl="torch"), tensors, scale) < TOLERANCE[dtype]


@settings(max_examples=20, deadline=None)
@given(
    bounds=st.lists(st.tuples(st.integers(0, 69), st.integers(0, 69)).map(sorted).map(tuple), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3), groups=st.integers(1, 3), head_dim=st.integers(1, 20),
    num_splits=st.integers(1, 6), scale=st.sampled_from([0.3, 1.0, 8.0]),
)
def test_any_bounds_split_in_any_way(bounds, kv_heads, groups, head_dim, num_splits, scale):
    tensors = problem(len(bounds), kv_heads, groups, head_dim, bounds, capacity=70)
    for out in (triton_into_nan(tensors, scale, num_splits), slot_attention(*tensors, scale, impl="torch")):
        assert out.isfinite().all()
        assert error(out, tensors, scale) < 1e-5


def test_large_scores_do_not_overflow():
    query, *others = problem(2, 1, 2, 16, [(0, 39)])
    tensors = (query * 1e3, *others)
    assert error(triton_into_nan(tensors, 1.0), tensors, 1.0) < 1e-5


def test_bounds_beyond_the_cache_read_nothing_outside():
    query, keys, values, first, last = problem(2, 1, 2, 16, [(0, 39)])
    out = triton_into_nan((query, keys, values, first - 5, last + 5), 1.0)
    torch.testing.assert_close(out, triton_into_nan((query, keys, values, first, last), 1.0), rtol=0, atol=0)


def test_the_cache_may_be_a_part_of_a_larger_one():
    query, keys, values, first, last = problem(3, 4, 2, 16, [(0, 20), (3, 9)])
    whole = torch.stack([keys, values], dim=3)  # [S, H_kv, C, 2, D]
    tensors = (query, whole[:, 1:3, :30, 0], whole[:, 1:3, :30, 1], first, last)
    tensors = (query[:, :4], *tensors[1:])
    for impl in ("torch", "triton"):
        assert error(slot_attention(*tensors, 0.5, impl=impl), tensors, 0.5) < 2e-6


def test_no_slots_give_nothing():
    query, keys, values, first, last = (each[:0] for each in problem(1, 1, 2, 16, [(0, 1)]))
    for impl in ("torch", "triton"):
        assert slot_attention(query, keys, values, first, last, 1.0, impl=impl).shape == (0, 2, 16)


def test_compiled_code_holds_it_as_one_operation():
    query, keys, values, first, last = problem(3, 2, 2, 16, [(0, 39), (5, 33)])

    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def run(query, keys, values, first, last):
        return slot_attention(query * 2, keys, values, first, last, 0.5) + 1

    expected = slot_attention(query * 2, keys, values, first, last, 0.5) + 1
    torch.testing.assert_close(run(query, keys, values, first, last), expected)


@pytest.mark.parametrize(("change", "message"), [
    ({"query": torch.ones(3, 5, 16)}, "multiple of H_kv"),
    ({"query": torch.ones(3, 4, 8)}, "share S and D"),
    ({"values": torch.ones(3, 2, 40, 8)}, "keys and values"),
    ({"first": torch.zeros(2, dtype=torch.int64)}, "one column a slot"),
    ({"last": torch.zeros(3, dtype=torch.int32)}, "needs int64"),
    ({"query": torch.ones(3, 4, 16, dtype=torch.float16)}, "query is torch.float16"),
    ({"keys": torch.ones(3, 40, 2, 16).transpose(1, 2)}, "have strides"),
])
def test_wrong_arguments_are_refused(change, message):
    names = ("query", "keys", "values", "first", "last")
    arguments = dict(zip(names, problem(3, 2, 2, 16, [(0, 1)]), strict=True))
    change = {name: tensor.to(DEVICE) for name, tensor in change.items()}
    with pytest.raises(ValueError, match=message):
        slot_attention(**{**arguments, **change}, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("slots", [2, 300])  # split, and not
@pytest.mark.parametrize(("head_dim", "groups"), [(64, 3), (80, 1), (96, 4), (128, 8), (256, 4)])
def test_a_graph_on_a_gpu_follows_the_bounds(slots, head_dim, groups, dtype):
    bounds = [(0, 1999), (0, 0), (1000, 1500), (37, 800)]
    query, keys, values, first, last = problem(slots, 3, groups, head_dim, [(0, 0)], capacity=2048, dtype=dtype)
    scale = head_dim**-0.5
    for _ in range(2):
        slot_attention(query, keys, values, first, last, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = slot_attention(query, keys, values, first, last, scale)
    tensors = problem(slots, 3, groups, head_dim, bounds, capacity=2048, dtype=dtype, seed=1)
    for captured, new in zip((query, keys, values, first, last), tensors, strict=True):
        captured.copy_(new)
    out.fill_(float("nan"))
    graph.replay()
    some = slice(0, 8)
    assert out.isfinite().all()
    assert error(out[some], [each[some] for each in tensors], scale) < TOLERANCE[dtype]

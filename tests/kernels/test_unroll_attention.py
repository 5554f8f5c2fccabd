"""Unroll attention: the merge by log-sum-exp against one softmax over all keys, and the kernels against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specvocab_kernels.unroll_attention import Spans, unroll_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOCUMENTS = ((5, 9), (0, 4), (7, 7), (1, 3))  # queries, keys of each


def spans(documents) -> Spans:
    offsets = torch.tensor([[0, 0], *documents], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE)
    queries, keys = (max(lengths) for lengths in zip(*documents, strict=True))
    return Spans(offsets[:, 0].contiguous(), offsets[:, 1].contiguous(), queries, keys)


def problem(documents, num_own, heads, kv_heads, head_dim, *, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_queries, num_keys = (sum(lengths) for lengths in zip(*documents, strict=True))

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype).requires_grad_()

    query = normal(num_queries, heads, head_dim)
    shared = [normal(num_keys, kv_heads, head_dim) for _ in range(2)]
    own = [[normal(num_queries, kv_heads, head_dim) for _ in range(num_own)] for _ in range(2)]
    return query, *shared, *own


def one_softmax(query, key, value, own_keys, own_values, documents):
    """All keys of a query in one row of scores, in the dtype of the arguments."""
    groups = query.shape[1] // key.shape[1]
    key, value, *own = (
        tensor.repeat_interleave(groups, dim=1) for tensor in (key, value, *own_keys, *own_values)
    )
    own_keys, own_values = own[: len(own_keys)], own[len(own_keys) :]
    outs, at, key_at = [], 0, 0
    for num_queries, num_keys in documents:
        for i in range(num_queries):
            last = key_at + num_keys - num_queries + i
            seen_keys = torch.cat([key[key_at : last + 1], *(one[at + i, None] for one in own_keys)])
            seen_values = torch.cat([value[key_at : last + 1], *(one[at + i, None] for one in own_values)])
            scores = torch.einsum("hd,khd->hk", query[at + i], seen_keys) * query.shape[-1] ** -0.5
            outs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), seen_values))
        at, key_at = at + num_queries, key_at + num_keys
    return torch.stack(outs)


def run(function, tensors, *options, **keywords):
    query, key, value, own_keys, own_values = tensors
    out = function(query, key, value, own_keys, own_values, *options, **keywords)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    leaves = [query, key, value, *own_keys, *own_values]
    return [out, *torch.autograd.grad(out, leaves, slope)]


def in_fp64(tensors):
    def convert(item):
        return [convert(one) for one in item] if isinstance(item, list) else item.detach().double().requires_grad_()

    return [convert(item) for item in tensors]


@pytest.mark.parametrize("impl", [
    "torch", pytest.param("triton", marks=pytest.mark.skipif(DEVICE == "cuda", reason="flash attention has no fp32"))
])
@settings(max_examples=15, deadline=None)
@given(
    documents=st.lists(st.integers(0, 6).flatmap(lambda q: st.tuples(st.just(q), st.integers(q + (q == 0), 9))),
                       min_size=1, max_size=4).filter(lambda documents: any(queries for queries, _ in documents)),
    num_own=st.integers(0, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    head_dim=st.integers(1, 20),
)
def test_merging_equals_one_softmax_over_all_keys(impl, documents, num_own, kv_heads, groups, head_dim):
    tensors = problem(documents, num_own, kv_heads * groups, kv_heads, head_dim)
    actual = run(unroll_attention, tensors, spans(documents), impl=impl)
    for one, wanted in zip(actual, run(one_softmax, in_fp64(tensors), documents), strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_own", [0, 1, 6])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(8, 2, 128), (4, 4, 64), (4, 1, 256), (6, 2, 24)])
def test_the_gpu_path_is_as_exact_as_bf16_allows(num_own, heads, kv_heads, head_dim):
    documents = ((150, 300), (0, 70), (129, 129), (1, 200), (0, 5))
    tensors = problem(documents, num_own, heads, kv_heads, head_dim, dtype=torch.bfloat16)
    truth = run(unroll_attention, in_fp64(tensors), spans(documents), impl="torch")
    for one, wanted in zip(run(unroll_attention, tensors, spans(documents)), truth, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.gpu
def test_no_launch_waits_for_the_device():
    tensors, documents = problem(DOCUMENTS, 2, 4, 2, 64, dtype=torch.bfloat16), spans(DOCUMENTS)
    run(unroll_attention, tensors, documents)
    query, key, value, own_keys, own_values = tensors
    torch.cuda.set_sync_debug_mode("error")
    try:
        unroll_attention(query, key, value, own_keys, own_values, documents).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("change, message", [
    ({"key": torch.ones(23, 3, 6)}, "multiple of H_kv"),
    ({"own_keys": []}, "equally many"),
    ({"own_values": [torch.ones(13, 2, 7)]}, "equally many"),
])
def test_wrong_shapes_are_refused(change, message):
    query, key, value, own_keys, own_values = problem(DOCUMENTS, 1, 4, 2, 6)
    arguments = dict(query=query, key=key, value=value, own_keys=own_keys, own_values=own_values)
    with pytest.raises(ValueError, match=message):
        unroll_attention(**{**arguments, **change}, spans=spans(DOCUMENTS))

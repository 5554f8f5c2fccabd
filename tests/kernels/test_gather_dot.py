"""gather_dot against float64, both implementations; the Triton one in the interpreter where there is no GPU."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specvocab_kernels import gather_dot
from specvocab_kernels.gather_dot import reference
from specvocab_kernels.gather_dot.kernel import gather_dot_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IMPLS = ("torch", "triton")


def make_inputs(device, *, batch, vocab, dim, k, dtype=torch.float32, ids_dtype=torch.int64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, dim, generator=generator).to(device, dtype)
    weight = torch.randn(vocab, dim, generator=generator).to(device, dtype)
    ids = torch.randint(vocab, (batch, k), generator=generator).to(device, ids_dtype)
    return hidden, weight, ids


def truth(hidden, weight, ids):
    """The float64 logits and, elementwise, the largest error that float32 sums in any order can make."""
    products = hidden.double().unsqueeze(1) * weight[ids.long()].double()
    return products.sum(-1), (products.shape[-1] + 1) * 2.0**-24 * products.abs().sum(-1)


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(0, 5),
    vocab=st.integers(1, 70),
    dim=st.one_of(st.integers(1, 40), st.sampled_from((511, 512, 513, 1100))),
    k=st.integers(0, 11),
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    ids_dtype=st.sampled_from((torch.int32, torch.int64)),
    seed=st.integers(0, 2**16),
)
def test_error_is_that_of_float32_sums(device, batch, vocab, dim, k, dtype, weight_dtype, ids_dtype, seed):
    shape = dict(batch=batch, vocab=vocab, dim=dim, k=k)
    hidden, weight, ids = make_inputs(device, **shape, dtype=dtype, ids_dtype=ids_dtype, seed=seed)
    weight = weight.to(weight_dtype)
    expected, bound = truth(hidden, weight, ids)
    full_head = torch.nn.functional.linear(hidden.to(weight_dtype), weight).double()
    full_head_error = (full_head.gather(1, ids.long()) - expected).abs()
    for impl in IMPLS:
        logits = gather_dot(hidden, weight, ids, impl=impl)
        assert logits.shape == ids.shape and logits.dtype == torch.float32
        error = (logits.double() - expected).abs()
        assert (error <= bound).all(), impl
        if error.numel():  # never worse than the full head as torch computes it in the weight's dtype
            assert error.max() <= full_head_error.max() + bound.max(), impl


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 4), (5, 13)])
def test_kernel_writes_every_element_and_no_other(device, shape):
    batch, k = shape
    hidden, weight, ids = make_inputs(device, batch=batch, vocab=17, dim=19, k=k)
    guarded = torch.full((batch * k + 64,), torch.nan, device=device)
    out = guarded[: batch * k].view(batch, k)
    assert gather_dot_triton(hidden, weight, ids, out) is out
    assert not out.isnan().any() and guarded[batch * k :].isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_inputs(device, impl):
    hidden, weight, ids = make_inputs(device, batch=6, vocab=20, dim=24, k=10)
    expected = gather_dot(hidden[::2, ::2].contiguous(), weight[::3, 5:17].contiguous(), ids[::2, 1::2] % 7, impl=impl)
    assert torch.equal(gather_dot(hidden[::2, ::2], weight[::3, 5:17], (ids % 7)[::2, 1::2], impl=impl), expected)
    one_hidden_state = hidden[:1].expand(6, -1)
    expected = gather_dot(one_hidden_state.contiguous(), weight, ids, impl=impl)
    assert torch.equal(gather_dot(one_hidden_state, weight, ids, impl=impl), expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_same_bits_on_repeat(device, impl):
    hidden, weight, ids = make_inputs(device, batch=4, vocab=50, dim=700, k=9, dtype=torch.bfloat16)
    first = gather_dot(hidden, weight, ids, impl=impl)
    assert all(torch.equal(gather_dot(hidden, weight, ids, impl=impl), first) for _ in range(5))


def test_blocks_of_the_reference_do_not_change_the_result(device, monkeypatch):
    hidden, weight, ids = make_inputs(device, batch=3, vocab=50, dim=31, k=29)
    whole = gather_dot(hidden, weight, ids, impl="torch")
    for limit in (1, 3 * 31 * 7):
        monkeypatch.setattr(reference, "MAX_GATHERED", limit)
        torch.testing.assert_close(gather_dot(hidden, weight, ids, impl="torch"), whole)


@pytest.mark.parametrize("bad_id", [-1, 17, 2**31 - 1, -(2**31), 2**62])
def test_ids_out_of_range(device, bad_id):
    ids_dtype = torch.int32 if abs(bad_id) <= 2**31 else torch.int64
    hidden, weight, ids = make_inputs(device, batch=2, vocab=17, dim=5, k=6, ids_dtype=ids_dtype)
    ids[1, 4] = bad_id
    outside = torch.zeros(2, 6, dtype=torch.bool, device=device)
    outside[1, 4] = True
    assert torch.equal(gather_dot(hidden, weight, ids, impl="triton").isnan(), outside)
    assert torch.equal(reference.gather_dot_torch(hidden, weight, ids).isnan(), outside)
    with pytest.raises(ValueError, match=str(bad_id)):
        gather_dot(hidden.cpu(), weight.cpu(), ids.cpu(), impl="torch")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter computes masked lanes too: inf · 0
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_values_stay_in_their_rows(device, impl, value):
    hidden, weight, ids = make_inputs(device, batch=3, vocab=8, dim=20, k=5)
    hidden[1, 19] = value
    logits = gather_dot(hidden, weight, ids, impl=impl)
    assert torch.equal(logits.isfinite(), torch.tensor([[True], [False], [True]], device=device).expand(3, 5))


def test_row_offsets_beyond_32_bits(device, tmp_path):
    """A weight of more than 2^32 elements: a sparse file on the CPU (8 GB of address space, a few pages of disk).

    The row lies past element 2^32, so that an offset cut to 32 bits would read zeros inside the buffer.
    """
    dim = 4099
    vocab = 2**32 // dim + 3
    if device.type == "cuda":
        weight = torch.zeros(vocab, dim, dtype=torch.bfloat16, device=device)
    else:
        path = str(tmp_path / "weight")
        weight = torch.from_file(path, shared=True, size=vocab * dim, dtype=torch.bfloat16).view(vocab, dim)
    hidden, row, _ = make_inputs(device, batch=2, vocab=1, dim=dim, k=1, dtype=torch.bfloat16)
    weight[-1] = row[0]
    ids = torch.tensor([[vocab - 1, 0], [vocab - 1, 1]], dtype=torch.int32, device=device)
    expected, bound = truth(hidden, row, torch.zeros_like(ids[:, :1]))
    for impl in IMPLS:
        far, near = gather_dot(hidden, weight, ids, impl=impl).split(1, dim=1)
        assert ((far.double() - expected).abs() <= bound).all(), impl
        assert (near == 0).all(), impl


BAD_CALLS = {
    "needs hidden": lambda h, w, i: gather_dot(h[0], w, i),
    "share d": lambda h, w, i: gather_dot(h[:, :3], w, i),
    "and B with": lambda h, w, i: gather_dot(h[:1], w, i),
    "hidden is torch.float64": lambda h, w, i: gather_dot(h.double(), w, i),
    "weight is torch.int8": lambda h, w, i: gather_dot(h, w.to(torch.int8), i),
    "ids is torch.int16": lambda h, w, i: gather_dot(h, w, i.short()),
    "strides": lambda h, w, i: gather_dot(h, w.t().contiguous().t(), i),
    "requires grad": lambda h, w, i: gather_dot(h, w.clone().requires_grad_(), i),
    "weight on meta": lambda h, w, i: gather_dot(h, w.to("meta"), i),
    "'cuda' is not known": lambda h, w, i: gather_dot(h, w, i, impl="cuda"),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_errors(device, message):
    with pytest.raises(ValueError, match=message):
        BAD_CALLS[message](*make_inputs(device, batch=2, vocab=5, dim=4, k=3))


def test_triton_on_the_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    inputs = make_inputs("cpu", batch=2, vocab=5, dim=4, k=3)
    assert gather_dot(*inputs).shape == (2, 3)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        gather_dot(*inputs, impl="triton")


def test_works_without_triton():
    code = """
import sys; sys.modules["triton"] = None  # makes every import of it fail
import torch
from specvocab_kernels import gather_dot
inputs = torch.ones(1, 2), torch.ones(3, 2), torch.tensor([[2]])
assert gather_dot(*inputs).tolist() == [[2.0]]
try:
    gather_dot(*inputs, impl="triton")
except ValueError as error:
    assert "install it" in str(error), error
else:
    raise AssertionError("impl='triton' ran without triton")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.gpu
def test_cuda_graph_replays_with_new_inputs(device):
    shape = dict(batch=3, vocab=1009, dim=515, k=77, dtype=torch.bfloat16)
    static = make_inputs(device, **shape)
    gather_dot(*static, impl="triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gather_dot(*static, impl="triton")
    for seed in (1, 2):
        fresh = make_inputs(device, **shape, seed=seed)
        for buffer, values in zip(static, fresh, strict=True):
            buffer.copy_(values)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, gather_dot(*fresh, impl="triton"))


@pytest.mark.gpu
def test_hidden_offsets_beyond_32_bits(device):
    batch, dim = 2**31 // 4096 + 5, 4096
    hidden = torch.zeros(batch, dim, dtype=torch.bfloat16, device=device)
    hidden[-1] = 1
    weight = torch.ones(2, dim, dtype=torch.bfloat16, device=device)
    logits = gather_dot(hidden, weight, torch.ones(batch, 1, dtype=torch.int32, device=device), impl="triton")
    assert logits[-1].item() == dim and logits[:-1].abs().max() == 0

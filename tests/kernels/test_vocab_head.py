"""The inference head against float64, both implementations; Triton in the interpreter where there is no GPU."""

import math
import subprocess
import sys

import pytest
import torch
from specvocab_kernels.vocab_head import (
    ExactSelection,
    HeadWeights,
    TileSelection,
    dequantize_vocab_proj,
    vocab_head,
    vocab_head_top_n,
)
from specvocab_kernels.vocab_head.dispatch import full_head_is_faster
from specvocab_kernels.vocab_head.kernel import block_shapes, tile_head

IMPLS = ("torch", "triton")
# dtype of the hidden states and lm_head, precision of vocab_proj, and the relative rounding of one score's terms
PRECISIONS = {
    "fp32": (torch.float32, None, 2.0**-20),
    "bf16": (torch.bfloat16, None, 2.0**-8),
    "fp16": (torch.float16, None, 2.0**-10),
    "fp8": (torch.bfloat16, "fp8", 2.0**-10),
    "int8": (torch.bfloat16, "int8", 2.0**-12),
}
SELECTIONS = {
    "exact": ExactSelection(67, 9),
    "tile": TileSelection(67, 16, 2),
    "all but one": TileSelection(45, 16, 14),
    "all of a tile": TileSelection(35, 16, 16),
    "one tile": TileSelection(11, 16, 3),
}


def make(device, selection, precision="bf16", *, dim=40, rank=12, seed=0):
    dtype, quantized, _ = PRECISIONS[precision]
    generator = torch.Generator().manual_seed(seed)
    lm_head, down_proj, vocab_proj = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((selection.vocab_size, dim), (rank, dim), (selection.vocab_size, rank))
    )
    return HeadWeights.build(lm_head.to(dtype), down_proj, vocab_proj, selection, quantized)


def hidden_states(weights, batch, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, weights.hidden_size, generator=generator).to(weights.lm_head)


def scores_and_error(hidden, weights, relative):
    """Approximate logits ``[B, V]`` in float64, and how far rounding may move each."""
    rows = weights.selection.restore(dequantize_vocab_proj(weights.vocab_proj, weights.scales).double())
    reduced = hidden.double() @ weights.down_proj.double().t()
    largest = reduced.abs().amax(1, keepdim=True)
    return reduced @ rows.t(), relative * (reduced.abs() + largest / 8) @ rows.t().abs()


def check_candidates(ids, hidden, weights, relative, shared=False):
    """Distinct ids in range, in their documented places, none of which a better one should have had."""
    selection = weights.selection
    assert ids.shape == (hidden.shape[0], selection.num_candidates) and ids.dtype == torch.int32
    scores, error = scores_and_error(hidden, weights, relative)
    if shared:
        scores, error = (x.amax(0, keepdim=True).expand(x.shape) for x in (scores, error))
        assert (ids == ids[:1]).all()
    ids = ids.long()
    assert ids.min() >= 0 and ids.max() < selection.vocab_size
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    if isinstance(selection, ExactSelection):
        groups = [(ids, torch.arange(selection.vocab_size))]
        assert (ids.diff(dim=1) > 0).all()
    else:
        starts = [selection.first_candidate(t) for t in range(selection.num_tiles + 1)]
        groups = [
            (ids[:, starts[t] : starts[t + 1]], torch.arange(t, selection.vocab_size, selection.num_tiles))
            for t in range(selection.num_tiles)
        ]
    for chosen, members in groups:
        members = members.to(ids.device)
        assert torch.isin(chosen, members).all()
        cut = scores[:, members].topk(chosen.shape[1], dim=1).values[:, -1:]
        assert (
            scores.gather(1, chosen) >= cut - error.gather(1, chosen) - error[:, members].amax(1, keepdim=True)
        ).all()


def check_logits(ids, logits, hidden, weights, final=lambda x: x):
    terms = hidden.double().unsqueeze(1) * weights.lm_head[ids.long()].double()
    bound = (terms.shape[-1] + 8) * 2.0**-24 * terms.abs().sum(-1) + 1e-6
    assert logits.dtype == torch.float32
    assert ((logits.double() - final(terms.sum(-1))).abs() <= bound).all()


@pytest.mark.parametrize(
    "selection, precision, batch",
    [(s, p, batch) for s in ("exact", "tile") for p in PRECISIONS for batch in (1, 3)]
    + [(s, "bf16", 17) for s in ("exact", "tile")]
    + [(s, "bf16", batch) for s in list(SELECTIONS)[2:] for batch in (1, 3)],
)
def test_candidates_and_logits(device, selection, precision, batch):
    weights = make(device, SELECTIONS[selection], precision)
    hidden = hidden_states(weights, batch)
    for impl in IMPLS:
        ids, logits = vocab_head(hidden, weights, impl=impl)
        check_candidates(ids, hidden, weights, PRECISIONS[precision][2])
        check_logits(ids, logits, hidden, weights)


@pytest.mark.parametrize("selection", ["exact", "tile", "all but one"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_shared_candidates(device, selection, precision):
    weights = make(device, SELECTIONS[selection], precision)
    hidden = hidden_states(weights, 5)
    for impl in IMPLS:
        ids, logits = vocab_head(hidden, weights, shared=True, impl=impl)
        check_candidates(ids, hidden, weights, PRECISIONS[precision][2], shared=True)
        check_logits(ids, logits, hidden, weights)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_candidates_shared_by_more_rows_than_one_block_has(device, precision):
    weights = make(device, SELECTIONS["tile"], precision)
    hidden = hidden_states(weights, 70)
    ids, logits = vocab_head(hidden, weights, shared=True, impl="triton")
    check_candidates(ids, hidden, weights, PRECISIONS[precision][2], shared=True)
    check_logits(ids, logits, hidden, weights)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", "int8"])
@pytest.mark.parametrize("selection", ["exact", "tile"])
@pytest.mark.parametrize("levels", [0, 2])
def test_ties_go_to_the_lowest_id(device, selection, precision, batch, levels):
    """Small integers are exact in every precision: equal scores, two-valued ones and few-valued ones are ties."""
    selection = SELECTIONS[selection]
    generator = torch.Generator().manual_seed(levels)
    dtype, quantized, _ = PRECISIONS[precision]
    rows = torch.randint(-levels, levels + 1, (selection.num_rows, 24), generator=generator).float()
    weights = HeadWeights(
        lm_head=torch.randn(selection.vocab_size, 24, generator=generator).to(device, dtype),
        down_proj=torch.eye(24).to(device, dtype),
        vocab_proj=rows.to(device, {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(quantized, dtype)),
        selection=selection,
        scales=torch.ones(selection.num_rows, device=device) if quantized else None,
    )
    hidden = torch.randint(-1, 2, (batch, 24), generator=generator).to(device, dtype)
    scores = selection.restore(rows.to(device)) @ hidden.float().t()
    expected = selection.select(scores.t().contiguous())
    for impl in IMPLS:
        assert torch.equal(vocab_head(hidden, weights, impl=impl)[0].long(), expected), impl


@pytest.mark.parametrize("batch", [1, 2])
def test_int8_resolves_what_eight_bits_of_the_hidden_state_cannot(device, batch):
    """``down_proj · h`` is (1, 0.003): in 127ths (127, 0.38), which one int8 part would round to (127, 0)."""
    rows = {0: (10, -100), 2: (10, 100), 1: (11, -100), 3: (10, 100)}  # by id; even and odd ids are a tile each
    selection = TileSelection(32, 16, 1)
    vocab_proj = torch.full((32, 4), -100, dtype=torch.int8, device=device)
    vocab_proj[:4, :2] = torch.tensor([rows[i] for i in range(4)], dtype=torch.int8, device=device)
    weights = HeadWeights(
        lm_head=torch.ones(32, 2, device=device),
        down_proj=torch.eye(4, 2, device=device),
        vocab_proj=selection.arrange(vocab_proj),
        selection=selection,
        scales=torch.ones(32, device=device),
    )
    hidden = torch.tensor([[1.0, 0.003]], device=device).expand(batch, 2)
    for impl in IMPLS:
        assert vocab_head(hidden, weights, impl=impl)[0].tolist() == [[2, 1]] * batch, impl


@pytest.mark.parametrize("vocab", [8, 9, 10])
@pytest.mark.parametrize("batch", [1, 2])
def test_as_many_candidates_as_ids(device, vocab, batch):
    for selection in (ExactSelection(vocab, 9), TileSelection(vocab, 16, min(16, vocab)), TileSelection(vocab, 4, 3)):
        weights = make(device, selection)
        hidden = hidden_states(weights, batch)
        ids, logits = vocab_head(hidden, weights, impl="triton")
        check_candidates(ids, hidden, weights, PRECISIONS["bf16"][2])
        check_logits(ids, logits, hidden, weights)
        if selection.num_candidates == vocab:
            assert ids.sort(dim=1).values.tolist() == [list(range(vocab))] * batch


@pytest.mark.parametrize("batch", [1, 18])
@pytest.mark.parametrize("selection", ["tile", "all but one"])
def test_kernel_writes_every_element_and_no_other(device, selection, batch):
    weights = make(device, SELECTIONS[selection])
    size = batch * weights.selection.num_candidates
    ids = torch.full((size + 64,), -1, dtype=torch.int32, device=device)
    logits = torch.full((size + 64,), math.nan, device=device)
    tile_head(hidden_states(weights, batch), weights, ids[:size].view(batch, -1), logits[:size].view(batch, -1))
    assert (ids[:size] >= 0).all() and (ids[size:] == -1).all()
    assert not logits[:size].isnan().any() and logits[size:].isnan().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with the same NaN
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("selection", ["exact", "tile"])
def test_non_finite_hidden_states_show_in_their_logits(device, selection, precision, value):
    weights = make(device, SELECTIONS[selection], precision)
    for batch in (1, 3):
        hidden = hidden_states(weights, batch)
        hidden[-1, 5] = value
        ids, logits = vocab_head(hidden, weights, impl="triton")
        assert ids.min() >= 0 and ids.max() < weights.vocab_size
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        assert not logits[-1].isfinite().any() and logits[:-1].isfinite().all()
        best, log_probs = vocab_head_top_n(hidden, weights, 3, impl="triton")
        assert best.min() >= 0 and best.max() < weights.vocab_size and log_probs[-1].isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("batch", [1, 3])
def test_scale_and_softcap(device, impl, batch):
    weights = make(device, SELECTIONS["tile"])
    hidden = hidden_states(weights, batch)
    ids, logits = vocab_head(hidden, weights, logit_scale=0.25, logit_softcap=3.0, impl=impl)
    check_logits(ids, logits, hidden, weights, final=lambda x: 3 * torch.tanh(x / 12))
    assert torch.equal(ids, vocab_head(hidden, weights, impl=impl)[0])


@pytest.mark.parametrize("selection", ["exact", "tile"])
def test_same_bits_on_repeat_and_strided_hidden_states(device, selection):
    weights = make(device, SELECTIONS[selection])
    spread = hidden_states(weights, 6).repeat_interleave(2, dim=1)
    hidden = spread[::2, ::2]
    first = vocab_head(hidden.contiguous(), weights, impl="triton")
    for _ in range(3):
        again = vocab_head(hidden, weights, impl="triton")
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("impl", (*IMPLS, "full"))
@pytest.mark.parametrize("n", [1, 9])
def test_top_n(device, impl, n):
    weights = make(device, SELECTIONS["exact"])
    hidden = hidden_states(weights, 3)
    ids, logits = vocab_head(hidden, weights, impl=impl)
    best, log_probs = vocab_head_top_n(hidden, weights, n, impl=impl)
    expected = logits.double().log_softmax(1).topk(n, dim=1)
    assert best.dtype == torch.int32 and torch.equal(best.long(), ids.long().gather(1, expected.indices))
    torch.testing.assert_close(log_probs.double(), expected.values, atol=1e-5, rtol=1e-5)


def test_top_n_over_several_chunks_with_ties(device):
    from specvocab_kernels.vocab_head.kernel import top_n_triton

    logits = torch.randint(40, (2, 2500), device=device).float() / 4
    logits[1] = -math.inf
    logits[1, 2400] = 1.0
    ids = torch.arange(2500, dtype=torch.int32, device=device).flip(0).expand(2, -1)
    best, log_probs = top_n_triton(ids, logits, 64)
    order = logits.sort(dim=1, descending=True, stable=True)
    assert torch.equal(best, ids.gather(1, order.indices[:, :64]))
    torch.testing.assert_close(log_probs, logits.log_softmax(1).gather(1, order.indices[:, :64]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("selection", ["exact", "tile"])
def test_no_rows(device, impl, selection):
    weights = make(device, SELECTIONS[selection])
    ids, logits = vocab_head(hidden_states(weights, 0), weights, impl=impl)
    assert ids.shape == logits.shape == (0, weights.selection.num_candidates)
    assert vocab_head_top_n(hidden_states(weights, 0), weights, 2, impl=impl)[0].shape == (0, 2)


def test_full_head_lists_every_id(device):
    weights = make(device, SELECTIONS["tile"])
    hidden = hidden_states(weights, 2)
    ids, logits = vocab_head(hidden, weights, impl="full")
    assert ids.tolist() == [list(range(67))] * 2
    torch.testing.assert_close(logits.double(), hidden.double() @ weights.lm_head.double().t(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("rank", [21, 72, 100, 320])
def test_ranks_that_are_no_power_of_two(device, precision, rank):
    weights = make(device, SELECTIONS["one tile"], precision, rank=rank)
    for batch in (1, 2):
        hidden = hidden_states(weights, batch)
        ids, logits = vocab_head(hidden, weights, impl="triton")
        check_candidates(ids, hidden, weights, PRECISIONS[precision][2])
        check_logits(ids, logits, hidden, weights)


@pytest.mark.parametrize("rank", [72, 320])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("columns, parts", [(64, 1), (64, 4), (256, 2)])
def test_rows_read_in_pieces_of_columns(device, precision, rank, columns, parts):
    weights = make(device, TileSelection(31, 16, 2), precision, rank=rank)
    check_block_shapes(weights, hidden_states(weights, 1), False, one=dict(COLUMNS=columns, PARTS=parts))


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("batch", [9, 70])
@pytest.mark.parametrize("per_multiprocessor", [1, 30])
def test_unions_in_one_list(device, precision, batch, per_multiprocessor):
    """Programs that rescore several times, or find nothing to do."""
    weights = make(device, TileSelection(150, 16, 2), precision)
    rescore = dict(SLOTS=16, BLOCK_D=32, STAGES=3, num_warps=4, PER_MULTIPROCESSOR=per_multiprocessor)
    check_block_shapes(weights, hidden_states(weights, batch), False, rescore=rescore)


def check_block_shapes(weights, hidden, shared, one=None, rescore=None):
    shapes = block_shapes(weights, hidden.shape[0], shared)
    config = {"rescore": rescore} if rescore else {"one": shapes["one"] | one}
    ids = torch.full((hidden.shape[0], weights.selection.num_candidates), -1, dtype=torch.int32, device=hidden.device)
    logits = torch.full(ids.shape, math.nan, device=ids.device)
    tile_head(hidden, weights, ids, logits, shared=shared, config=config)
    precision = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}.get(weights.vocab_proj.dtype, "bf16")
    check_candidates(ids, hidden, weights, PRECISIONS[precision][2], shared=shared)
    check_logits(ids, logits, hidden, weights)


@pytest.mark.gpu
def test_candidates_never_takes_the_full_head(device):
    weights = make(device, TileSelection(600, 64, 1))
    hidden = hidden_states(weights, 300)
    assert vocab_head(hidden, weights)[0].shape[1] == 600
    ids, logits = vocab_head(hidden, weights, impl="candidates")
    expected = vocab_head(hidden, weights, impl="triton")
    assert torch.equal(ids, expected[0]) and torch.equal(logits, expected[1])


def test_auto_takes_the_full_head_for_many_rows_only():
    weights = make("cpu", TileSelection(600, 64, 1))
    taken = [full_head_is_faster(weights, hidden_states(weights, batch)) for batch in (1, 10, 11, 300)]
    assert taken == [False, False, True, True]
    sparse = make("cpu", TileSelection(600, 256, 1))
    assert [full_head_is_faster(sparse, hidden_states(sparse, batch)) for batch in (16, 17)] == [False, True]
    assert vocab_head(hidden_states(weights, 300), weights)[0].shape[1] == weights.selection.num_candidates  # a CPU


BAD_CALLS = {
    "needs hidden": lambda w, h: vocab_head(h[0], w),
    "hidden is torch.float64": lambda w, h: vocab_head(h.double(), w),
    "hidden is on meta": lambda w, h: vocab_head(h.to("meta"), w),
    "requires grad": lambda w, h: vocab_head(h.float().requires_grad_(), w),
    "must be positive": lambda w, h: vocab_head(h, w, logit_softcap=0.0),
    "'cuda' is not known": lambda w, h: vocab_head(h, w, impl="cuda"),
    "n=0 must lie": lambda w, h: vocab_head_top_n(h, w, 0),
    "n=11 must lie": lambda w, h: vocab_head_top_n(h, w, 11),
    "too large": lambda w, h: vocab_head(h, make(h.device, TileSelection(9, 2048, 1)), impl="triton"),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_errors(device, message):
    weights = make(device, SELECTIONS["tile"])
    with pytest.raises(ValueError, match=message):
        BAD_CALLS[message](weights, hidden_states(weights, 2))


def test_works_without_triton():
    code = """
import sys; sys.modules["triton"] = None  # makes every import of it fail
import torch
from specvocab_kernels.vocab_head import HeadWeights, TileSelection, vocab_head, vocab_head_top_n
weights = HeadWeights.build(torch.eye(8), torch.eye(8), torch.eye(8), TileSelection(8, 4, 1))
assert vocab_head(torch.eye(8)[5:6], weights)[0].tolist() == [[0, 5]]
assert vocab_head_top_n(torch.eye(8)[5:6], weights, 1)[0].tolist() == [[5]]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 10, 64])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("selection", [ExactSelection(151936, 2048), TileSelection(151936, 128, 2)])
def test_full_size(device, selection, precision, batch):
    weights = make(device, selection, precision, dim=4096, rank=256)
    hidden = hidden_states(weights, batch)
    ids, logits = vocab_head(hidden, weights, impl="triton")
    scores, _ = scores_and_error(hidden, weights, PRECISIONS[precision][2])
    expected = selection.select(scores.float())
    agreeing = torch.zeros(batch, 151936, dtype=torch.bool, device=device).scatter_(1, expected, True)
    different = ~agreeing.gather(1, ids.long())
    assert different.float().mean() < 0.02
    assert all(len(set(row)) == len(row) for row in ids.tolist()) and ids.min() >= 0 and ids.max() < 151936
    exact = torch.stack([weights.lm_head[i.long()].double() @ row.double() for row, i in zip(hidden, ids, strict=True)])
    torch.testing.assert_close(logits.double(), exact, atol=2e-3, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 10, 64, 200])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("selection", [ExactSelection(9001, 300), TileSelection(9001, 64, 2)])
def test_cuda_graph_replays_with_new_inputs(device, selection, shared, batch):
    weights = make(device, selection, "fp8", dim=576, rank=72)
    static = hidden_states(weights, batch)

    def both():
        return (
            *vocab_head(static, weights, shared=shared, impl="triton"),
            *vocab_head_top_n(static, weights, 10, shared=shared, impl="triton"),
        )

    both()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for seed in (2, 3):
        static.copy_(hidden_states(weights, batch, seed))
        for tensor in captured:
            tensor.fill_(-1)
        for _ in range(3):
            graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, both(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
def test_offsets_beyond_32_bits(device, batch):
    """``lm_head`` of more than 2^32 elements and ``vocab_proj`` of more than 2^31; the best ids are the last ones."""
    dim, rank, vocab = 4096, 2048, 2**20 + 5000
    selection = TileSelection(vocab, 128, 1)
    lm_head = torch.zeros(vocab, dim, dtype=torch.bfloat16, device=device)
    vocab_proj = torch.zeros(selection.num_rows, rank, dtype=torch.int8, device=device)
    last_tile = torch.arange(selection.num_tiles - 1, vocab, selection.num_tiles)
    lm_head[last_tile[-1]] = 1
    vocab_proj[selection.ids_of_rows().tolist().index(int(last_tile[-1]))] = 1
    weights = HeadWeights(
        lm_head=lm_head,
        down_proj=torch.eye(rank, dim, dtype=torch.bfloat16, device=device),
        vocab_proj=vocab_proj,
        selection=selection,
        scales=torch.ones(selection.num_rows, device=device),
    )
    ids, logits = vocab_head(torch.ones(batch, dim, dtype=torch.bfloat16, device=device), weights, impl="triton")
    assert (ids[:, -1] == last_tile[-1]).all() and (logits[:, -1] == dim).all() and (logits[:, :-1] == 0).all()
    assert torch.equal(ids[0, :-1].cpu().long(), torch.arange(selection.num_tiles - 1))

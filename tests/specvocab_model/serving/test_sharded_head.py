"""Ranks that each hold a part of the vocabulary, against the definition in fp64 and against one rank with all of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specvocab_kernels.vocab_head import ExactSelection, TileSelection
from torch import Tensor

from specvocab_model.config import ConfigError
from specvocab_model.serving.sharded_head import ShardedHead, shard_speculator
from specvocab_model.speculator import VocabSpeculator
from tests.tiny import tile_candidates

HIDDEN, RANK, ROWS = 24, 6, 5
SELECTIONS = {"tile": lambda v: TileSelection(v, 8, 2), "exact": lambda v: ExactSelection(v, 9)}


class World:
    """Ranks in one process: a gather is answered with what every rank has sent."""

    def __init__(self, selection: str, vocab_size: int, sizes: list[int], quantization: str | None = None, **options):
        generator = torch.Generator().manual_seed(vocab_size)
        self.lm_head = torch.randn(vocab_size, HIDDEN, generator=generator)
        self.hidden = torch.randn(ROWS, HIDDEN, generator=generator)
        self.speculator = VocabSpeculator(HIDDEN, RANK, SELECTIONS[selection](vocab_size))
        self.speculator.initialise("random", self.lm_head, generator=generator)
        if quantization is not None:
            self.speculator.quantize(quantization)
        self.first_ids = [sum(sizes[:rank]) for rank in range(len(sizes))]
        self.shards = list(self.lm_head.split(sizes))
        self.heads = [ShardedHead(self.speculator, first, shard, **options)
                      for first, shard in zip(self.first_ids, self.shards, strict=True)]

    def greedy_tokens(self) -> list[Tensor]:
        sent: list[Tensor] = []
        for head, shard in zip(self.heads, self.shards, strict=True):
            head.greedy_tokens(self.hidden, shard, lambda pair: sent.append(pair) or pair)
        everything = torch.cat(sent, dim=-1)
        return [head.greedy_tokens(self.hidden, shard, lambda pair: everything)
                for head, shard in zip(self.heads, self.shards, strict=True)]

    def dense_logits(self) -> Tensor:
        parts = [head.dense_logits(self.hidden, shard, len(shard), torch.float32)
                 for head, shard in zip(self.heads, self.shards, strict=True)]
        return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("selection", SELECTIONS)
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_every_rank_gives_the_best_of_all_ranks_candidates(selection, sizes):
    world = World(selection, sum(sizes), sizes)
    scores = world.speculator(world.hidden).double()
    logits = world.hidden.double() @ world.lm_head.double().T
    expected = torch.full_like(logits, -torch.inf)
    for first, size in zip(world.first_ids, sizes, strict=True):
        for row in range(ROWS):
            shard = scores[row, first : first + size].tolist()
            if selection == "tile":
                chosen = tile_candidates(shard, -(-size // 8), 2)
            else:
                chosen = set(sorted(range(size), key=lambda i: -shard[i])[:9])
            ids = [first + i for i in chosen]
            expected[row, ids] = logits[row, ids]
    torch.testing.assert_close(world.dense_logits().double(), expected, rtol=1e-5, atol=1e-5)
    for tokens in world.greedy_tokens():
        assert tokens.dtype == torch.int64 and torch.equal(tokens, expected.argmax(-1))


@pytest.mark.parametrize("quantization", [None, "fp8", "int8"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_one_rank_is_the_head_itself(selection, quantization):
    world = World(selection, 77, [77], quantization)
    ids, logits = world.heads[0].candidates(world.hidden, world.lm_head)
    expected = world.speculator.selection.select(world.speculator(world.hidden)).int()
    assert torch.equal(ids.sort(1).values, expected.sort(1).values)
    ids = ids.long()
    exact = (world.hidden.double() @ world.lm_head.double().T).gather(1, ids)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    tokens = world.heads[0].greedy_tokens(world.hidden, world.lm_head)
    assert torch.equal(tokens, ids.gather(1, exact.argmax(1, keepdim=True))[:, 0])


@pytest.mark.parametrize("quantization", [None, "fp8", "int8"])
def test_candidates_of_an_exact_selection_contain_those_of_one_rank(quantization):
    whole, halves = (World("exact", 90, sizes, quantization) for sizes in ([90], [50, 40]))
    kept = halves.dense_logits().isfinite()
    assert (kept | ~whole.dense_logits().isfinite()).all() and kept.sum() == ROWS * 18


def test_the_lowest_rank_wins_among_equals():
    world = World("exact", 40, [20, 20])
    world.lm_head[:] = world.lm_head[0]  # the shards are views of it
    assert all((tokens < 20).all() for tokens in world.greedy_tokens())


def test_scale_and_cap_are_the_targets_and_padding_stays_out():
    world = World("tile", 33, [33], logit_scale=0.5, logit_softcap=3.0)
    dense = world.heads[0].dense_logits(world.hidden, world.lm_head, 64, torch.bfloat16)
    assert dense.shape == (ROWS, 64) and dense.dtype == torch.bfloat16 and dense[:, 33:].eq(-torch.inf).all()
    exact = 3 * torch.tanh((world.hidden.double() @ world.lm_head.double().T) * 0.5 / 3)
    kept = dense[:, :33].isfinite()
    torch.testing.assert_close(dense[:, :33][kept].double(), exact[kept], rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize(("first_id", "num_rows"), [(0, 0), (70, 8), (77, 1)])
def test_ids_that_do_not_exist_are_refused(first_id, num_rows):
    speculator = VocabSpeculator(HIDDEN, RANK, ExactSelection(77, 9))
    with pytest.raises(ConfigError, match=rf"{num_rows} ids from {first_id} on .* vocabulary of 77; use fewer ranks"):
        shard_speculator(speculator, first_id, num_rows)


def test_a_quantised_lm_head_is_refused():
    speculator = VocabSpeculator(HIDDEN, RANK, ExactSelection(77, 9))
    with pytest.raises(ConfigError, match=r"lm_head is stored as torch\.int8.*whose lm_head is not quantised"):
        ShardedHead(speculator, 0, torch.zeros(77, HIDDEN, dtype=torch.int8))


@pytest.mark.parametrize("call", [lambda head, *inputs: head.greedy_tokens(*inputs),
                                  lambda head, *inputs: head.dense_logits(*inputs, 77, torch.float32)])
def test_a_quantised_lm_head_that_is_shared_later_is_refused(call):
    """Engines build a draft with a placeholder and put the target's in its place afterwards."""
    world = World("exact", 77, [77])
    with pytest.raises(ConfigError, match=r"stored as torch\.float8_e4m3fn"):
        call(world.heads[0], world.hidden, world.lm_head.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("sizes", [[77], [40, 37]])
def test_where_all_of_lm_head_is_faster_every_token_is_a_candidate(sizes):
    world = World("tile", 77, sizes, impl="full")
    logits = world.hidden @ world.lm_head.T
    torch.testing.assert_close(world.dense_logits(), logits)
    assert all(torch.equal(tokens, logits.argmax(-1)) for tokens in world.greedy_tokens())
    ids = world.heads[0].candidates(world.hidden, world.shards[0])[0]
    assert ids.untyped_storage().nbytes() == 4 * sizes[0]  # one row for all, not one for each


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 6, 32])
@pytest.mark.parametrize("selection", [TileSelection(9001, 64, 2), ExactSelection(9001, 300)])
def test_a_cuda_graph_replays_both_ways_with_new_inputs_and_another_lm_head(selection, batch):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    speculator = VocabSpeculator(576, 72, selection).cuda()
    own, shared, static = random(9001, 576), random(9001, 576), random(batch, 576)
    head = ShardedHead(speculator, 0, own, impl="triton")

    def both() -> tuple[Tensor, Tensor]:
        return (head.greedy_tokens(static, shared, lambda pair: pair),
                head.dense_logits(static, shared, 9024, torch.bfloat16))

    both()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(2):
        static.copy_(random(batch, 576))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, both(), strict=True))

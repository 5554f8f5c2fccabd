"""The parts of the decode engine against hand-made trees, loops and a brute-force tree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specvocab_model.engine import EAGLE2, DraftShape
from specvocab_model.engine.attention import additive, attend, column_positions, tree_visible
from specvocab_model.engine.cache import StaticCache
from specvocab_model.engine.drafting import Tree, ancestors_of
from specvocab_model.engine.shapes import width_for
from specvocab_model.engine.verification import accepted_path, choices_agree, draws_agree, next_of_chain
from specvocab_model.heads import HeadOutput
from specvocab_model.heads.base import Head
from specvocab_model.sampling import count_accepted, draw, next_distribution

#       0
#      / \
#     1   2
#    / \   \
#   3   4   5
#       |
#       6
PARENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 4]])
DEPTHS = torch.tensor([[0, 1, 1, 2, 2, 2, 3]])


def random_parents(seed: int, num_nodes: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    parents = [0] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, num_nodes)]
    return torch.tensor([parents])


def path_to(parents: Tensor, node: int) -> list[int]:
    """From the root down."""
    path = [node]
    while path[-1] != 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


def test_shapes_count_their_nodes():
    assert (EAGLE2.num_drafts, EAGLE2.num_nodes, EAGLE2.num_expanded) == (60, 710, 70)
    chain = DraftShape(7)
    assert chain.is_chain and (chain.num_drafts, chain.num_nodes, chain.num_expanded) == (7, 7, 6)
    plain = DraftShape(0)
    assert (plain.num_drafts, plain.num_nodes, plain.num_expanded) == (0, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1,), "depth=-1"), ((2, 0), "top_k=0"), ((3, 1, 4), "a chain of depth=3"), ((3, 2), "num_tokens=None"),
     ((3, 2, 2), "num_tokens=2 must lie between depth=3"), ((3, 2, 11), "and the 10 nodes")],
)
def test_shapes_that_make_no_sense_are_refused(arguments: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        DraftShape(*arguments)


@given(needed=st.integers(1, 20_000))
def test_widths_are_few_and_hold_what_is_asked(needed: int):
    width = width_for(needed, 1 << 20)
    assert width >= needed and width % 64 == 0
    assert width == 256 or width <= 1.5 * needed
    assert width_for(needed, 320) <= 320


@given(seed=st.integers(0, 10_000), num_nodes=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_ancestors_are_those_of_a_walk(seed: int, num_nodes: int):
    parents = random_parents(seed, num_nodes)
    paths = [path_to(parents[0], node) for node in range(num_nodes)]
    depth = max(map(len, paths)) - 1
    expected = torch.zeros(1, num_nodes, num_nodes, dtype=torch.bool)
    for node, path in enumerate(paths):
        expected[0, node, path] = True
    assert torch.equal(ancestors_of(parents, depth), expected)


def test_a_chain_is_a_tree():
    chain = Tree.chain(2, 4, sampled_vocab_size=0, device=torch.device("cpu"))
    assert torch.equal(ancestors_of(chain.parents, 4), chain.ancestors)
    assert torch.equal(chain.ancestors.sum(-1) - 1, chain.depths)


def test_a_node_sees_the_text_and_its_ancestors():
    lengths, width = torch.tensor([3, 0]), 12
    visible = tree_visible(lengths, ancestors_of(PARENTS, 3).expand(2, -1, -1), width)
    positions = column_positions(lengths, DEPTHS.expand(2, -1), width)
    for row, length in enumerate(lengths.tolist()):
        for node in range(7):
            path = path_to(PARENTS[0], node)
            seen = visible[row, node].nonzero()[:, 0].tolist()
            assert seen == list(range(length)) + [length + other for other in sorted(path)]
            assert sorted(positions[row, seen].tolist()) == list(range(length + len(path)))


@pytest.mark.parametrize("groups", [1, 3])
def test_grouped_attention_is_attention(groups: int):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2 * groups, 7, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 12, 8, generator=generator, dtype=torch.float64)
    visible = tree_visible(torch.tensor([3, 5]), ancestors_of(PARENTS, 3), 12)
    output = attend(query, key, value, additive(visible, torch.float64, groups), scale=0.4)
    for head in range(2 * groups):
        scores = 0.4 * query[:, head] @ key[:, head // groups].mT
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        torch.testing.assert_close(output[:, head], weights @ value[:, head // groups])


@given(seed=st.integers(0, 10_000), limit=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_the_accepted_path_is_that_of_a_walk(seed: int, limit: int):
    """Children get different tokens; the walk follows the target's choices."""
    num_nodes, vocab_size = 12, 6
    generator = torch.Generator().manual_seed(seed)
    parents = [0]
    for i in range(1, num_nodes):  # no node has more children than there are tokens
        free = [node for node in range(i) if parents[1:].count(node) < 4]
        parents.append(free[int(torch.randint(0, len(free), (1,), generator=generator))])
    tokens = [0] * num_nodes
    for node in range(num_nodes):
        children = [child for child in range(1, num_nodes) if parents[child] == node]
        ids = torch.randperm(vocab_size, generator=generator)[: len(children)].tolist()
        for child, token in zip(children, ids, strict=True):
            tokens[child] = token
    choices = torch.randint(0, vocab_size, (1, num_nodes), generator=generator)

    expected = [0]
    while len(expected) <= limit:
        following = [child for child in range(1, num_nodes)
                     if parents[child] == expected[-1] and tokens[child] == choices[0, expected[-1]]]
        if not following:
            break
        expected += following

    ids, above = torch.tensor([tokens]), torch.tensor([parents])
    ancestors = ancestors_of(above, num_nodes)
    agree = choices_agree(ids, above, choices)
    path, num_accepted = accepted_path(agree, ancestors, ancestors.sum(-1) - 1, torch.tensor([limit]), 6)
    assert int(num_accepted) == len(expected) - 1
    assert path[0, : len(expected)].tolist() == expected


@given(seed=st.integers(0, 10_000), limit=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_a_sampled_chain_is_judged_as_by_the_plain_rule(seed: int, limit: int):
    generator = torch.Generator().manual_seed(seed)
    num_drafts, vocab_size = 4, 5
    target = torch.randn(1, num_drafts + 1, vocab_size, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    drafts = torch.randn(1, num_drafts, vocab_size, generator=generator, dtype=torch.float64).softmax(-1)
    ids = torch.multinomial(drafts[0], 1, generator=generator)[:, 0]
    uniforms = torch.rand(1, num_drafts + 1, generator=generator, dtype=torch.float64)
    chain = Tree.chain(1, num_drafts, sampled_vocab_size=0, device=torch.device("cpu"))
    chain.token_ids[0, 1:] = ids
    limits = torch.tensor([limit])

    agree = draws_agree(chain.token_ids, target, drafts, uniforms[:, :-1])
    path, num_accepted = accepted_path(agree, chain.ancestors, chain.depths, limits, num_drafts + 1)
    following = next_of_chain(target, drafts, num_accepted, limits, uniforms[:, -1])

    judged = slice(0, limit)
    expected = count_accepted(target[0, : limit + 1], drafts[0, judged], ids[judged], uniforms[0, judged])
    assert int(num_accepted) == expected
    assert path[0, : expected + 1].tolist() == list(range(expected + 1))
    left = next_distribution(target[0, : limit + 1], drafts[0, judged], expected)
    assert int(following) == int(draw(left, uniforms[0, -1]))


def test_drawing_follows_the_weights():
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0], dtype=torch.float64)
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = draw(weights.expand(1000, -1), uniforms).bincount(minlength=5)
    assert counts.tolist() == [0, 250, 0, 750, 0]
    edges = torch.tensor([0.0, 1 - 2**-53, 1 - 2**-53], dtype=torch.float64)
    tiny = weights * torch.tensor(5e-324, dtype=torch.float64)
    assert draw(torch.stack([weights, weights, tiny]), edges).tolist() == [1, 3, 3]


def test_compaction_moves_a_path_in_all_layers():
    cache = StaticCache([False, True], batch_size=2, num_heads=3, num_columns=16, head_dim=4, like=torch.zeros(()))
    cache.stored.copy_(torch.arange(16.0)[:, None] + 100 * torch.arange(2.0)[:, None, None, None])
    lengths, path = torch.tensor([5, 2]), torch.tensor([[0, 1, 4, 6], [0, 2, 5, 9]])
    cache.compact(lengths[:, None] + path, lengths)
    for row, expected in enumerate([[0, 1, 2, 3, 4, 5, 6, 9, 11], [100, 101, 102, 104, 107, 111, 106, 107]]):
        for layer in cache.layers:
            for stored in (layer.keys, layer.values):
                for head in range(3):
                    assert stored[row, head, : len(expected), 0].tolist() == expected


def test_the_best_tokens_of_a_head_are_target_ids():
    class Three(Head):
        def __call__(self, hidden: Tensor) -> HeadOutput:
            return HeadOutput(torch.tensor([[7, 2, 9]], dtype=torch.int32).expand(len(hidden), -1), hidden)

    ids, log_probs = Three().top_n(torch.tensor([[0.0, 2.0, 1.0]]), 2)
    assert ids.tolist() == [[2, 9]]
    torch.testing.assert_close(log_probs, torch.tensor([[0.0, 2.0, 1.0]]).log_softmax(-1)[:, [1, 2]])

from __future__ import annotations

import numpy as np
import pytest
import torch
from specvocab_kernels.vocab_head import ExactSelection, TileSelection

from specvocab_model.config import ConfigError, HeadConfig
from specvocab_model.speculator import (
    VocabSpeculator,
    build_selection,
    candidate_rule,
    collect_final_hidden,
    principal_directions,
)
from specvocab_model.speculator_files import write_speculator
from tests.tiny import tiny_target

HIDDEN, VOCAB = 24, 97


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def lm_head(generator) -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=generator)


@pytest.fixture
def states(generator) -> torch.Tensor:
    """Hidden states as real ones are: far from centred, most of their energy in few directions."""
    spectrum = 2.0 ** -torch.arange(HIDDEN, dtype=torch.float32)
    rotation = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator)).Q
    return (torch.randn(400, HIDDEN, generator=generator) * spectrum + 0.3) @ rotation


def recall(speculator: VocabSpeculator, lm_head: torch.Tensor, states: torch.Tensor) -> float:
    wanted = (states @ lm_head.T).argmax(-1, keepdim=True)
    return (speculator.selection.select(speculator(states)) == wanted).any(-1).double().mean().item()


def test_principal_directions_are_numpys_right_singular_vectors(states):
    directions = principal_directions([states], 5)
    expected = np.linalg.svd(states.double().numpy(), full_matrices=False)[2][:5]
    signs = np.sign(np.take_along_axis(expected, np.abs(expected).argmax(-1)[:, None], -1))
    np.testing.assert_allclose(directions.numpy(), expected * signs, atol=1e-10)
    assert (directions.gather(-1, directions.abs().argmax(-1, keepdim=True)) > 0).all()


def test_a_stream_of_states_is_the_same_as_all_at_once(states, lm_head):
    whole, streamed = (VocabSpeculator(HIDDEN, 6, ExactSelection(VOCAB, 10)) for _ in range(2))
    whole.initialise("calibration", lm_head, states)
    streamed.initialise("calibration", lm_head, (chunk for chunk in states.split(7)))
    torch.testing.assert_close(streamed.state_dict(), whole.state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["calibration", "svd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_rank_gives_the_exact_logits(method, dtype, states, lm_head):
    speculator = VocabSpeculator(HIDDEN, HIDDEN, ExactSelection(VOCAB, 10))
    speculator.initialise(method, lm_head.to(dtype), states.to(dtype))
    expected = states @ lm_head.to(dtype).float().T
    torch.testing.assert_close(speculator(states), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["calibration", "svd", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_it_is_what_it_is_untied(method, dtype, states, lm_head):
    """Also after a change of W: every id is scored by its own row of lm_head, on the reconstructed state."""
    lm_head = lm_head.to(dtype)
    tied = VocabSpeculator(HIDDEN, 5, ExactSelection(VOCAB, 10))
    tied.tie()
    tied.initialise(method, lm_head, states, torch.Generator().manual_seed(0))
    tied.vocab_proj.up_proj.weight.data.mul_(1.5).add_(0.1)
    up_proj = tied.vocab_proj.up_proj.weight.detach().clone()
    reconstructed = states.double() @ tied.down_proj.weight.double().T @ up_proj.double().T
    _, product = tied.factors(lm_head)
    assert product.dtype == dtype and product.shape == (VOCAB, 5)

    tied.untie(lm_head)
    assert {name: tuple(value.shape) for name, value in tied.state_dict().items()} == {
        "down_proj.weight": (5, HIDDEN), "vocab_proj.weight": (VOCAB, 5)}
    torch.testing.assert_close(tied(states).double(), reconstructed @ lm_head.double().T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(product.float(), tied.vocab_proj.weight.detach(), rtol=0, atol=0.05)
    before = tied.vocab_proj.weight.detach().clone()
    tied.untie(lm_head)
    assert torch.equal(tied.vocab_proj.weight, before)


@pytest.mark.parametrize("method", ["calibration", "svd"])
def test_tied_it_starts_where_the_free_one_starts(method, states, lm_head):
    tied, free = (VocabSpeculator(HIDDEN, 5, ExactSelection(VOCAB, 10)) for _ in range(2))
    tied.tie()
    for speculator in (tied, free):
        speculator.initialise(method, lm_head, states)
    tied.untie(lm_head)
    torch.testing.assert_close(tied.state_dict(), free.state_dict())


def test_the_gradient_of_w_is_that_of_vocab_proj_through_the_product(lm_head):
    speculator = VocabSpeculator(HIDDEN, 5, ExactSelection(VOCAB, 10))
    speculator.tie()
    speculator.initialise("svd", lm_head)
    upstream = torch.randn(VOCAB, 5, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):  # training's, which must not round the product of an fp32 lm_head
        product = speculator.factors(lm_head)[1]
    product.backward(upstream)
    expected = lm_head.double().T @ upstream.double()
    torch.testing.assert_close(speculator.vocab_proj.up_proj.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_product_for_an_fp16_lm_head_is_fp32(lm_head):
    speculator = VocabSpeculator(HIDDEN, 5, ExactSelection(VOCAB, 10))
    speculator.tie()
    speculator.initialise("svd", lm_head.half())
    speculator.factors(lm_head.half())[1].sum().mul(1e-12).backward()
    assert (speculator.vocab_proj.up_proj.weight.grad != 0).all()


def test_a_tied_one_is_neither_rounded_nor_written(lm_head, tmp_path):
    speculator = VocabSpeculator(HIDDEN, 5, ExactSelection(VOCAB, 10))
    speculator.tie()
    for refused in (lambda: speculator.quantize("fp8"),
                    lambda: write_speculator(tmp_path / "new", speculator, torch.float32)):
        with pytest.raises(ValueError, match=r"call untie\(lm_head\) first"):
            refused()


def test_rare_tokens_survive_training_with_a_tied_vocab_proj(states, lm_head):
    """Ids that no training position asks for: trained row by row they are pushed out of the candidates."""
    common, rare = states.split(200)
    is_common = torch.arange(VOCAB) < VOCAB // 2
    logits = (common @ lm_head.T).masked_fill(~is_common, float("-inf"))
    recalls = {}
    for tied in (False, True):
        speculator = VocabSpeculator(HIDDEN, 8, ExactSelection(VOCAB, 10))
        if tied:
            speculator.tie()
        speculator.initialise("calibration", lm_head, states)
        optimizer = torch.optim.Adam(speculator.parameters(), lr=5e-3)
        for _ in range(150):
            down_proj, vocab_proj = speculator.factors(lm_head)
            loss = torch.nn.functional.cross_entropy(common @ down_proj.T @ vocab_proj.T, logits.softmax(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        speculator.untie(lm_head)
        wanted = (rare @ lm_head.T).masked_fill(is_common, float("-inf")).argmax(-1)
        scores = speculator(rare)
        recalls[tied] = (scores > scores.gather(-1, wanted[:, None])).sum(-1).double().mean().item()
    assert recalls[True] < 0.7 * recalls[False]  # mean rank of the best rare id


def test_svd_is_the_best_approximation_of_its_rank(lm_head):
    rank = 5
    speculator = VocabSpeculator(HIDDEN, rank, ExactSelection(VOCAB, 10))
    speculator.initialise("svd", lm_head)
    product = speculator.vocab_proj.weight @ speculator.down_proj.weight
    tail = np.linalg.svd(lm_head.double().numpy(), compute_uv=False)[rank:]
    error = (lm_head - product).double().norm().item()  # Eckart-Young: no rank-r matrix has a smaller one
    assert error == pytest.approx(np.sqrt((tail**2).sum()), rel=1e-6)


def test_calibration_recalls_more_than_svd(states, lm_head):
    train, held_out = states.split(200)
    recalls = {}
    for method in ("calibration", "svd", "random"):
        speculator = VocabSpeculator(HIDDEN, 4, ExactSelection(VOCAB, 10))
        speculator.initialise(method, lm_head, train)
        recalls[method] = recall(speculator, lm_head, held_out)
    assert recalls["calibration"] > 0.95
    assert recalls["calibration"] > recalls["svd"] + 0.2
    assert recalls["svd"] > recalls["random"]


def test_random_follows_the_generator(lm_head):
    weights = []
    for seed in (1, 1, 2):
        speculator = VocabSpeculator(HIDDEN, 4, ExactSelection(VOCAB, 10))
        speculator.initialise("random", lm_head, generator=torch.Generator().manual_seed(seed))
        weights.append(speculator.vocab_proj.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    "head, vocab_size, expected",
    [
        ({}, 49_152, TileSelection(49_152, 128, 6)),
        ({}, 151_936, TileSelection(151_936, 128, 2)),
        ({}, 262_144, TileSelection(262_144, 128, 1)),
        ({"num_candidates": 512}, 151_936, TileSelection(151_936, 256, 1)),
        ({"num_candidates": 20}, 277, TileSelection(277, 128, 7)),
        ({"num_candidates": 1}, 277, TileSelection(277, 256, 1)),
        ({"num_candidates": 400}, 277, TileSelection(277, 128, 93)),
        ({"num_candidates": 1}, 1, TileSelection(1, 128, 1)),
        ({"tile": 64, "keep": 3}, 277, TileSelection(277, 64, 3)),
        ({"selection": "exact"}, 49_152, ExactSelection(49_152, 2048)),
        ({"selection": "exact", "num_candidates": 400}, 277, ExactSelection(277, 277)),
    ],
)
def test_selections_of_a_configuration(head, vocab_size, expected):
    selection = build_selection(HeadConfig(**head), vocab_size)
    assert selection == expected
    if "tile" not in head:  # at least as many as asked for, and no keep or larger tile would do
        asked = min(head.get("num_candidates", 2048), vocab_size)
        assert selection.num_candidates >= asked
        if head.get("selection") != "exact":
            tile, keep = selection.tile, selection.keep
            fewer = TileSelection(vocab_size, tile, keep - 1) if keep > 1 else TileSelection(vocab_size, 2 * tile, 1)
            assert fewer.num_candidates < asked or asked == 1


@pytest.mark.parametrize("selection", [ExactSelection(VOCAB, 13), TileSelection(VOCAB, 16, 2)])
def test_rule_on_ranks_is_the_selection(selection, states):
    scores = states[:50] @ torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(1))
    num_tiles, keep = candidate_rule(selection)
    for row, ids in zip(scores.tolist(), selection.select(scores).tolist(), strict=True):
        ranks = [sum(row[j] > row[i] for j in range(i % num_tiles, VOCAB, num_tiles)) for i in range(VOCAB)]
        assert sorted(ids) == [i for i in range(VOCAB) if ranks[i] < keep]


@pytest.mark.parametrize("precision, error", [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_an_8_bit_vocab_proj_scores_nearly_the_same(precision, error, states, lm_head):
    speculator = VocabSpeculator(HIDDEN, 6, TileSelection(VOCAB, 16, 2))
    speculator.initialise("calibration", lm_head, states)
    weight, reduced = speculator.vocab_proj.weight.detach().clone(), speculator.down_proj(states).detach()
    exact = speculator(states).detach()
    speculator.quantize(precision)
    assert speculator.quantization == precision
    assert {name for name, _ in speculator.named_parameters()} == {"down_proj.weight"}
    bound = error * weight.abs().amax(1) * reduced.abs().sum(1, keepdim=True)  # every weight off by half a step at most
    assert ((speculator(states) - exact).abs() <= bound * 1.001 + 1e-6).all()
    with pytest.raises(ConfigError, match=f"{precision} already"):
        speculator.quantize("int8")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda s, u, h: s.initialise("pca", u, h), "'pca' is not known"),
        (lambda s, u, h: s.initialise("calibration", u), "needs final hidden states"),
        (lambda s, u, h: s.initialise("calibration", u, h[:3]), "3 states cannot determine 4 directions"),
        (lambda s, u, h: s.initialise("calibration", u, iter([])), "0 states cannot determine 4 directions"),
        (lambda s, u, h: s.initialise("calibration", u, h / 0), "not all finite"),
        (lambda s, u, h: s.initialise("svd", u[:-1]), r"shape \(96, 24\).*built for \(97, 24\)"),
        (lambda s, u, h: VocabSpeculator(HIDDEN, HIDDEN + 1, ExactSelection(VOCAB, 10)), "rank=25 must lie between 1"),
    ],
)
def test_what_cannot_work_is_refused(call, message, states, lm_head):
    with pytest.raises(ValueError, match=message):
        call(VocabSpeculator(HIDDEN, 4, ExactSelection(VOCAB, 10)), lm_head, states)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_collected_states_predict_the_supervised_tokens(kind, tmp_path):
    target = tiny_target(kind, tmp_path)
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 0, 1]},
        {"input_ids": [40, 41, 42], "loss_mask": [1, 0, 0]},  # the first token has no position that predicts it
        {"input_ids": [50, 51, 52, 53], "loss_mask": [0, 1, 1, 1]},
    ]
    wanted = [[1, 3], [], [0, 1, 2]]
    expected = []
    for row, positions in zip(rows, wanted, strict=True):
        output = target.model(torch.tensor([row["input_ids"]]), output_hidden_states=True)
        expected.append(output.hidden_states[-1][0, positions])  # the last of them is after the final norm
    expected = torch.cat(expected)
    torch.testing.assert_close(torch.cat(list(collect_final_hidden(target, rows, 100))), expected)
    torch.testing.assert_close(torch.cat(list(collect_final_hidden(target, rows, 4))), expected[:4])


@pytest.mark.gpu
def test_bf16_lm_head_on_the_gpu(states, lm_head):
    results = []
    for device in ("cpu", "cuda"):
        speculator = VocabSpeculator(HIDDEN, 6, ExactSelection(VOCAB, 10)).to(device)
        speculator.initialise("calibration", lm_head.bfloat16().to(device), states.bfloat16().to(device))
        results.append(speculator.cpu().state_dict())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)

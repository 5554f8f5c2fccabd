"""The chunked distillation against the plain definition in fp64, at shapes and values that break things."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specvocab_kernels.distill import LOSSES, distill, row_bytes
from specvocab_kernels.distill.gradients import GRADIENTS, NEEDS_LOG, Teacher
from specvocab_kernels.distill.reference import LOG_FLOOR, distill_reference

IMPLS = ("torch", "triton")  # triton: in the interpreter where there is no GPU
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(steps, rows, vocab_size, hidden_size, rank, *, seed=0, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    weight = torch.rand(steps, rows, generator=generator).to(DEVICE)
    return {
        "student_hidden": normal(steps, rows, hidden_size).requires_grad_(),
        "teacher_hidden": normal(rows, hidden_size),
        "lm_head": normal(vocab_size, hidden_size) * scale,
        "down_proj": (normal(rank, hidden_size) * hidden_size**-0.5).requires_grad_(),
        "vocab_proj": normal(vocab_size, rank).requires_grad_(),
        "weight": weight,
    }


def room_for(rows, impl, tensors):
    """``max_bytes`` that makes chunks of so many teacher rows."""
    return rows * row_bytes(impl, tensors["student_hidden"].shape[0], tensors["lm_head"])


def to_fp64(tensors):
    return {
        name: tensor.detach().double().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()
    }


def losses_and_gradients(function, tensors, **options):
    total, stats = function(**tensors, **options)
    total.backward()
    return total.detach(), stats, {name: tensor.grad for name, tensor in tensors.items() if tensor.requires_grad}


def assert_matches_truth(tensors, tolerance, impl, **options):
    total, stats, gradients = losses_and_gradients(
        distill, tensors, impl=impl, max_bytes=room_for(3, impl, tensors), collect=True, **options
    )
    expected, expected_stats, truth = losses_and_gradients(distill_reference, to_fp64(tensors), **options)
    torch.testing.assert_close(total.double(), expected.double(), rtol=tolerance, atol=tolerance)
    for name, gradient in gradients.items():
        error = (gradient.double() - truth[name]).norm() / truth[name].norm().clamp_min(1e-3)
        assert error < tolerance, f"{name}: relative error {error:.2e}"
    for name in ("loss", "aux_loss", "acceptance", "entropy"):
        actual, wanted = getattr(stats, name).double(), getattr(expected_stats, name).double()
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)
    for name in ("correct", "target_rank", "draft_rank"):
        assert torch.equal(getattr(stats, name), getattr(expected_stats, name)), name


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("softcap, scale", [(None, 1.0), (5.0, 1.0), (30.0, 0.0625)])
def test_every_loss_and_its_gradients_match_fp64_autograd(impl, loss, softcap, scale):
    tensors = problem(steps=2, rows=4, vocab_size=211, hidden_size=24, rank=5)
    assert_matches_truth(
        tensors, 2e-5, impl=impl, loss=loss, logit_softcap=softcap, logit_scale=scale, aux_weight=0.3
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("loss", ["forward_kl", "lk_hybrid"])
@pytest.mark.parametrize("with_speculator", [False, True])
def test_a_head_of_the_students_own_is_trained_too(impl, loss, with_speculator):
    tensors = problem(steps=2, rows=4, vocab_size=131, hidden_size=24, rank=5)
    tensors["student_head"] = torch.randn_like(tensors["lm_head"]).requires_grad_()
    if not with_speculator:
        del tensors["down_proj"], tensors["vocab_proj"]
    options = {} if with_speculator else {"down_proj": None, "vocab_proj": None}
    assert_matches_truth(tensors, 2e-5, impl=impl, loss=loss, logit_softcap=5.0, logit_scale=0.5, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_temperature_divides_the_capped_logits(impl, softcap, temperature):
    tensors = problem(steps=2, rows=5, vocab_size=131, hidden_size=16, rank=4)
    assert_matches_truth(tensors, 2e-5, impl=impl, logit_softcap=softcap, temperature=temperature)


@pytest.mark.parametrize("impl", IMPLS)
def test_fp16_products_keep_the_gradients_of_a_high_temperature(impl):
    tensors = problem(steps=1, rows=4, vocab_size=1024, hidden_size=16, rank=4)
    for name in ("lm_head", "teacher_hidden"):
        tensors[name] = tensors[name].half()
    _, _, gradients = losses_and_gradients(distill, tensors, impl=impl, temperature=100.0)
    _, _, truth = losses_and_gradients(distill_reference, to_fp64(tensors), temperature=100.0)
    for name, wanted in truth.items():
        error = (gradients[name].double() - wanted).norm() / wanted.norm()
        assert error < 2e-2, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_tiles", [1, 4, 1000])
def test_ranks_are_those_of_the_scores_before_the_cap(impl, num_tiles):
    tensors = problem(steps=2, rows=3, vocab_size=67, hidden_size=16, rank=4)
    tensors["vocab_proj"] = (tensors["vocab_proj"].detach() * 30).requires_grad_()  # far beyond the cap
    tensors["lm_head"] *= 0.05  # the teacher is not, so that its argmax is one
    options = {"collect": True, "logit_softcap": 1.0, "num_tiles": num_tiles}
    _, stats, _ = losses_and_gradients(distill, tensors, impl=impl, **options)
    scores = tensors["student_hidden"] @ tensors["down_proj"].mT @ tensors["vocab_proj"].mT
    ids = (tensors["teacher_hidden"] @ tensors["lm_head"].mT).argmax(-1)[:, None]
    of_tile = torch.arange(67, device=ids.device) % num_tiles == ids % num_tiles
    above = scores > scores.gather(-1, ids.expand(2, 3, 1))
    assert torch.equal(stats.target_rank, (above & of_tile).sum(-1))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_tiles", [2, 7, 131])
def test_ranks_within_tiles_match(impl, num_tiles):
    tensors = problem(steps=2, rows=5, vocab_size=131, hidden_size=16, rank=4)
    assert_matches_truth(tensors, 2e-5, impl=impl, num_tiles=num_tiles)


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=10, deadline=None)
@given(
    steps=st.integers(1, 4),
    rows=st.integers(1, 8),
    vocab_size=st.integers(1, 300),
    hidden_size=st.integers(1, 33),
    chunk_rows=st.integers(1, 10),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_any_shape_matches(impl, steps, rows, vocab_size, hidden_size, chunk_rows, seed, data):
    rank = data.draw(st.integers(1, hidden_size))
    tensors = problem(steps, rows, vocab_size, hidden_size, rank, seed=seed)
    max_bytes = room_for(chunk_rows, impl, tensors)
    total, _, gradients = losses_and_gradients(distill, tensors, impl=impl, max_bytes=max_bytes)
    expected, _, truth = losses_and_gradients(distill_reference, to_fp64(tensors))
    torch.testing.assert_close(total.double(), expected.double(), rtol=1e-4, atol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.double(), truth[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("teacher_scale, student_scale", [(0.0, 0.0), (1e4, 1.0), (1.0, 1e3), (1e4, 1e3)])
def test_extreme_logits_never_give_nan(impl, loss, teacher_scale, student_scale):
    tensors = problem(steps=2, rows=3, vocab_size=97, hidden_size=16, rank=4)
    tensors["teacher_hidden"] = tensors["teacher_hidden"] * teacher_scale
    tensors["student_hidden"] = (tensors["student_hidden"].detach() * student_scale).requires_grad_()
    total, stats, gradients = losses_and_gradients(distill, tensors, impl=impl, loss=loss, collect=True)
    assert torch.isfinite(total)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    assert torch.isfinite(stats.entropy).all() and torch.isfinite(stats.loss).all()


def judge(impl, loss, teacher_logits, logits):
    """Value [C] and slope [C, V] of a loss straight from logits."""
    if impl == "torch":
        return GRADIENTS[loss](Teacher.from_logits(teacher_logits.clone(), loss in NEEDS_LOG), logits.clone())
    from specvocab_kernels.distill.kernel import launch_student, launch_teacher

    options = {"scale": 1.0, "softcap": None, "collect": True}
    slope, weight = logits.clone(), torch.ones(len(logits), device=DEVICE)
    judged = launch_student(slope, launch_teacher(teacher_logits, **options), weight, loss=loss, **options)
    assert torch.equal(judged.top, logits.argmax(-1))
    return judged.loss, slope


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("vocab_size", [1, 255, 4100])
def test_odd_teachers_match_fp64(impl, loss, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    teacher = torch.randn(7, vocab_size, generator=generator)
    teacher[0] = 0.0  # uniform, and all logits equal
    teacher[1, 1:] = -1e4  # one-hot
    teacher[2] = torch.where(teacher[2] > 0, 1e4, -1e4)
    teacher[3, 1:] = float("-inf")
    teacher[4, : vocab_size // 2] = float("-inf")  # longer than a tile where the vocabulary is
    teacher[5, -1] = 30.0
    logits = torch.randn(7, vocab_size, generator=generator)
    logits[6] = 1.0  # equal logits of the student
    value, slope = judge(impl, loss, teacher.to(DEVICE), logits.to(DEVICE))
    wanted_logits = logits.double().requires_grad_()
    log_p, log_q = (torch.log_softmax(z, -1).clamp_min(LOG_FLOOR) for z in (teacher.double(), wanted_logits))
    wanted = LOSSES[loss](log_p, log_q)
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), wanted_logits)
    # Rows 1 to 4 hold numbers of size 1e4 (logits, or the floor of log p), whose fp32 neighbours are 1e-3 apart.
    for rows, tolerance in (([0, 5, 6], 2e-5), ([1, 2, 3, 4], 2e-3)):
        actual, expected = value.double().cpu()[rows], wanted.detach()[rows]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        actual, expected = slope.double().cpu()[rows], wanted_slope[rows]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(151936, 24), (4097, 8), (4097, 24), (4097, 72)])
def test_the_tail_of_a_large_vocabulary(impl, hidden_size, vocab_size):
    tensors = problem(steps=1, rows=2, vocab_size=vocab_size, hidden_size=hidden_size, rank=8, scale=0.3)
    tensors["student_hidden"].data[:] = tensors["lm_head"][-1]  # the last ids carry the student's mass
    # torch's softmax on a CPU adds up a row in few running sums, so its own fp32 error grows with V.
    assert_matches_truth(tensors, 5e-5 if impl == "triton" or vocab_size < 10_000 else 2e-3, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("valid", [0, 1])
def test_few_valid_rows(impl, valid):
    tensors = problem(steps=2, rows=9, vocab_size=50, hidden_size=8, rank=3)
    tensors["weight"] *= 0.0
    tensors["weight"][0, 4:4 + valid] = 1.0
    total, _, gradients = losses_and_gradients(distill, tensors, impl=impl)
    _, _, truth = losses_and_gradients(distill_reference, to_fp64(tensors))
    assert bool(total) == bool(valid)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.double(), truth[name], rtol=1e-4, atol=1e-6)
        assert bool(gradient.any()) == bool(valid)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_same_input_gives_the_same_bits(impl):
    runs = []
    for _ in range(2):
        tensors = problem(steps=2, rows=6, vocab_size=700, hidden_size=64, rank=16, dtype=torch.bfloat16)
        total, stats, gradients = losses_and_gradients(distill, tensors, impl=impl, collect=True)
        runs.append([total, stats.loss, stats.acceptance, *gradients.values()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_backward_runs_once(impl):
    total, _ = distill(**problem(steps=1, rows=3, vocab_size=20, hidden_size=4, rank=2), impl=impl)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once only"):
        total.backward()


@pytest.mark.parametrize("impl", IMPLS)
def test_without_gradients_the_same_is_measured(impl):
    tensors = problem(steps=2, rows=7, vocab_size=40, hidden_size=8, rank=3)
    total, stats = distill(**tensors, impl=impl, collect=True)
    with torch.no_grad():
        measured, measured_stats = distill(**tensors, impl=impl, collect=True)
    assert torch.equal(total, measured) and not measured.requires_grad
    assert torch.equal(stats.loss, measured_stats.loss) and torch.equal(stats.draft_rank, measured_stats.draft_rank)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["forward_kl", "lk_hybrid"])
def test_rows_past_two_to_the_31_elements(loss):
    vocab_size, rows = 151936, 7200  # [2 * 7200, V] is 1.02 * 2**31 elements; with the student's rows twice as many
    tensors = problem(steps=2, rows=rows, vocab_size=vocab_size, hidden_size=16, rank=4, dtype=torch.bfloat16)
    in_one, _, gradients = losses_and_gradients(
        distill, tensors, impl="triton", loss=loss, max_bytes=room_for(rows, "triton", tensors)
    )
    truth, _, expected = losses_and_gradients(
        distill, {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()},
        impl="triton", loss=loss, max_bytes=room_for(100, "triton", tensors),
    )
    torch.testing.assert_close(in_one, truth)
    torch.testing.assert_close(gradients["student_hidden"][:, -5:], expected["student_hidden"][:, -5:])


@pytest.mark.gpu
def test_no_launch_waits_for_the_device():
    tensors = problem(steps=2, rows=40, vocab_size=1111, hidden_size=64, rank=16, dtype=torch.bfloat16)
    distill(**tensors, collect=True)[0].backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        distill(**tensors, collect=True)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("impl", IMPLS)
def test_a_perfect_student_has_no_loss_and_no_gradient(impl):
    tensors = problem(steps=1, rows=4, vocab_size=50, hidden_size=8, rank=8)
    tensors["student_hidden"] = tensors["teacher_hidden"][None].clone().requires_grad_()
    total, stats, gradients = losses_and_gradients(distill, tensors, impl=impl, aux_weight=0.0, collect=True)
    assert abs(total) < 1e-5 and gradients["student_hidden"].abs().max() < 1e-5
    assert stats.correct.all()
    torch.testing.assert_close(stats.acceptance, torch.ones_like(stats.acceptance))


@pytest.mark.parametrize("impl", IMPLS)
def test_positions_of_weight_zero_are_without_influence_even_when_nan(impl):
    tensors = problem(steps=2, rows=6, vocab_size=40, hidden_size=8, rank=3)
    tensors["weight"][:, 2] = 0.0
    tensors["weight"][1, 4] = 0.0
    clean, _, expected = losses_and_gradients(distill, tensors, impl=impl)
    poisoned = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    poisoned["teacher_hidden"][2] = float("nan")
    poisoned["student_hidden"][:, 2] = float("inf")
    poisoned["student_hidden"][1, 4] = float("nan")
    for name in expected:
        poisoned[name].requires_grad_()
    total, _, gradients = losses_and_gradients(distill, poisoned, impl=impl)
    assert torch.equal(total, clean)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("impl", IMPLS)
def test_no_row_at_all_gives_zero_loss_and_zero_gradients(impl):
    tensors = problem(steps=3, rows=0, vocab_size=40, hidden_size=8, rank=3)
    total, _, gradients = losses_and_gradients(distill, tensors, impl=impl)
    assert total == 0
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("impl", IMPLS)
def test_chunk_size_does_not_change_the_result(impl):
    results = []
    for chunk_rows in (1, 4, 100):
        tensors = problem(steps=2, rows=11, vocab_size=60, hidden_size=8, rank=3)
        max_bytes = room_for(chunk_rows, impl, tensors)
        results.append(losses_and_gradients(distill, tensors, impl=impl, max_bytes=max_bytes))
    for total, _, gradients in results[1:]:
        torch.testing.assert_close(total, results[0][0])
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, results[0][2][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_bf16_error_is_that_of_plain_bf16_torch(impl):
    tensors = problem(steps=2, rows=16, vocab_size=500, hidden_size=64, rank=8, scale=0.3, dtype=torch.bfloat16)
    _, _, truth = losses_and_gradients(distill_reference, to_fp64(tensors))
    _, _, ours = losses_and_gradients(distill, tensors, impl=impl)
    plain_tensors = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
    _, _, plain = losses_and_gradients(distill_reference, plain_tensors)
    for name, wanted in truth.items():
        error, plain_error = ((grads[name].double() - wanted).norm() / wanted.norm() for grads in (ours, plain))
        assert error <= 1.1 * plain_error, f"{name}: {error:.2e} against plain torch's {plain_error:.2e}"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("share", [1.0, 5e-5, 1e-7])
def test_fp16_products_keep_the_small_weights_of_a_large_batch(impl, share):
    tensors = problem(steps=3, rows=16, vocab_size=300, hidden_size=32, rank=8, scale=0.3)
    tensors["weight"] *= share
    for name in ("lm_head", "teacher_hidden"):
        tensors[name] = tensors[name].half()
    total, _, gradients = losses_and_gradients(distill, tensors, impl=impl)
    expected, _, truth = losses_and_gradients(distill_reference, to_fp64(tensors))
    torch.testing.assert_close(total.double() / share, expected / share, rtol=2e-3, atol=1e-3)
    for name, wanted in truth.items():
        error = (gradients[name].double() - wanted).norm() / wanted.norm()
        assert error < 4e-3, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("impl", IMPLS)
def test_the_upstream_gradient_scales_everything(impl):
    tensors = problem(steps=1, rows=3, vocab_size=20, hidden_size=4, rank=2)
    distill(**tensors, impl=impl)[0].backward()
    once = {name: tensor.grad.clone() for name, tensor in tensors.items() if tensor.requires_grad}
    (distill(**tensors, impl=impl)[0] * 2.0).backward()  # accumulates onto the first
    for name, gradient in once.items():
        torch.testing.assert_close(tensors[name].grad, 3.0 * gradient)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"loss": "kl"}, "loss='kl' is not known"),
        ({"weight": torch.ones(1, 2)}, "weight"),
        ({"teacher_hidden": torch.ones(3, 5)}, "teacher_hidden"),
        ({"lm_head": torch.ones(20, 5)}, "lm_head"),
        ({"down_proj": None}, "together"),
        ({"vocab_proj": torch.ones(19, 2)}, "vocab_proj"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"logit_scale": 0.0}, "logit_scale"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": 1e-39}, "temperature"),
        ({"num_tiles": 0}, "num_tiles"),
        ({"student_head": torch.ones(19, 4)}, "student_head"),
    ],
)
def test_wrong_inputs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        distill(**{**problem(steps=1, rows=3, vocab_size=20, hidden_size=4, rank=2), **change})

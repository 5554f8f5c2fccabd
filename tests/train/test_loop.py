"""The loop's arithmetic, and what survives when a run is broken off."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from accelerate import PartialState

from data_gen.make_features import make_features
from scripts.export import export
from specvocab_model import target_graph
from specvocab_model.acceptance import AcceptanceSums
from specvocab_model.config import ConfigError, OptimConfig
from specvocab_model.export import load_checkpoint
from specvocab_model.losses import valid_counts
from tests.composing import config_of
from tests.train.runs import (
    NUM_TRAIN_ROWS,
    RARE_ROW,
    RARE_TOKEN,
    SEQ_LEN,
    final_weights,
    largest_difference,
    logged,
    overrides,
    run_of,
    write_experiment,
)
from train.build import Run, build_run
from train.identity import run_identity
from train.loop import NonFiniteError, launch_step, settle, step_totals, train
from train.optim import build_optimizer
from train.preemption import Preempted

NUMBERS = ("train/objective", "optim/grad_norm", "optim/lr", "train/loss", "train/simulated_tau/candidates")


class Killed(Exception):
    """Stands for whatever ends a process."""


def kill_in_step(run: Run, step: int) -> None:
    """Let ``run`` die before it updates the weights of ``step``."""
    update = run.updater.step

    def dying(lr: float) -> float:
        if run.state.step == step:
            raise Killed
        return update(lr)

    run.updater.step = dying


def test_the_data_has_a_partial_last_group_and_a_row_without_valid_positions(root):
    run = run_of(root, "plan")
    steps = list(run.train_loader)
    assert {len(step) for step in steps} == {4, run.train_loader.sampler.num_rows % 4} and len(steps[-1]) < 4
    assert any(set(batch.row_ids) == {"row-1"} for step in steps for batch in step)


def test_positions_are_counted_over_the_step(root):
    run = run_of(root, "counted")
    batches = next(iter(run.train_loader))
    counts, num_tokens, num_unrolled, num_slots, _ = step_totals(run, batches)
    assert counts.tolist() == sum(valid_counts(one.loss_mask, one.document_ids, 3) for one in batches).tolist()
    assert num_slots == 4 * SEQ_LEN
    assert num_tokens == sum(int((one.document_ids >= 0).sum()) for one in batches)
    assert counts[0] < num_unrolled < num_tokens  # ends of documents, prompts


@pytest.mark.parametrize(("micro_batch_size", "accumulation"), [(4, 1), (2, 2)])
def test_accumulation_does_not_change_the_numbers(root, reference, micro_batch_size, accumulation):
    name = f"accumulation-{accumulation}"
    train(run_of(root, name, f"trainer.micro_batch_size={micro_batch_size}",
                 f"trainer.gradient_accumulation_steps={accumulation}"))
    np.testing.assert_allclose(logged(root, name, *NUMBERS), logged(root, reference, *NUMBERS), rtol=2e-5)
    # Adam turns rounding in a gradient near zero into a part of a learning rate (3e-3).
    assert largest_difference(final_weights(root, name), final_weights(root, reference)) < 2e-4


@pytest.mark.parametrize("normalization", ["valid", "slot"])
def test_the_objective_is_a_mean_over_all_positions_of_the_step(root, normalization):
    name = f"objective-{normalization}"
    run = run_of(root, name, f"trainer.loss_normalization={normalization}", "trainer.max_steps=1")
    sums, num_slots = AcceptanceSums.zeros(3), 0
    for batch in next(iter(run.train_loader)):
        with torch.no_grad():
            sums = sums + run.forward(batch, torch.ones(3), collect=True).sums
        num_slots += batch.input_ids.shape[0] * SEQ_LEN
    mean_over = sums.count if normalization == "valid" else torch.full_like(sums.count, num_slots)
    expected = (0.8 ** torch.arange(3) * (sums.loss + 0.1 * sums.aux_loss) / mean_over).sum()
    train(run)
    assert logged(root, name, "train/objective") == [[1, pytest.approx(float(expected), rel=1e-5)]]


def test_resume_equals_the_unbroken_run_bit_for_bit(root, reference):
    broken = run_of(root, "resumed")
    kill_in_step(broken, 7)
    with pytest.raises(Killed):
        train(broken)
    torch.rand(3)  # a new process would not have this one's random state
    assert len(logged(root, "resumed", *NUMBERS)) == 6
    resumed = run_of(root, "resumed")
    assert resumed.state.step == 4  # the last one saved
    train(resumed)
    assert logged(root, "resumed", *NUMBERS) == logged(root, reference, *NUMBERS)
    assert logged(root, "resumed", "validation/loss") == logged(root, reference, "validation/loss")
    assert largest_difference(final_weights(root, "resumed"), final_weights(root, reference)) == 0.0


def test_every_number_that_a_run_reports_is_there(root, reference):
    """Of training and of validation; MFU is known of GPUs only."""
    (first, *_) = map(json.loads, (root / reference / "metrics.jsonl").read_text().splitlines())
    shared = {"loss", "aux_loss", "simulated_tau/full", "simulated_tau/candidates", "candidate_recall/target_top1",
              "candidate_recall/draft_top1", *(f"accuracy/step_{step}" for step in range(3))}
    assert first.keys() >= {f"train/{name}" for name in shared} | {
        "optim/lr", "optim/grad_norm", "optim/skipped_steps", "perf/tokens_per_second",
        "perf/valid_tokens_per_second", "perf/peak_memory_gib"}
    assert all(len(logged(root, reference, f"validation/{name}")) >= 2 for name in shared)


def test_checkpoints_carry_the_random_state(root):
    run = run_of(root, "random-state", "trainer.max_steps=4")
    train(run)
    after = torch.rand(4), np.random.rand(4)
    torch.manual_seed(99)
    np.random.seed(99)
    run_of(root, "random-state", "trainer.max_steps=4")
    assert torch.equal(torch.rand(4), after[0]) and (np.random.rand(4) == after[1]).all()


def test_a_finished_run_does_nothing_more_but_write_its_result_again(root, reference):
    before = final_weights(root, reference), logged(root, reference, *NUMBERS)
    (root / reference / "final" / "training.json").unlink()
    run = run_of(root, reference)
    train(run)
    assert run.state.step == run.total_steps
    assert largest_difference(final_weights(root, reference), before[0]) == 0.0
    assert logged(root, reference, *NUMBERS) == before[1]
    assert json.loads((root / reference / "final" / "training.json").read_text())["step"] == run.total_steps


def test_a_later_checkpoint_that_a_kill_left_behind_does_not_displace_the_newest(root):
    train(run_of(root, "left-behind", "trainer.max_steps=8"))
    checkpoints = root / "left-behind" / "checkpoints"
    (checkpoints / "latest").write_text("step-4")  # as if killed when step-8 had its name and `latest` not yet
    (checkpoints / "step-8-copy").mkdir()  # a user's: not ours to remove
    changes = ("trainer.max_steps=8", "trainer.save_every=3", "trainer.keep_checkpoints=1", "trainer.keep_best=false")
    resumed = run_of(root, "left-behind", *changes)
    kill_in_step(resumed, 7)
    with pytest.raises(Killed):
        train(resumed)
    assert {path.name for path in checkpoints.iterdir()} == {"latest", "step-6", "step-8-copy"}
    assert run_of(root, "left-behind", *changes).state.step == 6


ROWS = r"rows a step \(ranks \* trainer.micro_batch_size \* trainer.gradient_accumulation_steps\)"


@pytest.mark.parametrize(("change", "named"), [
    ("optim.lr=1e-2", "optim.lr: 0.003 then, 0.01 now"),
    ("trainer.gradient_accumulation_steps=2", f"{ROWS}: 4 then, 2 now"),
    ("trainer.step_decay=0.7", "trainer.step_decay: 0.8 then, 0.7 now"),
])
def test_a_checkpoint_of_another_configuration_is_refused(root, reference, change, named):
    with pytest.raises(ConfigError, match=rf"written by another configuration \({named}\)"):
        run_of(root, reference, change)


def test_resume_false_starts_over(root):
    train(run_of(root, "over", "trainer.max_steps=2"))
    again = run_of(root, "over", "trainer.max_steps=2", "optim.lr=1e-2", "trainer.resume=false")
    assert again.state.step == 0 and again.tracker.run_id is None
    train(again)
    assert [step for step, _ in logged(root, "over", "optim/lr")] == [1, 2]


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_starts_from_nothing_removes_the_result_of_the_one_before(root, resume):
    """Else a run that is killed would be exported with the weights of another."""
    name = f"result-{resume}"
    train(run_of(root, name, "trainer.max_steps=1"))
    assert run_of(root, name, "trainer.max_steps=1").state.step == 1 and (root / name / "final").exists()
    if resume:
        shutil.rmtree(root / name / "checkpoints")
    run_of(root, name, "trainer.max_steps=1", "optim.lr=1e-2", f"trainer.resume={resume}")
    assert not (root / name / "final").exists()


def test_what_does_not_touch_the_numbers_may_change(root):
    train(run_of(root, "renamed", "trainer.max_steps=1"))
    assert run_of(root, "renamed", "trainer.max_steps=1", "trainer.log_every=7", "data.num_workers=1",
                  "tracking=tensorboard", "trainer.loss_memory_mib=512",
                  "+target.chat_template_kwargs.enable_thinking=false").state.step == 1


def test_a_loss_that_is_not_finite_stops_and_names_the_step_and_the_rows(root):
    run = run_of(root, "not-finite", "trainer.save_every=1")
    with torch.no_grad():
        run.target.model.get_input_embeddings().weight[RARE_TOKEN] = float("nan")
    culprit = next((step, batch) for step, batches in enumerate(run.train_loader, 1) for batch in batches
                   if RARE_ROW in batch.row_ids)
    with pytest.raises(NonFiniteError) as stopped:
        train(run)
    message = str(stopped.value)
    assert message.startswith(f"step {culprit[0]}: loss nan") and "on ranks [0]" in message
    assert f"rows {', '.join(culprit[1].row_ids)}. " in message
    assert len(culprit[1].row_ids) < NUM_TRAIN_ROWS / 2
    assert not (root / "not-finite" / "final").exists()
    assert not (root / "not-finite" / "checkpoints" / f"step-{culprit[0]}").exists()


def test_a_gradient_that_is_not_finite_stops_although_every_loss_is_finite(root, monkeypatch):
    run = run_of(root, "gradient", "trainer.max_steps=2")
    backward = run.updater.backward
    monkeypatch.setattr(run.updater, "backward", lambda loss: backward(loss * float("inf")))
    with pytest.raises(NonFiniteError, match=r"step 1: loss \d.* gradient norm nan; on ranks \[0\]"):
        train(run)


def test_the_optimizer_never_sees_a_parameter_of_the_target(root):
    run = run_of(root, "frozen", "trainer.max_steps=3")
    before = {name: weight.clone() for name, weight in run.target.model.named_parameters()}
    of_target = {weight.data_ptr() for weight in run.target.model.parameters()}
    seen = {weight.data_ptr() for group in run.updater.optimizer.param_groups for weight in group["params"]}
    assert seen == {weight.data_ptr() for weight in run.model.parameters()} and not seen & of_target
    train(run)
    assert all(weight.grad is None and not weight.requires_grad and torch.equal(weight, before[name])
               for name, weight in run.target.model.named_parameters())


@pytest.mark.parametrize("allowed", [1, 2])
def test_steps_that_are_not_finite_are_skipped_up_to_a_limit_and_change_nothing(root, capsys, allowed):
    """Steps 3 and 6; a run that was never given them stands where this one does."""
    name = f"skipping-{allowed}"
    run = run_of(root, name, "trainer.max_steps=6", f"trainer.skip_non_finite={allowed}", "trainer.save_every=1")
    update, backward, weights = run.updater.step, run.updater.backward, []

    def watched(lr: float) -> float:
        norm = update(lr)
        weights.append([weight.detach().clone() for weight in run.model.parameters()])
        return norm

    run.updater.step = watched
    run.updater.backward = lambda loss: backward(loss * float("nan") if run.state.step in (3, 6) else loss)
    if allowed == 1:
        with pytest.raises(NonFiniteError, match=r"step 6: .*trainer.skip_non_finite=1 such steps may be skipped"):
            train(run)
    else:
        train(run)
    assert run.state.skipped_steps == allowed
    assert "Skipped, 1 of at most" in capsys.readouterr().out
    for skipped in (3, 6):
        assert all(map(torch.equal, weights[skipped - 1], weights[skipped - 2]))
    assert not all(map(torch.equal, weights[3], weights[2]))
    assert [step for step, _ in logged(root, name, "train/loss")] == [1, 2, 4, 5]
    moments = [float(state["step"]) for state in run.updater.optimizer.state.values()]
    assert set(moments) == {4.0}
    again = run_of(root, name, "trainer.max_steps=6", f"trainer.skip_non_finite={allowed}")
    assert {float(state["step"]) for state in again.updater.optimizer.state.values()} == {4.0}


@pytest.mark.parametrize("fused", [False, True])
def test_when_a_step_is_looked_at_does_not_change_it(root, monkeypatch, capsys, fused):
    """At once where everything is logged, else when the next one is launched; ``fused`` skips as a GPU does."""
    monkeypatch.setattr("train.build.build_optimizer", fused_optimizer if fused else build_optimizer)
    names = [f"looked-at-{every}-{fused}" for every in (1, 4)]
    for name, every in zip(names, (1, 4), strict=True):
        run = run_of(root, name, "trainer.max_steps=8", "trainer.skip_non_finite=3", f"trainer.log_every={every}",
                     "trainer.validate_every=8", "trainer.save_every=6")
        poison_steps(run, 2, 3, 6)
        train(run)
        assert run.state.skipped_steps == 3 and run.state.step == 8
        printed = capsys.readouterr().out
        assert all(f"step {step}: loss" in printed for step in (2, 3, 6))
    assert largest_difference(*(final_weights(root, name) for name in names)) == 0.0
    assert logged(root, names[1], "train/loss", "optim/grad_norm") == [
        line for line in logged(root, names[0], "train/loss", "optim/grad_norm") if line[0] in (4, 8)]
    per_step = dict(logged(root, names[0], "train/objective"))
    assert logged(root, names[1], "train/objective") == [
        [last, pytest.approx(np.mean([per_step[step] for step in range(last - 3, last + 1) if step in per_step]))]
        for last in (4, 8)]


def fused_optimizer(model: torch.nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    settings = ("params", "weight_decay", "lr", "betas", "eps")
    groups = build_optimizer(model, config).param_groups
    return torch.optim.AdamW([{key: group[key] for key in settings} for group in groups], fused=True)


def poison_steps(run: Run, *steps: int) -> None:
    """Let the gradients of these steps be NaN while their losses are not."""
    backward = run.updater.backward
    run.updater.backward = lambda loss: backward(loss * float("nan") if run.state.step in steps else loss)


def test_a_step_that_is_not_finite_stops_the_run_after_the_next_was_launched(root):
    name = "late"
    run = run_of(root, name, "trainer.log_every=100", "trainer.save_every=4", "trainer.validate_every=100")
    poison_steps(run, 6)
    with pytest.raises(NonFiniteError, match=r"step 6: loss \d.* gradient norm nan; on ranks \[0\], rows row-"):
        train(run)
    assert run.state.step == 7
    assert (root / name / "checkpoints" / "latest").read_text() == "step-4"


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_signal_after_a_step_that_is_not_finite_finds_it_settled(root, monkeypatch, allowed):
    name = f"signal-after-{allowed}"
    run = run_of(root, name, "trainer.log_every=100", f"trainer.skip_non_finite={allowed}")
    poison_steps(run, 6)
    monkeypatch.setattr("train.loop.requested", lambda: run.state.step == 6)
    with pytest.raises(Preempted if allowed else NonFiniteError):
        train(run)
    saved = (root / name / "checkpoints" / "latest").read_text()
    assert (saved, run.state.skipped_steps) == (("step-6", 1) if allowed else ("step-4", 0))
    monkeypatch.undo()
    assert run_of(root, name, f"trainer.skip_non_finite={allowed}").state.skipped_steps == allowed


@pytest.mark.gpu
@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize("target", ["computed", "in-a-graph", "from-disk"])
def test_gpu_is_never_waited_for_when_a_step_is_launched(tmp_path, monkeypatch, target):
    """Else it would run out of work: the host would launch the next step only when this one is over."""
    root = write_experiment(tmp_path, head_dim=24)
    monkeypatch.setattr(target_graph, "MOST_BYTES", 2**30 if target == "in-a-graph" else 0)
    changes = ["distributed.cpu=false", "target.dtype=bfloat16", "trainer.mixed_precision=bf16",
               "trainer.gradient_accumulation_steps=1", "trainer.micro_batch_size=4"]
    if target == "from-disk":
        changes.append(f"data.features_path={root / 'features-gpu'}")
        make_features(config_of(overrides(root, "features-gpu", *changes)), PartialState())
    run = run_of(root, f"never-waiting-{target}", *changes)
    steps = list(run.train_loader)
    for mode in ("default", "error"):  # kernels are compiled, and graphs are captured, in the first pass
        for micro_batches in steps:
            torch.cuda.set_sync_debug_mode(mode)
            try:
                launched = launch_step(run, micro_batches, step_totals(run, micro_batches), 1e-3, collect=True)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert settle(run, launched) > 0


def test_full_head_trains_without_a_speculator(root):
    run = run_of(root, "full-head", "head=full", "trainer.max_steps=1")
    train(run)
    assert all(name.startswith("draft.") for name in final_weights(root, "full-head"))
    (numbers,) = logged(root, "full-head", "train/simulated_tau/full", "train/simulated_tau/candidates")
    assert numbers[1] == numbers[2]


def test_rows_of_vocab_proj_are_trained_one_by_one_on_request_and_exported_as_they_are(root):
    config = config_of(overrides(root, "free", "head.tied=false", "trainer.max_steps=1"))
    run = build_run(config)
    before = run.model.speculator.vocab_proj.weight.detach().clone()
    train(run)
    trained = final_weights(root, "free")
    assert not torch.equal(trained["speculator.vocab_proj.weight"], before)
    assert largest_difference(load_checkpoint(export(config)).state_dict(), trained) == 0.0


def test_a_run_of_a_version_that_could_not_tie_goes_on_untied(root, monkeypatch):
    def of_then(*args, **kwargs):
        return {key: value for key, value in run_identity(*args, **kwargs).items() if key != "head.tied"}

    with monkeypatch.context() as then:
        then.setattr("train.build.run_identity", of_then)
        train(run_of(root, "older", "head.tied=false", "trainer.max_steps=4"))
    assert run_of(root, "older", "head.tied=false", "trainer.max_steps=4").state.step == 4
    with pytest.raises(ConfigError, match=r"head\.tied: False then, True now"):
        run_of(root, "older", "trainer.max_steps=4")


def test_training_learns(root):
    train(run_of(root, "learns", "trainer.num_epochs=10", "optim.lr=0.01", "trainer.validate_every=100"))
    objectives = [objective for _, objective in logged(root, "learns", "train/objective")]
    assert np.mean(objectives[-4:]) < 0.9 * np.mean(objectives[:4])


def test_bf16_autocast_computes_in_bf16_and_trains_fp32_weights(root):
    run = run_of(root, "bf16", "trainer.mixed_precision=bf16", "target.dtype=bfloat16", "trainer.max_steps=1")
    seen = []
    run.model.draft.fc.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    train(run)
    assert set(seen) == {torch.bfloat16}
    assert {weight.dtype for weight in run.model.parameters()} == {torch.float32}

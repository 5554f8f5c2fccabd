"""Checkpoints that are whole, or not used."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.train.launching import Job
from tests.train.runs import final_weights, largest_difference, logged, overrides, run_of
from train.checkpoint import CheckpointError
from train.loop import train, train_steps

NUMBERS = ("train/objective", "optim/grad_norm", "optim/lr", "train/loss", "train/simulated_tau/candidates")

PRIVATE_MOUNTS = ["unshare", "--map-root-user", "--mount"]
may_mount = pytest.mark.skipif(
    subprocess.run([*PRIVATE_MOUNTS, "true"], capture_output=True, check=False).returncode != 0,
    reason="this user may not mount a file system of its own",
)


def folders(root, name: str) -> set[str]:
    return {path.name for path in (root / name / "checkpoints").iterdir()}


def test_the_twenty_steps_after_a_resume_equal_the_unbroken_run_bit_for_bit(root):
    changes = ("trainer.num_epochs=7", "trainer.save_every=3")
    train(run_of(root, "unbroken", *changes))
    broken = run_of(root, "broken", *changes)
    broken.train_loader.sampler.num_steps = 3  # as if it ended here; the schedule is that of the whole run
    train_steps(broken)
    resumed = run_of(root, "broken", *changes)
    assert resumed.state.step == 3 and resumed.total_steps >= 23
    train(resumed)
    assert logged(root, "broken", *NUMBERS) == logged(root, "unbroken", *NUMBERS)
    assert largest_difference(final_weights(root, "broken"), final_weights(root, "unbroken")) == 0.0


def test_a_checkpoint_holds_weights_and_moments_by_name(root, reference):
    (newest,) = (root / reference / "checkpoints").glob("step-1[0-9]")
    assert len({path.stat().st_mode for path in newest.iterdir()}) == 1
    weights = load_file(newest / "model.safetensors")
    assert largest_difference(weights, final_weights(root, reference)) == 0.0
    for file in ("exp_avg", "exp_avg_sq"):
        moments = load_file(newest / f"{file}.safetensors")
        assert {name: tensor.shape for name, tensor in moments.items()} == \
            {name: tensor.shape for name, tensor in weights.items()}
        assert all(tensor.abs().sum() > 0 and tensor.dtype == torch.float32 for tensor in moments.values())


def test_a_damaged_newest_checkpoint_is_passed_over_saying_so(root, caplog):
    changes = ("trainer.max_steps=9", "trainer.save_every=3", "trainer.keep_checkpoints=3", "trainer.keep_best=false")
    train(run_of(root, "damaged", *changes))
    numbers = logged(root, "damaged", *NUMBERS)
    for step, file in ((9, "exp_avg.safetensors"), (6, "manifest.json")):
        path = root / "damaged" / "checkpoints" / f"step-{step}" / file
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with caplog.at_level(logging.WARNING, "train.checkpoint"):
        resumed = run_of(root, "damaged", *changes)
    assert resumed.state.step == 3
    first, second = (record.getMessage() for record in caplog.records if record.name == "train.checkpoint")
    assert "step-9/exp_avg.safetensors is missing or damaged" in first and first.endswith("step-3")
    assert "step-6/manifest.json is damaged" in second
    train(resumed)
    assert logged(root, "damaged", *NUMBERS) == numbers


def test_the_best_checkpoint_is_kept_beside_the_newest(root):
    run = run_of(root, "best", "trainer.keep_checkpoints=1", "trainer.validate_every=2", "trainer.save_every=100")
    train(run)
    measured = logged(root, "best", "validation/simulated_tau/candidates")
    best = max(measured, key=lambda line: line[1])
    assert [run.state.best_step, run.state.best_tau] == best
    assert folders(root, "best") == {"latest", f"step-{int(best[0])}", f"step-{run.total_steps}"}
    state = json.loads((run.checkpoints.folder / f"step-{run.total_steps}" / "state.json").read_text())["state"]
    assert state["best_step"] == best[0]


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(root):
    """Here: a limit on the size of a file, which the kernel reports in the same way."""
    run = run_of(root, "disk-full", "trainer.keep_best=false")
    save = run.checkpoints.save

    def full_at_8(state, updater):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if state.step == 8 else hard, hard))
        try:
            save(state, updater)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    run.checkpoints.save = full_at_8
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 8 could not be written to .*File too large.* "
                                              r"those before it are intact: make room"):
        train(run)
    assert folders(root, "disk-full") == {"latest", "step-4"}
    resumed = run_of(root, "disk-full", "trainer.keep_best=false")
    assert resumed.state.step == 4
    train(resumed)
    assert folders(root, "disk-full") == {"latest", "step-8", f"step-{resumed.total_steps}"}


@may_mount
def test_a_full_file_system_ends_the_command_in_one_line(root, tmp_path):
    """A tmpfs with room for one checkpoint and a half."""
    run = run_of(root, "size", "trainer.max_steps=1")
    train(run)
    size = sum(path.stat().st_size for path in (run.checkpoints.folder / "step-1").iterdir())
    settings = overrides(root, "small", "trainer.save_every=2", f"output_dir={tmp_path}/disk/run")
    (tmp_path / "disk").mkdir()
    script = (f"mount -t tmpfs -o size={int(size * 1.6) // 1024}k none {tmp_path}/disk && "
              f"{{ {sys.executable} train/main.py \"$@\"; code=$?; ls {tmp_path}/disk/run/checkpoints; exit $code; }}")
    job = Job(tmp_path, settings, command=[*PRIVATE_MOUNTS, "sh", "-c", script, "sh"])
    job.wait()
    assert job.process.returncode == 1, job.stderr[-3000:]
    errors = [line for line in job.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in job.stderr
    assert "the checkpoint of step 4 could not be written to" in errors[0] and "No space left" in errors[0]
    assert job.stdout.splitlines()[-2:] == ["latest", "step-2"]

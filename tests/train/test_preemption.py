"""Signals: one checkpoint, an exit code for the scheduler, and a resumed run that is the unbroken one."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests.train.launching import Job, launch, torchrun
from tests.train.runs import logged, overrides, run_of
from tests.train.test_distributed import assert_same_training
from tests.train.test_main import run_command
from train import preemption
from train.loop import train

NUMBERS = ("train/objective", "optim/grad_norm", "optim/lr", "train/loss", "train/simulated_tau/candidates")


@pytest.fixture
def signals():
    """What a test installs and sends is gone after it."""
    handlers = {number: signal.getsignal(number) for number in preemption.SIGNALS}
    yield
    preemption._received.clear()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def wandb_ids(folder: Path) -> set[str]:
    return {path.name.rpartition("-")[2] for path in (folder / "wandb").glob("offline-run-*")}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_ranks_that_are_signalled_at_a_random_moment_train_as_if_they_never_were(root):
    """Launcher, ranks and loader workers, as Slurm does it; in a step, in validation or while saving."""
    name, changes = "signalled", ("trainer.num_epochs=5", "trainer.validate_every=2", "trainer.save_every=3")
    train(run_of(root, "unsignalled", *changes))
    arguments = overrides(root, name, *changes, "trainer.gradient_accumulation_steps=2", "distributed=ddp",
                          "data.num_workers=1", "tracking=wandb")
    job = Job(root / "logs", arguments, torchrun(), WANDB_MODE="offline")
    job.wait_until(lambda: "step 2/" in job.stdout)
    time.sleep(random.uniform(0, 0.5))
    job.signal_all(signal.SIGTERM)
    assert job.wait() != 0, "it was too fast for the signal"
    stopped = re.search(r"stopped by a signal after step (\d+);", job.stdout)
    assert stopped is not None, job.stderr
    folder = root / name
    assert (folder / "checkpoints" / "latest").read_text() == f"step-{stopped[1]}"
    assert not list((folder / "checkpoints").glob(".*")) and not (folder / "final").exists()
    finished = launch(root / "logs", arguments, torchrun(), WANDB_MODE="offline")
    assert finished.process.returncode == 0, finished.stderr[-3000:]
    assert f"step {stopped[1]}/" not in finished.stdout
    assert_same_training(root, name, "unsignalled")
    assert len(wandb_ids(folder)) == 1


def signal_when(monkeypatch, function: str, number: signal.Signals, condition: Callable[[], bool]) -> None:
    """Send this process a signal when ``function`` is called, before it does anything."""
    module, name = function.rsplit(".", 1)
    original = getattr(import_module(module), name)

    def signalled(*arguments: object) -> object:
        if condition():
            os.kill(os.getpid(), number)
        return original(*arguments)

    monkeypatch.setattr(function, signalled)


@pytest.mark.parametrize(("number", "function", "saved"), [
    (signal.SIGTERM, "train.loop.requested", 6),  # at the beginning of step 7
    (signal.SIGUSR1, "train.checkpoint.write_manifest", 4),  # in the middle of saving it
])
def test_one_process_exits_with_75_and_the_same_command_goes_on(
    root, reference, monkeypatch, signals, number, function, saved
):
    name = f"single-{number.name}"
    signal_when(monkeypatch, function, number, lambda: len(logged(root, name, "train/loss")) == saved)
    assert run_command(monkeypatch, overrides(root, name)) == preemption.EXIT_PREEMPTED == 75
    checkpoints = root / name / "checkpoints"
    assert (checkpoints / "latest").read_text() == f"step-{saved}" and not list(checkpoints.glob(".*"))
    preemption._received.clear()
    monkeypatch.undo()
    assert run_command(monkeypatch, overrides(root, name)) == 0
    assert logged(root, name, *NUMBERS) == logged(root, reference, *NUMBERS)


def test_a_signal_during_validation_is_obeyed_there_and_the_validation_done_after_the_resume(
    root, reference, monkeypatch
):
    run = run_of(root, "validating")
    monkeypatch.setattr("train.validation.requested", lambda: run.state.step == 8)
    with pytest.raises(preemption.Preempted):
        train(run)
    monkeypatch.undo()
    assert [step for step, _ in logged(root, "validating", "validation/loss")] == [4]
    resumed = run_of(root, "validating")
    assert resumed.state.step == 8 and resumed.state.validated_step == 4
    train(resumed)
    assert logged(root, "validating", "validation/loss") == logged(root, reference, "validation/loss")
    assert logged(root, "validating", *NUMBERS) == logged(root, reference, *NUMBERS)


def test_a_signal_before_the_first_step_writes_nothing(root, monkeypatch):
    run = run_of(root, "early")
    monkeypatch.setattr("train.loop.requested", lambda: True)
    with pytest.raises(preemption.Preempted):
        train(run)
    assert not run.checkpoints.folder.exists()

"""Two real ranks on the CPU, started as users start them, against one rank with twice the accumulation."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.export import export
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.target import load_spec
from tests.train.runs import config_of, final_weights, largest_difference, logged, overrides

REPOSITORY = Path(__file__).resolve().parents[2]
NUMBERS = ("train/objective", "optim/grad_norm", "optim/lr", "train/loss", "train/simulated_tau/candidates")
TWO_RANKS = "trainer.gradient_accumulation_steps=2"  # the reference accumulates 4 on its one rank
TIMEOUT_S = 400  # DeepSpeed compiles an extension the first time

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed on the CPU compiles an extension")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(
    launcher: list[str], arguments: list[str], script: str = "train/main.py"
) -> subprocess.CompletedProcess[str]:
    """Run a script under a launcher from the repository root, as in the README."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PYTEST_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)  # a DeepSpeed run in this process may have left them
    environ["OMP_NUM_THREADS"] = "1"
    return subprocess.run([sys.executable, "-m", *launcher, script, *arguments], cwd=REPOSITORY, env=environ,
                          capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def torchrun() -> list[str]:
    return ["torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]


def accelerate_deepspeed() -> list[str]:
    return ["accelerate.commands.launch", "--use_deepspeed", "--num_processes=2", "--num_machines=1",
            "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_port()}"]


def assert_same_training(root: Path, name: str, reference: str) -> None:
    for names in (NUMBERS, ("validation/loss", "validation/simulated_tau/full")):
        np.testing.assert_allclose(logged(root, name, *names), logged(root, reference, *names), rtol=5e-5)
    # Adam turns rounding in a gradient near zero into a part of a learning rate (3e-3).
    assert largest_difference(final_weights(root, name), final_weights(root, reference)) < 3e-4


def test_two_ddp_ranks_train_as_one(root, reference):
    """Uneven counts, a micro-batch without valid positions on one rank, and an empty one in the last group."""
    finished = launch(torchrun(), overrides(root, "ddp", TWO_RANKS, "distributed=ddp"))
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.count("step 1/") == 1  # one voice
    assert_same_training(root, "ddp", reference)


@needs_compiler
def test_two_zero2_ranks_that_die_and_resume_train_as_one(root, reference):
    arguments = overrides(root, "zero2", TWO_RANKS, "distributed=zero2")
    died = launch(accelerate_deepspeed(), arguments, script="tests/train/die_in_step_7.py")
    assert died.returncode != 0 and not (root / "zero2" / "final").exists()
    assert (root / "zero2" / "checkpoints" / "latest").read_text() == "step-4", died.stderr[-3000:]
    resumed = launch(accelerate_deepspeed(), arguments)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "step 4/" not in resumed.stdout and resumed.stdout.count("step 5/") == 1
    assert_same_training(root, "zero2", reference)

    config = config_of(arguments)
    exported = SpecVocabDraft.from_pretrained(export(config), target_spec=load_spec(config.target))
    assert largest_difference(exported.state_dict(), final_weights(root, "zero2")) == 0.0


@needs_compiler
@pytest.mark.slow
def test_two_zero3_ranks_train_as_one(root, reference):
    finished = launch(accelerate_deepspeed(), overrides(root, "zero3", TWO_RANKS, "distributed=zero3"))
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert_same_training(root, "zero3", reference)

"""What gloo ranks on a CPU show in test_distributed.py, on two cards of a host."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import torch

from tests.train.launching import Job, free_port, launch, python
from tests.train.runs import logged, overrides

UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}  # compiling takes longer than these runs
ON_CARDS = ("distributed.cpu=false", "target.dtype=bfloat16", "trainer.mixed_precision=bf16", "trainer.num_epochs=12")


def accelerate(cards: int) -> list[str]:
    several = ["--multi_gpu"] if cards > 1 else []
    return python("-m", "accelerate.commands.launch", *several, f"--num_processes={cards}", "--num_machines=1",
                  "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_port()}", "train/main.py")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_two_cards_stop_on_a_signal_to_one_rank_and_one_card_goes_on(root):
    """Same rows in the same steps as one card sees that was never stopped."""
    alone = launch(root / "logs", overrides(root, "one-card", *ON_CARDS), accelerate(1), **UNCOMPILED)
    assert alone.process.returncode == 0, alone.stderr[-3000:]
    two = (*ON_CARDS, "trainer.gradient_accumulation_steps=2", "distributed=zero2")
    job = Job(root / "logs", overrides(root, "two-cards", *two), accelerate(2), **UNCOMPILED)
    job.wait_until(lambda: "step 5/" in job.stdout)
    job.rank(1).send_signal(signal.SIGTERM)
    assert job.wait() != 0 and "stopped by a signal after step " in job.stdout, job.stderr[-3000:]
    stopped_at = int((root / "two-cards" / "checkpoints" / "latest").read_text().removeprefix("step-"))
    assert 5 <= stopped_at < 48
    resumed = launch(root / "logs", overrides(root, "two-cards", *ON_CARDS), accelerate(1), **UNCOMPILED)
    assert resumed.process.returncode == 0, resumed.stderr[-3000:]
    assert f"step {stopped_at}/" not in resumed.stdout
    names = ("train/loss", "optim/lr")
    np.testing.assert_allclose(logged(root, "two-cards", *names), logged(root, "one-card", *names), rtol=2e-2)

"""What gloo ranks on a CPU show in test_distributed.py, on two cards of a host.

    python -m pytest tests/train/test_cards.py

Two jobs at once, then one more, of a model so small that its 48 steps take a few seconds: what takes time is that
processes start. As gloo ranks on two busy CPU cores, the two at once took 35 s (23 s of them until two ranks were in
step 5, 6 s until they and their launcher had ended) and the other 15 s. On cards, a CUDA context and the loss's Triton
kernels come in addition; how long that takes was not measured. Nothing else is compiled: torch.compile is switched off,
since each rank would start a compiling process for every core, and DeepSpeed, given torch's optimizer and nothing to
offload, builds no operator on a GPU.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.train.launching import CARDS, Job, free_port, launch, python
from tests.train.runs import logged, overrides

LIMIT_S = 120  # of one job; what it has printed by then is shown
# The only checkpoint is the signal's.
SETTINGS = ("distributed.cpu=false", "target.dtype=bfloat16", "trainer.mixed_precision=bf16", "trainer.num_epochs=12",
            "trainer.save_every=1000", "trainer.validate_every=1000")


def environment(cards: int) -> dict[str, str]:
    return {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ",".join(CARDS[:cards])}


def accelerate() -> list[str]:
    return python("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
                  "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_port()}", "train/main.py")


@pytest.fixture
def say(capsys) -> Callable[[str], None]:
    """A line at once, whatever pytest keeps back: should the test be killed, it shows how far it was."""
    began = time.monotonic()

    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n{time.monotonic() - began:5.1f} s: {line}", end="", flush=True)

    return say


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_two_cards_stop_on_a_signal_to_one_rank_and_one_card_goes_on(root, say):
    """Same rows in the same steps as one card sees that was never stopped."""
    alone = Job(root / "logs", overrides(root, "one-card", *SETTINGS), python("train/main.py"), limit_s=LIMIT_S,
                **environment(1))
    two = (*SETTINGS, "trainer.gradient_accumulation_steps=2", "distributed=zero2")
    job = Job(root / "logs", overrides(root, "two-cards", *two), accelerate(), limit_s=LIMIT_S, **environment(2))
    say(f"two jobs started, their output is in {root / 'logs'}")
    job.wait_until(lambda: "step 5/" in job.stdout)
    job.rank(1).send_signal(signal.SIGTERM)
    say("two cards are in step 5, and one rank has been signalled")
    assert job.wait() != 0 and "stopped by a signal after step " in job.stdout, job.tails()
    stopped_at = int((root / "two-cards" / "checkpoints" / "latest").read_text().removeprefix("step-"))
    assert 5 <= stopped_at < 48
    say(f"two cards have stopped after step {stopped_at}")
    assert alone.wait() == 0, alone.tails()
    say("one card has made all steps; it goes on where the two stopped")
    resumed = launch(root / "logs", overrides(root, "two-cards", *SETTINGS), python("train/main.py"), limit_s=LIMIT_S,
                     **environment(1))
    assert resumed.process.returncode == 0, resumed.tails()
    say("and has come to the end")
    assert f"step {stopped_at}/" not in resumed.stdout
    # The teacher's entropy is a matter of the step's rows alone; the losses are of bf16 products, summed in other ways.
    for name, tolerance in (("train/teacher_entropy", 1e-3), ("optim/lr", 0.0), ("train/loss", 2e-2)):
        np.testing.assert_allclose(logged(root, "two-cards", name), logged(root, "one-card", name), rtol=tolerance)

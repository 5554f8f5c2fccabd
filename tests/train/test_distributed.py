"""Real ranks on the CPU, started as users start them, against one rank that accumulates as many rows."""

from __future__ import annotations

import re
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from scripts.export import export
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.target import load_spec
from tests.forking import forking
from tests.tiny import untied
from tests.train import see_the_end
from tests.train.count_collectives import counting, poison
from tests.train.launching import (
    Job,
    accelerate_deepspeed,
    fork_ranks,
    free_port,
    launch,
    python,
)
from tests.train.runs import (
    config_of,
    final_weights,
    largest_difference,
    logged,
    overrides,
    run_of,
    write_uneven_experiment,
)
from train.loop import train

NUMBERS = ("train/objective", "optim/grad_norm", "optim/lr", "train/loss", "train/simulated_tau/candidates")
TWO_RANKS = "trainer.gradient_accumulation_steps=2"  # the reference accumulates 4 on its one rank
FOUR_RANKS = "trainer.gradient_accumulation_steps=1"


def assert_same_training(root: Path, name: str, reference: str) -> None:
    for names in (NUMBERS, ("validation/loss", "validation/simulated_tau/full")):
        np.testing.assert_allclose(logged(root, name, *names), logged(root, reference, *names), rtol=5e-5)
    assert (root / name / "samples.jsonl").read_text() == (root / reference / "samples.jsonl").read_text() != ""
    # Adam turns rounding in a gradient near zero into a part of a learning rate (3e-3).
    assert largest_difference(final_weights(root, name), final_weights(root, reference)) < 3e-4


def test_four_ddp_ranks_of_two_machines_train_as_one(root, reference):
    """Uneven counts, micro-batches without valid positions on some ranks, and empty ones in the last group."""
    arguments = overrides(root, "ddp", FOUR_RANKS, "distributed=ddp")
    job = fork_ranks(root / "logs", arguments, 4, see_the_end.watched, nodes=2)
    assert job.codes == [0] * 4, job.output[-3000:]
    assert job.output.count("0 models left on rank") == 4
    assert len(re.findall(r"^step 1/\d+ \| objective .* \| ETA \d:\d\d:\d\d$", job.output, re.M)) == 1  # one voice
    step = "ddp: 4 ranks x 1 micro-batches x 1 rows of 48 tokens = 4 rows, 192 tokens a step, 3.8% of them padding; "
    assert step in job.output
    assert "memory of a rank, estimated: parameters 0.0, optimizer 0.0" in job.output
    assert_same_training(root, "ddp", reference)


@pytest.mark.slow
def test_two_zero2_ranks_of_which_one_dies_go_on_as_zero3_and_then_as_one_rank(root, reference):
    """A checkpoint belongs to no strategy and no number of ranks; the data order is that of the steps."""
    arguments = overrides(root, "moving", TWO_RANKS)
    died = launch(root / "logs", [*arguments, "distributed=zero2"],
                  accelerate_deepspeed(script="tests/train/die_in_step_7.py"))
    assert died.process.returncode != 0 and not (root / "moving" / "final").exists()
    assert (root / "moving" / "checkpoints" / "latest").read_text() == "step-4", died.stderr[-3000:]

    with forking():
        job = Job(root / "logs", [*arguments, "distributed=zero3"], accelerate_deepspeed(),
                  TORCH_EXTENSIONS_DIR=str(root / "extensions"))
    job.wait_until(lambda: "step 5/" in job.stdout)
    job.rank(1).send_signal(signal.SIGTERM)
    assert job.wait() != 0 and "exitcode  : 75" in job.stderr, job.stderr[-3000:]
    assert not (root / "extensions").exists()  # nothing is compiled
    assert "step 4/" not in job.stdout and "stopped by a signal after step " in job.stdout

    config = config_of(overrides(root, "moving"))
    run = run_of(root, "moving")
    assert 5 <= run.state.step < run.total_steps
    train(run)
    assert_same_training(root, "moving", reference)
    exported = SpecVocabDraft.from_pretrained(export(config), target_spec=load_spec(config.target))
    assert largest_difference(exported.state_dict(), untied(final_weights(root, "moving"), run.target)) == 0.0


@pytest.mark.slow
def test_zero3_ranks_with_0_64_and_320_valid_tokens_and_a_sharded_target(tmp_path):
    """They run the same collectives in the same order, and train as one rank that holds the whole target; also when
    a gradient, and then a loss, of rank 2 is not finite, and all skip the step."""
    root = write_uneven_experiment(tmp_path, valid=(0, 64, 320))
    changes = ("data.seq_len=400", "trainer.num_epochs=4", "trainer.skip_non_finite=2")
    one = run_of(root, "one", *changes, "trainer.gradient_accumulation_steps=3")
    poison(one.updater, micro_batch=2)
    train(one)
    arguments = overrides(root, "three", *changes, "trainer.gradient_accumulation_steps=1", "distributed=zero3",
                          "distributed.shard_target=true")
    job = fork_ranks(root / "logs", arguments, 3, partial(counting, str(tmp_path)))
    assert job.codes == [0] * 3, job.output[-3000:]
    assert "gradient norm inf; on ranks [0, 1, 2], rows row-" in job.output  # every loss is finite: all are suspects
    assert re.search(r"step 3: loss nan, gradient norm inf; on ranks \[2\], rows row-\d\. Skipped, 2 of at most 2",
                     job.output), job.output[-3000:]
    assert one.state.skipped_steps == 2
    assert_same_training(root, "three", "one")
    of_ranks = [(tmp_path / f"collectives-{rank}").read_text() for rank in range(3)]
    assert of_ranks[0] == of_ranks[1] == of_ranks[2] and of_ranks[0].count("all_gather_into_tensor") > 20


def test_two_zero1_ranks_skip_what_is_not_finite_and_train_as_one(root, tmp_path):
    """ZeRO-2's optimizer is the same."""
    changes = ("trainer.max_steps=4", "trainer.skip_non_finite=2")
    one = run_of(root, "skipping-one", *changes)
    poison(one.updater, micro_batch=1)
    train(one)
    arguments = overrides(root, "skipping-zero1", *changes, TWO_RANKS, "distributed=zero1")
    job = fork_ranks(root / "logs", arguments, 2, partial(counting, str(tmp_path)))
    assert job.codes == [0, 0], job.output[-3000:]
    assert "step 3: loss nan, gradient norm inf; on ranks [1], " in job.output and "2 of at most 2" in job.output
    assert_same_training(root, "skipping-zero1", "skipping-one")


@pytest.mark.usefixtures("forked")
def test_a_rank_that_hangs_ends_the_others_in_bounded_time(root):
    """Without a launcher, which would end them: the process group's own timeout does."""
    port = str(free_port())
    arguments = overrides(root, "hanging", TWO_RANKS, "distributed=ddp", "distributed.timeout_s=3",
                          "trainer.num_epochs=1000", "trainer.validate_every=1000", "trainer.save_every=1000")
    jobs = [Job(root / "logs", arguments, python("train/main.py"), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in range(2)]
    jobs[0].wait_until(lambda: "step 2/" in jobs[0].stdout)
    jobs[1].process.send_signal(signal.SIGSTOP)
    assert jobs[0].wait() not in (0, 75)
    assert "timed out" in jobs[0].stderr.lower(), jobs[0].stderr[-3000:]
    jobs[1].process.kill()
    jobs[1].wait()

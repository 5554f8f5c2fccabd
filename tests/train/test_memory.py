"""The memory estimate, against what a card measured and against tensors that can be counted."""

from __future__ import annotations

import copy

import pytest
import torch

from scripts.bench_distributed import SHAPE, build_draft
from specvocab_model.config import Config, DataConfig, DistributedConfig, DraftConfig, HeadConfig, TrainerConfig
from tests.train.runs import run_of
from train.loop import train
from train.memory import MemoryEstimate, describe_step, resident_bytes
from train.optim import MOMENTS


def config(strategy: str = "single", **data) -> Config:
    return Config(run_name="run", data=DataConfig(train_path="a", validation_path="b", **data),
                  head=HeadConfig(rank=512, tied=False), draft=DraftConfig(num_unroll_steps=7),
                  distributed=DistributedConfig(strategy=strategy),
                  trainer=TrainerConfig(gradient_accumulation_steps=8))


@pytest.fixture(scope="module")
def qwen3_8b():
    with torch.device("meta"):
        return build_draft(config(), SHAPE, torch.device("meta"))


@pytest.mark.parametrize(("seq_len", "measured"), [(2048, 8.8), (4096, 10.5), (8192, 14.1)])
def test_qwen3_8b_on_an_h200(qwen3_8b, seq_len, measured):
    """docs/PERFORMANCE.md: seven steps, 80 % of the positions supervised, no target but its embedding, head.tied=false.
    """
    embedding = 2 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    estimate = MemoryEstimate.of(config(seq_len=seq_len), qwen3_8b, embedding, 1)
    assert measured < estimate.total / 2**30 < 1.3 * measured


def test_what_the_strategies_share_out(qwen3_8b):
    count = sum(parameter.numel() for parameter in qwen3_8b.parameters())
    of = {name: MemoryEstimate.of(config(name), qwen3_8b, 0, 8)
          for name in ("single", "ddp", "zero1", "zero2", "zero3")}
    assert of["single"] == of["ddp"] and of["ddp"].optimizer == 8 * count
    assert {of[name].optimizer for name in ("zero1", "zero2", "zero3")} == {12 * count / 8}
    assert of["zero1"].gradients - of["zero2"].gradients == 4 * count * 7 / 8
    assert of["zero3"].parameters - of["zero2"].parameters == 4 * count / 8


def test_parameters_moments_and_target_are_counted_to_the_byte(root):
    run = run_of(root, "counted-bytes", "trainer.max_steps=1")
    estimate = MemoryEstimate.of(run.config, run.model, resident_bytes(run.target, run.config), 1)
    assert estimate.parameters == sum(parameter.nbytes for parameter in run.model.parameters())
    train(run)
    states = run.updater.optimizer.state.values()
    assert estimate.optimizer == sum(state[key].nbytes for state in states for key in MOMENTS)
    assert resident_bytes(run.target, run.config) == sum(weight.nbytes for weight in run.target.model.parameters())


def test_a_tied_head_takes_less(qwen3_8b):
    """r V numbers in the optimizer make room for 2 r d, and for the product and its gradient while the loss is made."""
    other = copy.deepcopy(qwen3_8b)
    other.speculator.tie()
    free, tied = (MemoryEstimate.of(config(), model, 0, 1) for model in (qwen3_8b, other))
    rank, vocab_size, hidden_size = 512, SHAPE["vocab_size"], SHAPE["hidden_size"]
    assert free.optimizer - tied.optimizer == 8 * rank * (vocab_size - hidden_size)
    assert tied.loss - free.loss == 6 * rank * vocab_size and tied.total < free.total


def test_a_step_in_words():
    assert describe_step(config("zero2", seq_len=2048), 8, 100, 300, 0.0123) == (
        "zero2: 8 ranks x 8 micro-batches x 1 rows of 2048 tokens = 64 rows, 131072 tokens a step, "
        "1.2% of them padding; 100 steps an epoch, 300 in all")


@pytest.mark.parametrize("padding, steps, warned", [(0.23, 100, True), (0.09, 100, False), (0.23, 7, False)])
def test_rows_of_which_many_documents_take_more_than_half_are_warned_of(padding: float, steps: int, warned: bool):
    """Of two documents of 1100 tokens, which a row of 2048 has no room for."""
    line = describe_step(config("single", seq_len=2048), 1, steps, 300, padding)
    assert ("\nwarning: " in line and "set data.seq_len=4096 trainer.micro_batch_size=1" in line) == warned

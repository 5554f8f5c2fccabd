"""The FLOPs that MFU is made of, against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from specvocab_model.losses import valid_counts
from specvocab_model.unroll import plan_unroll
from tests.train.runs import config_of, overrides
from train.build import build_run
from train.metrics import FlopsModel, IntervalMeter
from train.packing import Batch


@pytest.mark.parametrize("prompt", [4, 5, 13])
@pytest.mark.parametrize("head", ["speculative", "full"])
def test_flops_are_those_of_torchs_counter(root, prompt, head):
    """``prompt``: tokens of each document that are not supervised. From 4 on, all 3 steps predict every other one."""
    run = build_run(config_of(overrides(root, f"flops-{prompt}-{head}", f"head={head}")))
    length = 16
    loss_mask, document_ids = (torch.arange(length) >= prompt).long().repeat(6, 1), torch.zeros(6, length).long()
    batch = Batch(
        input_ids=torch.randint(0, 200, (6, length)),
        position_ids=torch.arange(length).repeat(6, 1),
        document_ids=document_ids,
        loss_mask=loss_mask,
        num_slots=6 * length,
        row_ids=(),
        plan=plan_unroll(loss_mask, document_ids, 3),
    )
    with FlopCounterMode(display=False) as counter:
        run.forward(batch, torch.ones(3), collect=False).loss.backward()
    counts = valid_counts(batch.loss_mask, batch.document_ids, 3)
    tying = 4 * run.target.lm_head_weight.numel() * run.model.speculator.rank if head == "speculative" else 0
    num_unrolled = 6 * (length - (prompt - 4))  # from 2 + 2 positions before the first supervised token
    modelled = tying + FlopsModel.of(run.target, run.model).step(6 * length, num_unrolled, counts)
    counted = counter.get_flop_counts()["Global"]
    products = counted[torch.ops.aten.mm] + counted.get(torch.ops.aten.addmm, 0)  # attention scores are bmm, sdpa
    assert modelled == pytest.approx(products, rel=0.002)  # the model counts the target's norm weights too


def test_rates_are_over_the_interval_without_validation(monkeypatch):
    now = iter([0.0, 2.0, 10.0, 12.0])
    monkeypatch.setattr("train.metrics.time.perf_counter", lambda: next(now))
    flops = FlopsModel(target_body=1, fuse=0, projections=0, rest=1, lm_head=0, speculator=0)
    meter = IntervalMeter(flops, peak=1000.0)
    meter.restart_clock()
    meter.update(3.0, 100, 90, torch.tensor([40, 30]))
    meter.restart_clock()  # 8 seconds of validation
    meter.update(1.0, 300, 250, torch.tensor([60, 50]))
    assert meter.flush() == {"train/objective": 2.0, "perf/seconds_per_step": 2.0, "perf/tokens_per_second": 100.0,
                             "perf/valid_tokens_per_second": 25.0,
                             "perf/mfu": (2 * 400 + 6 * 2 * 340) / 4.0 / 1000.0}

"""The FLOPs that MFU is made of, against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from specvocab_model.losses import valid_counts
from tests.train.runs import config_of, overrides
from train.build import build_run
from train.metrics import FlopsModel, IntervalMeter
from train.packing import Batch


def test_flops_agree_with_torchs_counter(root):
    run = build_run(config_of(overrides(root, "flops")))
    length = 8  # short: attention scores are left out of the model
    batch = Batch(
        input_ids=torch.randint(0, 200, (6, length)),
        position_ids=torch.arange(length).repeat(6, 1),
        document_ids=torch.zeros(6, length, dtype=torch.long),
        loss_mask=torch.ones(6, length, dtype=torch.long),
        num_slots=6 * length,
        row_ids=(),
    )
    with FlopCounterMode(display=False) as counter:
        run.forward(batch, torch.ones(3), collect=False).loss.backward()
    counts = valid_counts(batch.loss_mask, batch.document_ids, 3)
    assert counts.tolist() == [6 * 6, 6 * 5, 6 * 4]
    modelled = FlopsModel.of(run.target, run.model).step(6 * length, counts)
    assert modelled == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_rates_are_over_the_interval_without_validation(monkeypatch):
    now = iter([0.0, 2.0, 10.0, 12.0])
    monkeypatch.setattr("train.metrics.time.perf_counter", lambda: next(now))
    meter = IntervalMeter(None, None)
    meter.restart_clock()
    meter.update(3.0, 100, torch.tensor([40, 30]))
    meter.restart_clock()  # 8 seconds of validation
    meter.update(1.0, 300, torch.tensor([60, 50]))
    assert meter.flush() == {"train/objective": 2.0, "perf/seconds_per_step": 2.0, "perf/tokens_per_second": 100.0,
                             "perf/valid_tokens_per_second": 25.0}

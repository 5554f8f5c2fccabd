"""Learning rate by optimizer step, and who gets weight decay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from specvocab_model.config import OptimConfig
from train.optim import build_optimizer, learning_rate

CONFIG = OptimConfig(lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.2)


@pytest.mark.parametrize(("step", "expected"), [(1, 0.1), (5, 0.5), (10, 1.0), (55, 0.6), (100, 0.2)])
def test_values_by_hand(step, expected):
    assert learning_rate(step, 100, CONFIG) == pytest.approx(expected)


def test_agrees_with_torch_schedulers():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=0.2)
    for step in range(10, 101):
        assert learning_rate(step, 100, CONFIG) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()


@given(total=st.integers(1, 500), warmup=st.floats(0, 1), floor=st.floats(0, 1))
def test_rises_then_falls_and_ends_at_the_floor(total, warmup, floor):
    config = OptimConfig(lr=2.0, warmup_ratio=warmup, min_lr_ratio=floor)
    rates = [learning_rate(step, total, config) for step in range(1, total + 1)]
    top = max(range(total), key=rates.__getitem__)
    assert all(0 <= rate <= 2.0 for rate in rates)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(2.0 * floor) or top == total - 1  # warm-up may last to the end


def test_weight_decay_is_for_matrices_and_frozen_parameters_are_left_out():
    model = nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.RMSNorm(2), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    decayed, plain = build_optimizer(model, OptimConfig(weight_decay=0.3)).param_groups
    assert [id(p) for p in decayed["params"]] == [id(model["linear"].weight)] and decayed["weight_decay"] == 0.3
    assert {id(p) for p in plain["params"]} == {id(model["linear"].bias), id(model["norm"].weight)}
    assert plain["weight_decay"] == 0.0 and plain["betas"] == (0.9, 0.95)


def test_parameters_that_are_not_fp32_are_refused():
    with pytest.raises(ValueError, match=r"parameter weight is torch\.bfloat16; trainable parameters must be fp32"):
        build_optimizer(nn.Linear(2, 2).bfloat16(), OptimConfig())

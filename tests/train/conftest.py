"""Fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from tests.train.launching import CARDS
from tests.train.runs import config_of, overrides, write_experiment
from train.build import build_run
from train.loop import train


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of this process may use a card, whatever was run before; the next test finds accelerate as new."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", CARDS[0])
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Folder of a tiny experiment; every run in it has a name of its own."""
    return write_experiment(tmp_path_factory.mktemp("experiment"))


@pytest.fixture(scope="session")
def reference(root) -> str:
    """Name of an unbroken run on one rank, 4 accumulated micro-batches of one row."""
    train(build_run(config_of(overrides(root, "reference"))))
    return "reference"

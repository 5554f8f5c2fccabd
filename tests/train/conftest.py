"""Fixtures of the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import config_of, overrides, write_experiment
from train.build import build_run
from train.loop import train


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Folder of a tiny experiment; every run in it has a name of its own."""
    return write_experiment(tmp_path_factory.mktemp("experiment"))


@pytest.fixture(scope="session")
def reference(root) -> str:
    """Name of an unbroken run on one rank, 4 accumulated micro-batches of one row."""
    train(build_run(config_of(overrides(root, "reference"))))
    return "reference"

"""What every test needs before torch or Triton is first used."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Tests share helpers (`from tests.tiny import ...`) whatever the directory pytest is started from.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# The models are tiny: more threads only fight each other, the more so under pytest-xdist. Also those of the processes
# that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from transformers.utils import logging as transformers_logging

from tests.forking import forking

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so it must be set before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# `datasets` keeps an Arrow copy of every folder that it reads; those of the tests go when the tests end.
ARROW_CACHE = tempfile.TemporaryDirectory(prefix="specvocab-tests-")
os.environ["HF_DATASETS_CACHE"] = ARROW_CACHE.name

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()


@pytest.fixture
def forked() -> Iterator[None]:
    """What the test starts with ``sys.executable`` is forked from this process: see ``tests/forking.py``."""
    with forking():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Whole files go to the workers in this order; a long one that comes last keeps one of them waiting.
    long_files = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in long_files)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; none is visible")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)

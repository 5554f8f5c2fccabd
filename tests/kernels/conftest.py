"""Kernel tests run on the GPU where there is one, otherwise in Triton's interpreter (tests/conftest.py)."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

"""Kernel tests run on the GPU where there is one, otherwise in Triton's interpreter (tests/conftest.py)."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "kernels" / "benchmarks"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def load_benchmark() -> Callable[[str], ModuleType]:
    """A benchmark by file name: they cannot be imported, because ``kernels`` must not be a package."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load

"""Fixtures of the commands' tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A command's handler of SIGTERM is gone after the test, or another would fail when pytest is stopped."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)

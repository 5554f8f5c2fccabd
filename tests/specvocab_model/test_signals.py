"""What is started while signals are held back gets those that this process would get, and no others."""

import signal
import subprocess

import pytest

from specvocab_model.signals import TO_STOP, held_back


def started(number: int) -> str:
    """What a shell says that is started while signals are held back, and signals itself."""
    command = ["sh", "-c", f"kill -{int(number)} $$; echo lives"]
    with held_back():
        return subprocess.run(command, capture_output=True, text=True).stdout


@pytest.mark.parametrize("number", TO_STOP)
def test_what_is_started_within_ignores_what_is_ignored_here(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert started(number) == ""
        signal.signal(number, signal.SIG_IGN)
        assert started(number) == "lives\n"
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)

"""What is started while signals are held back gets those that this process would get, and no others."""

import signal
import subprocess
import sys
import time

import pytest

from specvocab_model.signals import TO_STOP, held_back, running


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


class Stop(Exception):
    """What handlers of the tests raise."""


def stop(number, frame):
    raise Stop(number)


@pytest.fixture
def handlers():
    before = {number: signal.signal(number, stop) for number in TO_STOP}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("call", range(1, 5), ids=["first set", "second set", "first put back", "second put back"])
@pytest.mark.parametrize("number", TO_STOP)
def test_a_signal_while_handlers_are_exchanged_stops_and_all_are_put_back(number, call, handlers, monkeypatch):
    exchange, calls = signal.signal, []

    def arriving(each, handler):
        before = exchange(each, handler)
        calls.append(each)
        if len(calls) == call:
            signal.raise_signal(number)
        return before

    monkeypatch.setattr(signal, "signal", arriving)
    with pytest.raises(Stop), held_back():
        pass
    monkeypatch.undo()
    for each in TO_STOP:
        with pytest.raises(Stop):
            signal.raise_signal(each)


def test_what_runs_is_told_to_end_when_this_process_exits(tmp_path):
    begun = time.monotonic()
    with pytest.raises(SystemExit), running([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        sys.exit(3)
    assert process.returncode == -signal.SIGTERM and time.monotonic() - begun < 30

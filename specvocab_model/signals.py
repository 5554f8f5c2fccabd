"""A process that is stopped while it starts another, or waits for it: the other must not live on alone."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

TO_STOP = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 30.0  # for a process to end after it was told to


@contextmanager
def held_back() -> Iterator[None]:
    """SIGINT and SIGTERM to this process take effect at the end.

    They are remembered, not blocked: what is started within would never get them. One that this process ignores, as
    shells have a command in the background do, is ignored by what is started within too.
    """
    received: list[int] = []
    before: dict[int, Any] = {}
    holding = True

    def hold(number: int, frame: FrameType | None) -> None:
        if holding:
            received.append(number)
        else:  # one arrives, or has cut this function short, while the handlers are put back
            signal.signal(number, before[number])
            signal.raise_signal(number)

    try:
        for number in TO_STOP:
            if (handler := signal.getsignal(number)) is not signal.SIG_IGN:
                before[number] = handler  # first, so that it is put back whenever a signal arrives
                signal.signal(number, hold)
        yield
    finally:
        holding = False
        for each, handler in before.items():
            signal.signal(each, handler)
        for each in received:
            signal.raise_signal(each)


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command``, which does not outlive the context where an exception leaves it.

    Ctrl-C reaches the command as well: its end is waited for. Else it is told to end: also by SIGTERM to this process,
    where that raises ``SystemExit`` (``exit_on_sigterm``).

    Args:
        options: of ``subprocess.Popen``.
    """
    process = None  # as long as nothing is started: a signal may come before that
    try:
        with held_back():
            process = subprocess.Popen(command, **options)
        yield process
    except BaseException as stop:
        if process is not None:
            _end(process, told=isinstance(stop, KeyboardInterrupt))
        raise


def _end(process: subprocess.Popen[bytes], *, told: bool) -> None:
    if not told:
        process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def exit_on_sigterm() -> None:
    """From now on SIGTERM raises ``SystemExit`` in the main thread, so that what was begun is ended."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)

"""Signals that ask a run to stop: all ranks agree, save once, and exit so that the scheduler can start them again.

Slurm sends SIGTERM (and, with ``--signal``, SIGUSR1 in advance) to all processes, Kubernetes SIGTERM to the launcher,
which passes it on if it has started several ranks, and a user may signal a single rank. A handler here only remembers;
the loop asks all ranks at every step and within validation, in a sum that it makes anyway.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: start the same command again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_received: list[int] = []


class Preempted(Exception):
    """A signal asked some rank to stop; raised on all ranks at the same point."""


def listen() -> None:
    """From now on SIGTERM and SIGUSR1 no longer end this process; the loop looks at ``requested``."""
    for number in SIGNALS:
        signal.signal(number, _remember)


def requested() -> bool:
    """Whether this rank has been asked to stop."""
    return bool(_received)


def _remember(number: int, frame: FrameType | None) -> None:
    _received.append(number)


@contextmanager
def blocked() -> Iterator[None]:
    """What is started within never gets these signals: a process has the mask of the thread that started it.

    For loader workers, since a signal to the whole process group must not take a rank's data away. A worker that began
    with ignoring them would be too late: it can be signalled before. This process gets them afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

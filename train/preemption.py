"""Signals that ask a run to stop: all ranks agree, save once, and exit so that the scheduler can start them again.

Slurm sends SIGTERM (and, with ``--signal``, SIGUSR1 in advance) to all processes, Kubernetes SIGTERM to the launcher,
which passes it on if it has started several ranks, and a user may signal a single rank. A handler here only remembers;
the loop asks all ranks at every step and within validation, in a sum that it makes anyway.
"""

from __future__ import annotations

import signal
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


def ignore_in_worker(worker_id: int) -> None:
    """For loader workers: a signal to the whole process group must not take the rank's data away."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)

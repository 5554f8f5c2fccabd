"""A process that is stopped while it starts another: the other must be known by then, or it would live on alone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

TO_STOP = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_back() -> Iterator[None]:
    """SIGINT and SIGTERM to this process take effect at the end.

    They are remembered, not blocked: what is started within would never get them. One that this process ignores, as
    shells have a command in the background do, is ignored by what is started within too.
    """
    received: list[int] = []
    before = {number: signal.signal(number, lambda each, _: received.append(each)) for number in TO_STOP
              if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in received:
            signal.raise_signal(each)

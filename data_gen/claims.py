"""Who makes which shard: workers that share nothing but a file system take shards as they have time for them.

A claim is a file that only one worker can create. Its worker touches it while it lives; a claim that nobody touches is
taken away. Two workers may still make one shard (a claim taken from a worker that was only suspended, say): both make
the same rows, and a shard appears whole, so that costs time and nothing else.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from specvocab_model.config import ConfigError

HEARTBEAT_S = 5.0
LEASE_S = 120.0  # without a heartbeat; workers of the same host are missed at once


class Claims:
    """The claims of one worker on the shards of one folder; its heartbeat runs as long as the context.

    Staleness is measured with this worker's own clock, from when it saw the claim last change: the clocks of the hosts
    need not agree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: set[Path] = set()
        self._seen: dict[Path, tuple[int, float]] = {}  # when the file was touched, and when we saw that first
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Claims:
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._heart.join()
        for path in self._held:
            _remove(path)
        if error is None:  # nothing is missing any more: what is left was claimed by workers that died
            for path in self.folder.glob(".shard-*.claim"):
                _remove(path)

    def take(self, missing: Callable[[], list[int]], *, first: int = 0) -> int | None:
        """A shard for this worker to make, until ``release``; None if all are made or claimed.

        Asked again and again it gives away what a dead worker had claimed.

        Args:
            missing: the shards that are not there yet.
            first: where in the list of missing shards to look first; workers that look in different places meet less.

        Raises:
            ConfigError: the disk does not take the claim.
        """
        indices = missing()
        start = first % len(indices) if indices else 0
        for index in indices[start:] + indices[:start]:
            if self._path(index) not in self._held and self._take(index):
                if index in missing():  # somebody may have finished it between our two looks
                    return index
                self.release(index)
        return None

    def _path(self, index: int) -> Path:
        return self.folder / f".shard-{index:05d}.claim"

    def _take(self, index: int) -> bool:
        path = self._path(index)
        try:
            with path.open("x") as file:
                file.write(f"{socket.gethostname()} {os.getpid()}")
        except FileExistsError:
            if self._is_abandoned(path):
                self._bury(path)
            return False  # whoever is first next time
        except OSError as error:
            with suppress(OSError):
                path.unlink()  # a full disk may take the name and not the content
            raise ConfigError(f"cannot write {path}: {error.strerror}; see to the disk and start again: what is "
                              "finished is kept") from error
        self._held.add(path)
        return True

    def release(self, index: int) -> None:
        """The shard is made, or will not be."""
        path = self._path(index)
        self._held.discard(path)
        _remove(path)

    def _is_abandoned(self, path: Path) -> bool:
        try:
            host, _, process_id = path.read_bytes().decode(errors="replace").rpartition(" ")
            touched = path.stat().st_mtime_ns
        except OSError:  # gone, or out of reach for now (ESTALE, EIO): whoever looks again will know
            return False
        if host == socket.gethostname() and not _is_running(process_id):
            return True
        before, since = self._seen.get(path, (None, 0.0))
        if before != touched:
            self._seen[path] = (touched, time.monotonic())
            return False
        return time.monotonic() - since > LEASE_S

    def _bury(self, path: Path) -> None:
        grave = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            path.rename(grave)  # one of those who try succeeds
        except OSError:
            return
        _remove(grave)

    def _beat(self) -> None:
        said = False
        while not self._over.wait(HEARTBEAT_S):
            for path in tuple(self._held):
                try:
                    os.utime(path)
                except FileNotFoundError:
                    continue  # released just now, or taken from us; the shard is made all the same
                except OSError as error:  # of a file server that is away for a moment: the next beat may reach it
                    if not said:
                        print(f"cannot touch {path}: {error.strerror}; trying on. If that lasts {LEASE_S:g} s, another "
                              "worker makes the shard as well", file=sys.stderr, flush=True)
                    said = True


def _remove(path: Path) -> None:
    """Remove a claim. One that stays, because the disk will not have it otherwise, is abandoned and taken over."""
    with suppress(OSError):
        path.unlink()


def _is_running(process_id: str) -> bool:
    """Whether there is such a process; what is no number may be one."""
    try:
        os.kill(int(process_id), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        return True
    return True

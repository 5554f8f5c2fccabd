"""Files that exist whole or not at all, and errors of the disk as one line."""

from __future__ import annotations

import filecmp
import hashlib
import io
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from specvocab_model.config import ConfigError

STALE_SECONDS = 3600  # a temporary file is written to every few seconds; after an hour its writer is dead


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever the disk says in this context is about writing ``path``.

    Raises:
        ConfigError: it is full, or does not take the file for another reason.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; see to the disk and start again: what is "
                          "finished is kept") from error


class _Output(io.BufferedWriter):
    """A file whose errors say that it cannot be written; those of whoever makes its content stay what they are."""

    def __init__(self, temporary: Path, path: Path) -> None:
        super().__init__(io.FileIO(temporary, "xb"))
        self.path = path

    def write(self, data: Any) -> int:
        with writing(self.path):
            return super().write(data)

    def flush(self) -> None:
        with writing(self.path):
            super().flush()


@contextmanager
def appearing_whole(path: Path, *, once: bool = False) -> Iterator[IO[bytes]]:
    """Write ``path`` so that it exists with all its content or not at all, even if the machine loses power.

    Args:
        once: a file that is there by then stays, whatever it holds; else only one of the same content does, because
            others may have it mapped, and on a network file system would lose it.

    Raises:
        ConfigError: the disk is full, or does not take it for another reason.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with writing(path):
            file = _Output(temporary, path)
        with file:
            yield file
            file.flush()
            with writing(path):
                os.fsync(file.fileno())
        with writing(path):
            if path.exists() and (once or filecmp.cmp(temporary, path, shallow=False)):
                return
            temporary.replace(path)
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)  # the new name itself
            finally:
                os.close(directory)
    finally:
        with suppress(OSError):  # whatever was wrong has been said
            temporary.unlink()


def remove_stale(folder: Path) -> None:
    """Remove what killed writers have left in ``folder`` under temporary names."""
    for temporary in folder.glob(".*.tmp"):
        with suppress(FileNotFoundError):  # another process does the same
            if time.time() - temporary.stat().st_mtime > STALE_SECONDS:
                temporary.unlink()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` so that the file exists whole or not at all."""
    with appearing_whole(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write one line for each record; the file exists whole or not at all."""
    with appearing_whole(path) as file:
        for record in records:
            file.write((json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))


def make_folder(folder: Path) -> None:
    """
    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}; name another") from error


def refuse_file(folder: Path) -> None:
    """Raises ConfigError where ``folder`` or a folder that it should lie in is a file."""
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; name a folder")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

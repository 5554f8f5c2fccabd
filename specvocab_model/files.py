"""Files that outlive a crash: written whole under their final name, read whole or refused in one line."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

from specvocab_model.config import ConfigError


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """The JSON object in ``path``.

    Args:
        fix: what the user should do if it cannot be read.

    Raises:
        ConfigError: the file is missing, is not JSON, or holds something else than an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{path} is missing; {fix}") from error
    except ValueError as error:  # the base of decoding and JSON errors
        raise ConfigError(f"{path} is damaged: it is not JSON ({error}); {fix}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: it holds no JSON object; {fix}")
    return content


def require_fields(content: Any, fields: Mapping[str, type | UnionType], path: Path, fix: str) -> None:
    """See that ``content``, read from ``path``, has ``fields`` of these types; ``object`` is any type.

    Raises:
        ConfigError: naming the first that is absent or of another type.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: {content!r} should be an object; {fix}")
    for name, kind in fields.items():
        if name not in content:
            raise ConfigError(f"{path} is damaged: it has no {name}; {fix}")
        if not isinstance(content[name], kind):
            raise ConfigError(f"{path} is damaged: {name} is {content[name]!r}; {fix}")


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def listing(path: Path) -> list[tuple[str, int, int]]:
    """What tells whether a file, or what lies in a folder, has changed: name, bytes and time in ns of each.

    Links that lead nowhere are left out, as they are by who reads the folder. Nothing for what is not there.
    """
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    stats = [(file, file.stat()) for file in found if file.exists()]
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, for people to read."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def replace_json(path: Path, content: dict[str, Any]) -> None:
    """``write_json``, whole or not at all; for who writes ``path`` alone, since all would use one temporary name."""
    partial = path.with_name(f".{path.name}.partial")
    write_json(partial, content)
    os.replace(partial, path)


@contextmanager
def exclusive(path: Path, busy: str, *, wait: bool = False) -> Iterator[int]:
    """Hold the lock file ``path``, made with its folder; yields its descriptor, for processes that are to hold it too.

    The file is removed in the end; one that a killed process has left is no lock.

    Args:
        busy: what to say where another process holds it.
        wait: say it and wait for the other's end, instead of raising it.

    Raises:
        ConfigError: ``busy``, or the lock file cannot be opened.
    """
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a")
        except OSError as error:
            raise ConfigError(f"the lock file {path} cannot be opened: {error.strerror}; see that its folder can be "
                              "written to, or choose another") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if not wait:
                    raise ConfigError(busy) from error
                print(busy, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(path, file.fileno()):
                continue  # its holder has removed it since it was opened: others would lock another file
            try:
                yield file.fileno()
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether ``path`` is the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def follow_umask(path: Path) -> None:
    """Give a file the permissions of any new one: safetensors leaves those of its private temporary file, 0600."""
    umask = os.umask(0o077)  # it can only be read by setting it; meanwhile other threads' files are merely too private
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def replace_folder(new: Path, folder: Path) -> None:
    """Put ``new``, flushed to the disk, in the place of ``folder``, whatever is there.

    A rename cannot replace a folder that is not empty, so the old one is moved aside first: a crash in between leaves
    both, under their other names.
    """
    flush_tree(new)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush_tree(folder: Path) -> None:
    """Force every file and folder of a tree to the disk: else a rename may survive a crash that its data do not."""
    for path in [*folder.rglob("*"), folder]:
        flush(path)


def flush(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

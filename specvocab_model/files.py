"""Files that may have been damaged since they were written: read whole, or refused in one line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
    except FileNotFoundError as error:
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

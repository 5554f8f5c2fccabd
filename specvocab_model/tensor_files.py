"""Named tensors on disk, compared with what they should be: engines are silent about missing and misshapen ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specvocab_model.config import ConfigError
from specvocab_model.files import follow_umask, sha256

Shapes = Mapping[str, tuple[int, ...]]


def check_tensors(tensors: Mapping[str, Tensor], shapes: Shapes, where: str) -> None:
    """Compare a set of tensors with what the format wants, because the engines do not.

    Raises:
        ConfigError: one line with every name that is missing, unknown, of another shape or not finite.
    """
    problems = [f"{name} is missing" for name in shapes if name not in tensors]
    for name, tensor in tensors.items():
        if name not in shapes:
            problems.append(f"{name} is unknown")
        elif tuple(tensor.shape) != shapes[name]:
            problems.append(f"{name} has shape {tuple(tensor.shape)} instead of {shapes[name]}")
        elif not torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all():
            problems.append(f"{name} is not finite")
    if problems:
        raise ConfigError(f"{where} is not a complete draft: {'; '.join(problems)}")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Contiguous tensors on the CPU, with the metadata that transformers asks for.

    Raises:
        SafetensorError: the disk is full, or does not take the file for another reason.
    """
    save_file(dict(tensors), path, metadata={"format": "pt"})
    follow_umask(path)


def read_safetensors(path: Path, fix: str) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, unchecked.

    Args:
        fix: what the user should do if it cannot be read.

    Raises:
        ConfigError: the file is missing or truncated.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing; {fix}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged or not complete ({error}); {fix}") from error


def read_tensors(path: Path, shapes: Shapes, fix: str, digest: str | None) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, checked.

    Args:
        shapes: what the file must hold.
        fix: what the user should do if it is damaged.
        digest: SHA-256 that the file had when it was written, where that is known.

    Raises:
        ConfigError: the file is missing, truncated, has other tensors or other bytes.
    """
    tensors = read_safetensors(path, fix)
    check_tensors(tensors, shapes, str(path))
    check_digest(path, digest, fix)
    return tensors


def check_digest(path: Path, digest: str | None, fix: str) -> None:
    """See that a file has the SHA-256 that it was written with, where that is known.

    Raises:
        ConfigError: it has another.
    """
    if digest is not None and sha256(path) != digest:
        raise ConfigError(f"{path} is damaged or was changed: its SHA-256 is not the one it was written with; {fix}")


def to_store(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies on the CPU in the type that goes to disk."""
    return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()}

"""Where a target lives on disk, and what identifies its weights.

A target is named by a hub id or a folder, with or without a GGUF file. Everything past ``resolve_model`` sees a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from gguf import GGUFReader
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open

from specvocab_model.config import ConfigError, TargetConfig

HUB_TIMEOUT_S = 5.0
HUB_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
SAMPLE_WIDTH = 64  # values hashed of each sampled row


def target_cache_dir() -> Path:
    """``$SPECVOCAB_CACHE``, or ``~/.cache/specvocab``: fetched targets are kept here, one folder each."""
    return Path(os.environ.get("SPECVOCAB_CACHE", "~/.cache/specvocab")).expanduser() / "targets"


def cached_folder(model: str) -> Path:
    """The folder that ``scripts/fetch_target.py`` writes for the hub id ``model``."""
    return target_cache_dir() / model.replace("/", "--")


def resolve_model(config: TargetConfig) -> Path:
    """The folder that holds the target; downloads it from the hub if it is nowhere on this machine.

    Tried in this order: a folder of that name, the folder written by ``scripts/fetch_target.py``, the hub's own cache,
    the hub. What is on the disk wins over a newer revision on the hub, so all ranks and all stages see one target.

    Raises:
        ConfigError: nothing of that name is found, or it holds no usable weights.
    """
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        folder = cached_folder(config.model)
    if not folder.is_dir():
        folder = _hub_folder(config)
    weight_files(folder, config.gguf_file)
    return folder


def _hub_folder(config: TargetConfig) -> Path:
    patterns = [*HUB_FILES[:-1], config.gguf_file] if config.gguf_file else list(HUB_FILES)
    try:
        folder = Path(snapshot_download(config.model, revision=config.revision, local_files_only=True))
        weight_files(folder, config.gguf_file)
        return folder
    except (LocalEntryNotFoundError, ConfigError):
        pass  # not in the hub's cache, or only parts of it
    except HFValidationError as error:
        raise ConfigError(f"target.model={config.model!r} is neither a folder nor a hub id (owner/name)") from error
    try:
        return Path(snapshot_download(
            config.model, revision=config.revision, allow_patterns=patterns, ignore_patterns="*/*",
            etag_timeout=HUB_TIMEOUT_S,
        ))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"target.model={config.model!r} is no folder, is not in {target_cache_dir()} and the hub does not give it "
            f"({type(error).__name__}); fetch it with `python scripts/fetch_target.py {config.model}`, or give a folder"
        ) from error


def weight_files(folder: Path, gguf_file: str | None) -> list[Path]:
    """The files holding the target's weights: the GGUF file, or every safetensors shard.

    Raises:
        ConfigError: a file is missing.
    """
    index = folder / "model.safetensors.index.json"
    if gguf_file is not None:
        files = [folder / gguf_file]
    elif index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"target folder {folder} has no {file.name}; a target needs safetensors weights "
                              "(or target.gguf_file), complete")
    return files


def weights_digest(folder: Path, gguf_file: str | None) -> str:
    """SHA-256 over a sample of every weight tensor, read lazily: quick for any size of model.

    Each tensor gives its name, its shape and the first ``SAMPLE_WIDTH`` values of its first, middle and last row. A
    fine-tuned sibling (same config, often the same embeddings) differs in some of these, which a hash of the config or
    of ``lm_head`` alone would miss. Values are rounded to bf16, so an fp32 and a bf16 copy of a model agree. A GGUF
    file holds quantised weights: it is another target than the model it was made from.
    """
    digest = hashlib.sha256()
    samples = _gguf_samples(folder / gguf_file) if gguf_file else _safetensors_samples(weight_files(folder, None))
    for name, shape, sample in sorted(samples):
        digest.update(f"{name} {list(shape)} ".encode())
        digest.update(sample)
    return digest.hexdigest()


def _safetensors_samples(files: list[Path]) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                tensor = tensors.get_slice(name)
                shape = tuple(tensor.get_shape())
                yield name, shape, b"".join(_bf16_bytes(tensor[index]) for index in _sample_indices(shape))


def _sample_indices(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    *leading, width = shape
    columns = slice(0, min(width, SAMPLE_WIDTH))
    rows = leading[0] if leading else 1
    for row in sorted({0, rows // 2, rows - 1}):
        yield (slice(row, row + 1), *[slice(0, 1)] * (len(leading) - 1), columns) if leading else (columns,)


def _bf16_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()


def _gguf_samples(file: Path) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    for tensor in GGUFReader(file).tensors:
        data = tensor.data.reshape(-1, tensor.data.shape[-1])
        rows = sorted({0, len(data) // 2, len(data) - 1})
        yield tensor.name, tuple(int(size) for size in tensor.shape), data[rows, :SAMPLE_WIDTH].tobytes()

"""What tells one target's weights from another's, without loading them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors import SafetensorError, safe_open

from specvocab_model.config import ConfigError
from specvocab_model.target_files import weight_files

SAMPLE_WIDTH = 64  # values taken of each sampled row


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
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    tensor = tensors.get_slice(name)
                    shape = tuple(tensor.get_shape())
                    yield name, shape, b"".join(_bf16_bytes(tensor[index]) for index in _sample_indices(shape))
        except SafetensorError as error:
            raise ConfigError(f"{file} is damaged or not complete ({error}); fetch it again") from error


def _sample_indices(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    *leading, width = shape
    columns = slice(0, min(width, SAMPLE_WIDTH))
    rows = leading[0] if leading else 1
    for row in sorted({0, rows // 2, rows - 1}):
        yield (slice(row, row + 1), *[slice(0, 1)] * (len(leading) - 1), columns) if leading else (columns,)


def _bf16_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()


def _gguf_samples(file: Path) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    try:
        tensors = GGUFReader(file).tensors
    except ValueError as error:
        raise ConfigError(f"{file} is damaged or not complete ({error}); fetch it again") from error
    for tensor in tensors:
        data = tensor.data.reshape(-1, tensor.data.shape[-1])
        rows = sorted({0, len(data) // 2, len(data) - 1})
        yield tensor.name, tuple(int(size) for size in tensor.shape), data[rows, :SAMPLE_WIDTH].tobytes()

"""``vocabulary_speculator/`` of a checkpoint: what our engine plugins read beside the stock draft.

    config.json          rank, how candidates are selected, precision
    model.safetensors    down_proj.weight, vocab_proj.weight, and vocab_proj.scales where it is in 8 bits
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from specvocab_kernels.vocab_head import TileSelection
from specvocab_kernels.vocab_head.weights import QUANTIZED

from specvocab_model.config import ConfigError, HeadConfig
from specvocab_model.files import read_json, require_fields, write_json
from specvocab_model.speculator import VocabSpeculator
from specvocab_model.tensor_files import check_tensors, read_tensors, to_store, write_safetensors

SCHEMA_VERSION = 2
READABLE_VERSIONS = (1, 2)  # 1: selection exact and no 8-bit vocab_proj
SPECULATOR_FOLDER = "vocabulary_speculator"
SPECULATOR_FILE = f"{SPECULATOR_FOLDER}/model.safetensors"
COPY_AGAIN = "copy or export the whole folder again"


def speculator_tensor_shapes(speculator: VocabSpeculator) -> dict[str, tuple[int, ...]]:
    """Every tensor of ``vocabulary_speculator/model.safetensors`` and its shape; rows of ``vocab_proj`` are by id."""
    shapes: dict[str, tuple[int, ...]] = {
        "down_proj.weight": (speculator.rank, speculator.down_proj.in_features),
        "vocab_proj.weight": (speculator.vocab_size, speculator.rank),
    }
    return shapes if speculator.quantization is None else shapes | {"vocab_proj.scales": (speculator.vocab_size,)}


def write_speculator(folder: Path, speculator: VocabSpeculator, dtype: torch.dtype) -> dict[str, Any]:
    """Write ``speculator`` into the new ``folder``, in ``dtype`` where it is not in 8 bits; returns its config.json.

    Raises:
        ConfigError: a tensor is missing, unknown, misshapen or not finite.
        ValueError: ``vocab_proj`` is tied.
    """
    speculator.untied_vocab_proj()  # or there is nothing to write
    state = speculator.state_dict()
    tensors = to_store(state, dtype)
    if speculator.quantization is not None:  # fp32 scales and 8-bit rows stay what they are
        tensors |= {name: state[name].cpu().contiguous() for name in ("vocab_proj.weight", "vocab_proj.scales")}
    check_tensors(tensors, speculator_tensor_shapes(speculator), "the speculator")
    selection = speculator.selection
    tile, keep = (selection.tile, selection.keep) if isinstance(selection, TileSelection) else (None, None)
    config = {
        "schema_version": SCHEMA_VERSION,
        "rank": speculator.rank,
        "num_candidates": speculator.num_candidates,
        "selection": "exact" if tile is None else "tile",
        "tile": tile,
        "keep": keep,
        "hidden_size": speculator.down_proj.in_features,
        "vocab_size": speculator.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": speculator.quantization,
        "scales": None if speculator.quantization is None else {"tensor": "vocab_proj.scales", "per": "row",
                                                                "dtype": "float32"},
    }
    folder.mkdir()
    write_json(folder / "config.json", config)
    write_safetensors(folder / "model.safetensors", tensors)
    return config


def read_head_config(checkpoint: Path) -> HeadConfig:
    """What ``vocabulary_speculator/config.json`` says of the head.

    Raises:
        ConfigError: it is missing or damaged, or contradicts itself.
    """
    path = checkpoint / SPECULATOR_FOLDER / "config.json"
    config = read_json(path, COPY_AGAIN)
    check_schema_version(config, path)
    known = {"rank": int, "num_candidates": int, "selection": str, "quantization": str | None}
    tiled = config.get("selection") == "tile"
    require_fields(config, known | ({"tile": int, "keep": int} if tiled else {}), path, COPY_AGAIN)
    try:
        return HeadConfig(
            rank=config["rank"],
            selection=config["selection"],
            num_candidates=None if tiled else config["num_candidates"],
            tile=config["tile"] if tiled else None,
            keep=config["keep"] if tiled else None,
            quantization=config["quantization"],
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def fill_speculator(
    speculator: VocabSpeculator, quantization: str | None, checkpoint: Path, digest: str | None
) -> None:
    """Replace the values of ``speculator``, of the shape that ``read_head_config`` gives, by the checkpoint's.

    Raises:
        ConfigError: the file is missing or damaged, or of another precision than ``quantization``.
    """
    if quantization is not None:
        speculator.quantize(quantization)  # of values that are replaced: for its tensors' names
    path = checkpoint / SPECULATOR_FILE
    tensors = read_tensors(path, speculator_tensor_shapes(speculator), COPY_AGAIN, digest)
    speculator.load_state_dict(tensors, assign=True)  # keeps the stored type
    _check_precision(speculator, path)


def check_schema_version(record: dict[str, Any], path: Path) -> None:
    """See that this release can read a file of a checkpoint.

    Raises:
        ConfigError: it was written by another release.
    """
    if record.get("schema_version") not in READABLE_VERSIONS:
        raise ConfigError(f"{path} has schema_version={record.get('schema_version')!r}, but this release reads "
                          f"{' and '.join(map(str, READABLE_VERSIONS))}; install the specvocab release that wrote it, "
                          "or export again")


def _check_precision(speculator: VocabSpeculator, path: Path) -> None:
    dtype = speculator.untied_vocab_proj().weight.dtype
    if {eight_bits: name for name, eight_bits in QUANTIZED.items()}.get(dtype) != speculator.quantization:
        raise ConfigError(f"{path} holds a vocab_proj of {dtype}, but its config.json says quantization="
                          f"{speculator.quantization!r}; {COPY_AGAIN}")

"""The checkpoint that users get: a stock EAGLE-3 draft with the vocabulary speculator in a folder beside it.

    config.json, model.safetensors     what vLLM and SGLang read; no embedding and no lm_head, both are the target's
    vocabulary_speculator/             config.json and model.safetensors of the speculator, 8-bit where wanted
    custom_generate/generate.py        what transformers' ``generate`` runs for this folder
    specvocab.json                     provenance: target, data, configuration, commit, metrics
    README.md                          model card

Engines are silent about missing tensors and wrong targets, so both are checked here, when writing and when reading.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from specvocab_kernels.vocab_head import TileSelection
from specvocab_kernels.vocab_head.weights import QUANTIZED
from torch import Tensor, nn

from specvocab_model import serving
from specvocab_model.config import ConfigError, HeadConfig
from specvocab_model.draft import DraftArchitecture, SpecVocabDraft
from specvocab_model.eagle3 import check_tensors, engine_config, read_architecture, tensor_shapes
from specvocab_model.files import read_json, require_fields, sha256
from specvocab_model.model_card import model_card
from specvocab_model.speculator import VocabSpeculator
from specvocab_model.target import TargetSpec

SCHEMA_VERSION = 2
READABLE_VERSIONS = (1, 2)  # 1: selection exact and no 8-bit vocab_proj
SPECULATOR_FOLDER = "vocabulary_speculator"
DRAFT_FILE = "model.safetensors"
SPECULATOR_FILE = f"{SPECULATOR_FOLDER}/model.safetensors"
PROVENANCE_FILE = "specvocab.json"
GENERATE_FILE = "custom_generate/generate.py"
COPY_AGAIN = "copy or export the whole folder again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the weights come from. What is not known stays null."""

    step: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    data_manifest_sha256: str | None = None
    git_commit: str | None = None
    config: dict[str, Any] | None = None
    candidate_recall: dict[str, Any] | None = None  # before and after vocab_proj was rounded to 8 bits
    tuning: dict[str, Any] | None = None  # what scripts/tune_head.py expects of this head

    @classmethod
    def read(cls, folder: str | Path) -> Provenance:
        """Of a checkpoint."""
        record = read_json(Path(folder) / PROVENANCE_FILE, COPY_AGAIN)
        return cls(**{entry.name: record[entry.name] for entry in fields(cls) if entry.name in record})


def save_checkpoint(
    folder: str | Path,
    model: SpecVocabDraft,
    target_spec: TargetSpec,
    provenance: Provenance,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write ``model`` as a checkpoint that engines and ``load_checkpoint`` read.

    Everything is written beside ``folder`` and renamed at the end, so ``folder`` is never half a checkpoint.

    Args:
        folder: destination; an earlier checkpoint there is replaced.
        model: draft and speculator, in any floating type.
        target_spec: the target they were trained for.
        provenance: what to record about the training.
        dtype: type of the stored weights; an engine runs the draft in the target's type, so give that one.

    Raises:
        ConfigError: a tensor is missing, unknown, misshapen or not finite, the target is another one, or ``folder``
            holds something that is not a checkpoint.
    """
    folder = check_destination(folder)
    architecture = model.architecture
    _check_sizes(architecture, target_spec, "the draft")
    draft = _stored(model.draft.state_dict(), dtype)
    check_tensors(draft, tensor_shapes(architecture), "the draft")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_json(partial / "config.json", engine_config(architecture, target_spec, dtype))
    save_file(draft, partial / DRAFT_FILE, metadata={"format": "pt"})
    (partial / GENERATE_FILE).parent.mkdir()
    shutil.copyfile(Path(serving.__path__[0], "custom_generate.py"), partial / GENERATE_FILE)
    speculator_config = None
    if model.speculator is not None:
        speculator_config = _write_speculator(partial / SPECULATOR_FOLDER, model.speculator, dtype)
    record = {
        "schema_version": SCHEMA_VERSION,
        "sha256": {str(path.relative_to(partial)): sha256(path) for path in sorted(partial.rglob("*.safetensors"))},
        "target": {
            "name": target_spec.name,
            "model_type": target_spec.model_type,
            "fingerprint": target_spec.fingerprint,
            "vocab_size": target_spec.vocab_size,
            "hidden_size": target_spec.hidden_size,
        },
        "num_unroll_steps": architecture.num_unroll_steps,
        "speculator": speculator_config,
        **asdict(provenance),
        "evaluation": None,
    }
    _write_json(partial / PROVENANCE_FILE, record)
    (partial / "README.md").write_text(model_card(record), encoding="utf-8")
    _replace_folder(partial, folder)
    return folder


def check_destination(folder: str | Path) -> Path:
    """The folder as a path, if a checkpoint can be written there.

    Raises:
        ConfigError: something else is there already.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give another folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / PROVENANCE_FILE).exists():
        raise ConfigError(f"{folder} is not empty and not a SpecVocab checkpoint; give another folder")
    return folder


def add_evaluation(folder: str | Path, evaluation: dict[str, Any]) -> None:
    """Record what ``scripts/evaluate.py`` measured in the checkpoint's provenance and model card.

    Args:
        folder: a checkpoint written by ``save_checkpoint``.
        evaluation: ``Evaluation.to_dict()``.
    """
    folder = Path(folder)
    record = read_json(folder / PROVENANCE_FILE, COPY_AGAIN) | {"evaluation": evaluation}
    card = folder / ".README.md.partial"
    card.write_text(model_card(record), encoding="utf-8")
    _write_json(folder / f".{PROVENANCE_FILE}.partial", record)
    os.replace(folder / f".{PROVENANCE_FILE}.partial", folder / PROVENANCE_FILE)
    os.replace(card, folder / "README.md")


def load_checkpoint(folder: str | Path, target_spec: TargetSpec | None = None) -> SpecVocabDraft:
    """Read a checkpoint, in the type it was stored in, on the CPU.

    A stock EAGLE-3 folder without ``vocabulary_speculator/`` gives a draft whose only head is the full one.

    Args:
        folder: written by ``save_checkpoint``, or a stock EAGLE-3 draft that shares the target's ``lm_head``.
        target_spec: the target it will be used with; checked when given.

    Raises:
        ConfigError: one line naming what does not match: schema version, target, architecture or tensors.
    """
    folder = Path(folder)
    record = _read_provenance(folder)
    path = folder / "config.json"
    config = read_json(path, COPY_AGAIN)
    require_fields(config, {"hidden_size": object, "vocab_size": object}, path, COPY_AGAIN)
    num_unroll_steps = None if record is None else record["num_unroll_steps"]
    architecture = read_architecture(config, str(path), num_unroll_steps, target_spec)
    if target_spec is not None:
        _check_sizes(architecture, target_spec, str(folder))
        if record is not None:
            _check_fingerprint(record["target"], target_spec, folder)
    head_config = _read_head_config(folder, record)
    model = SpecVocabDraft(architecture, head_config)
    # assign=True keeps the stored type without casting the module, which would round its fp32 RoPE frequencies too.
    written = {} if record is None else record.get("sha256", {})  # older checkpoints do not have it

    def fill(module: nn.Module, file: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        module.load_state_dict(read_tensors(folder / file, shapes, COPY_AGAIN, written.get(file)), assign=True)

    fill(model.draft, DRAFT_FILE, tensor_shapes(architecture))
    if model.speculator is not None:
        if head_config.quantization is not None:
            model.speculator.quantize(head_config.quantization)  # of values that are replaced: for its tensors' names
        fill(model.speculator, SPECULATOR_FILE, speculator_tensor_shapes(model.speculator))
        _check_precision(model.speculator, folder / SPECULATOR_FILE)
    return model


def speculator_tensor_shapes(speculator: VocabSpeculator) -> dict[str, tuple[int, ...]]:
    """Every tensor of ``vocabulary_speculator/model.safetensors`` and its shape; rows of ``vocab_proj`` are by id."""
    shapes: dict[str, tuple[int, ...]] = {
        "down_proj.weight": (speculator.rank, speculator.down_proj.in_features),
        "vocab_proj.weight": (speculator.vocab_size, speculator.rank),
    }
    return shapes if speculator.quantization is None else shapes | {"vocab_proj.scales": (speculator.vocab_size,)}


def read_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]], fix: str, digest: str | None) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, checked.

    Args:
        shapes: what the file must hold.
        fix: what the user should do if it is damaged.
        digest: SHA-256 that the file had when it was written, where that is known.

    Raises:
        ConfigError: the file is missing, truncated, has other tensors or other bytes.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing; {fix}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged or not complete ({error}); {fix}") from error
    check_tensors(tensors, shapes, str(path))
    if digest is not None and sha256(path) != digest:
        raise ConfigError(f"{path} is damaged or was changed: its SHA-256 is not the one it was written with; {fix}")
    return tensors


def _write_speculator(folder: Path, speculator: VocabSpeculator, dtype: torch.dtype) -> dict[str, Any]:
    state = speculator.state_dict()
    tensors = _stored(state, dtype)
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
    _write_json(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return config


def _read_provenance(folder: Path) -> dict[str, Any] | None:
    """``specvocab.json``, or ``None`` for a stock EAGLE-3 draft."""
    path = folder / PROVENANCE_FILE
    if not path.is_file():
        if (folder / SPECULATOR_FOLDER).exists():
            raise ConfigError(f"{folder} has a speculator but no {PROVENANCE_FILE}; copy the whole exported folder")
        return None
    record = read_json(path, COPY_AGAIN)
    _check_schema_version(record, path)
    fields = {"num_unroll_steps": int, "target": dict, "speculator": dict | None}
    require_fields(record, fields, path, COPY_AGAIN)
    require_fields(record["target"], {"name": str, "fingerprint": str}, path, COPY_AGAIN)
    return record


def _read_head_config(folder: Path, record: dict[str, Any] | None) -> HeadConfig:
    if record is None or record["speculator"] is None:
        return HeadConfig(type="full")
    path = folder / SPECULATOR_FOLDER / "config.json"
    config = read_json(path, COPY_AGAIN)
    _check_schema_version(config, path)
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


def _check_schema_version(record: dict[str, Any], path: Path) -> None:
    if record.get("schema_version") not in READABLE_VERSIONS:
        raise ConfigError(f"{path} has schema_version={record.get('schema_version')!r}, but this release reads "
                          f"{' and '.join(map(str, READABLE_VERSIONS))}; install the specvocab release that wrote it, "
                          "or export again")


def _check_precision(speculator: VocabSpeculator, path: Path) -> None:
    dtype = speculator.vocab_proj.weight.dtype
    if {eight_bits: name for name, eight_bits in QUANTIZED.items()}.get(dtype) != speculator.quantization:
        raise ConfigError(f"{path} holds a vocab_proj of {dtype}, but its config.json says quantization="
                          f"{speculator.quantization!r}; {COPY_AGAIN}")


def _check_sizes(architecture: DraftArchitecture, target_spec: TargetSpec, where: str) -> None:
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(architecture, name), getattr(target_spec, name)
        if ours != theirs:
            raise ConfigError(f"{where} has {name}={ours}, but {target_spec.name} has {theirs}; use the target that "
                              "the draft was trained for")


def _check_fingerprint(recorded: dict[str, Any], target_spec: TargetSpec, folder: Path) -> None:
    if recorded["fingerprint"] != target_spec.fingerprint:
        raise ConfigError(f"{folder} was made for {recorded['name']} (fingerprint {recorded['fingerprint'][:12]}), not "
                          f"for {target_spec.name} ({target_spec.fingerprint[:12]}); use the target it was made for")


def _stored(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _replace_folder(new: Path, folder: Path) -> None:
    """Put ``new`` in the place of ``folder``; a rename cannot replace a folder that is not empty."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)

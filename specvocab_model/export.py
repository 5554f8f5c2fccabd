"""The checkpoint that users get: a stock EAGLE-3 draft with the vocabulary speculator in a folder beside it.

    config.json, model.safetensors     what vLLM and SGLang read; no embedding and, unless the draft has a head of its
                                       own, no lm_head: both are the target's
    vocabulary_speculator/             config.json and model.safetensors of the speculator, 8-bit where wanted
    custom_generate/generate.py        what transformers' ``generate`` runs for this folder
    specvocab.json                     provenance: target, data, configuration, commit, metrics
    README.md                          model card

Engines are silent about missing tensors and wrong targets, so both are checked here, when writing and when reading.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specvocab_model import serving
from specvocab_model.config import ConfigError, HeadConfig
from specvocab_model.draft import DraftArchitecture, SpecVocabDraft
from specvocab_model.eagle3 import (
    check_complete,
    check_served,
    check_target,
    engine_config,
    read_architecture,
    read_draft_vocab_size,
    tensor_shapes,
)
from specvocab_model.files import (
    exclusive,
    read_json,
    replace_folder,
    replace_json,
    require_fields,
    sha256,
    write_json,
)
from specvocab_model.heads.static import OwnHead
from specvocab_model.layouts import (
    our_config,
    our_names,
    shares_target_head,
    speculators_config,
    speculators_name,
)
from specvocab_model.model_card import model_card
from specvocab_model.speculator_files import (
    COPY_AGAIN,
    SCHEMA_VERSION,
    SPECULATOR_FILE,
    SPECULATOR_FOLDER,
    check_schema_version,
    fill_speculator,
    read_head_config,
    write_speculator,
)
from specvocab_model.target import TargetShape, TargetSpec
from specvocab_model.tensor_files import check_digest, check_tensors, read_safetensors, to_store, write_safetensors
from specvocab_model.vocab import VocabMap

DRAFT_FILE = "model.safetensors"
PROVENANCE_FILE = "specvocab.json"
PARTS = ("config.json", DRAFT_FILE, f"{SPECULATOR_FOLDER}/config.json", SPECULATOR_FILE)  # tell a draft from another
GENERATE_FILE = "custom_generate/generate.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the weights come from. What is not known stays null."""

    step: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    data_manifest_sha256: str | None = None
    git_commit: str | None = None
    config: dict[str, Any] | None = None
    # Shares and what they were measured on; where vocab_proj was rounded to 8 bits, before and after that.
    candidate_recall: dict[str, Any] | None = None
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
    layout: str = "eagle3",
) -> Path:
    """Write ``model`` as a checkpoint that engines and ``load_checkpoint`` read.

    Everything is written beside ``folder`` and renamed at the end, so ``folder`` is never half a checkpoint.

    Args:
        folder: destination; an earlier checkpoint there is replaced.
        model: draft and speculator, in any floating type.
        target_spec: the target they were trained for.
        provenance: what to record about the training.
        dtype: type of the stored weights; an engine runs the draft in the target's type, so give that one.
        layout: one of ``config.LAYOUTS``, of the stock draft's config.json and tensor names.

    Raises:
        ConfigError: a tensor is missing, unknown, misshapen or not finite, the target is another one, an engine would
            not serve the draft as it is, or ``folder`` holds something that is not a checkpoint.
    """
    folder = check_destination(folder)
    architecture = model.architecture
    check_target(architecture, target_spec, "the draft")
    own = model.own_head
    draft_vocab_size = None if own is None else len(own.ids)
    _check_head(draft_vocab_size, architecture, model.speculator is not None, "the draft")
    draft = to_store(model.draft.state_dict(), dtype)
    if own is not None:
        draft |= to_store({"lm_head.weight": own.weight}, dtype)
        draft |= {} if own.is_full else {"d2t": own.vocab.d2t, "t2d": own.vocab.t2d}
    check_tensors(draft, tensor_shapes(architecture, draft_vocab_size), "the draft")
    config = engine_config(architecture, target_spec, dtype, draft_vocab_size)
    check_served(config, architecture, target_spec, "the draft")
    if layout == "speculators":
        config = speculators_config(config, target_spec, architecture.num_unroll_steps)
        draft = {speculators_name(name): tensor for name, tensor in draft.items()}
    with held(folder):
        _write(folder, model, target_spec, config, draft, provenance, dtype)
    return folder


def held(folder: Path) -> AbstractContextManager[int]:
    """Holds the lock of a checkpoint's folder, for who writes to it or records what it measures of it.

    Raises:
        ConfigError: on entering, another process holds it.
    """
    return exclusive(folder.with_name(f".{folder.name}.lock"),
                     f"another command writes {folder} or measures it; wait for it, or stop it")


def _write(
    folder: Path, model: SpecVocabDraft, target_spec: TargetSpec, config: dict[str, Any], draft: dict[str, Tensor],
    provenance: Provenance, dtype: torch.dtype,
) -> None:
    """Write ``config`` and the tensors ``draft``, as an engine reads them, and all that lies beside them."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_json(partial / "config.json", config)
    write_safetensors(partial / DRAFT_FILE, draft)
    (partial / GENERATE_FILE).parent.mkdir()
    shutil.copyfile(Path(serving.__path__[0], "custom_generate.py"), partial / GENERATE_FILE)
    speculator_config = None
    if model.speculator is not None:
        speculator_config = write_speculator(partial / SPECULATOR_FOLDER, model.speculator, dtype)
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
        "num_unroll_steps": model.architecture.num_unroll_steps,
        "draft_vocab_size": None if model.own_head is None else len(model.own_head.ids),
        "speculator": speculator_config,
        **asdict(provenance),
        "evaluation": None,
    }
    write_json(partial / PROVENANCE_FILE, record)
    (partial / "README.md").write_text(model_card(record), encoding="utf-8")
    replace_folder(partial, folder)


def check_destination(folder: str | Path) -> Path:
    """The folder as a path, if a checkpoint can be written there.

    Raises:
        ConfigError: something else is there already, or is in its way.
    """
    folder = Path(folder)
    if folder.name in ("", ".."):
        raise ConfigError(f"{folder} is where something else lies; name a folder of the checkpoint's own")
    if blocking := [parent for parent in folder.parents if parent.is_file()]:
        raise ConfigError(f"{blocking[0]} is a file, so {folder} cannot be a folder; give another one")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give another folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / PROVENANCE_FILE).exists():
        raise ConfigError(f"{folder} is not empty and not a SpecVocab checkpoint; give another folder")
    return folder


def add_evaluation(folder: str | Path, evaluation: dict[str, Any]) -> None:
    """Record what ``scripts/evaluate.py`` measured in the checkpoint's provenance and model card.

    Args:
        folder: a checkpoint written by ``save_checkpoint``, and ``held`` since the draft was read from it.
        evaluation: ``Evaluation.to_dict()``.
    """
    folder = Path(folder)
    record = read_json(folder / PROVENANCE_FILE, COPY_AGAIN) | {"evaluation": evaluation}
    card = folder / ".README.md.partial"
    card.write_text(model_card(record), encoding="utf-8")
    replace_json(folder / PROVENANCE_FILE, record)
    os.replace(card, folder / "README.md")


def load_checkpoint(folder: str | Path, target: TargetShape | None = None) -> SpecVocabDraft:
    """Read a checkpoint, in the type it was stored in, on the CPU.

    Args:
        folder: written by ``save_checkpoint``; or what remains of it without its speculator and provenance.
        target: it will be used with; checked when given, by its fingerprint too where that is known.

    Raises:
        ConfigError: one line naming what does not match: schema version, target, architecture or tensors.
    """
    folder = Path(folder)
    record = _read_provenance(folder)
    path = folder / "config.json"
    written_config = read_json(path, COPY_AGAIN)
    config = our_config(written_config, str(path))
    require_fields(config, {"hidden_size": object, "vocab_size": int}, path, COPY_AGAIN)
    if record is not None:
        check_complete(written_config, str(path))
    num_unroll_steps = None if record is None else record["num_unroll_steps"]
    architecture = read_architecture(config, str(path), num_unroll_steps, target)
    check_served(config, architecture, target, str(path))
    if target is not None:
        check_target(architecture, target, str(folder))
    if isinstance(target, TargetSpec) and record is not None:
        _check_fingerprint(record["target"], target, folder)
    written = {} if record is None else record.get("sha256", {})  # older checkpoints do not have it
    path = folder / DRAFT_FILE
    tensors = our_names(read_safetensors(path, COPY_AGAIN), str(path))
    draft_vocab_size = None
    if not shares_target_head(written_config, tensors):
        draft_vocab_size = read_draft_vocab_size(config, str(folder / "config.json"))
    has_speculator = record is not None and record["speculator"] is not None
    head_config = read_head_config(folder) if has_speculator else None
    model = build_draft(architecture, tensors, draft_vocab_size, head_config, str(path))
    check_digest(path, written.get(DRAFT_FILE), COPY_AGAIN)
    if model.speculator is not None:
        fill_speculator(model.speculator, model.head_config.quantization, folder, written.get(SPECULATOR_FILE))
    return model


def build_draft(
    architecture: DraftArchitecture,
    tensors: Mapping[str, Tensor],
    draft_vocab_size: int | None,
    head_config: HeadConfig | None,
    where: str,
) -> SpecVocabDraft:
    """The draft of a stock checkpoint's tensors, in their type; a speculator is left as it is made.

    Args:
        tensors: under our names.
        draft_vocab_size: rows of its own head; null without one.
        head_config: of its speculator; null without one.
        where: what to call the tensors in an error.

    Raises:
        ConfigError: a tensor is missing, unknown, misshapen or not finite, or the vocabulary's map contradicts itself.
    """
    check_tensors(tensors, tensor_shapes(architecture, draft_vocab_size), where)
    _check_head(draft_vocab_size, architecture, head_config is not None, where)
    own = None
    if draft_vocab_size is not None:
        vocab = VocabMap.from_ids(torch.arange(architecture.vocab_size), architecture.vocab_size)
        if "d2t" in tensors:
            vocab = VocabMap.from_tensors(tensors["d2t"], tensors["t2d"], where)
        own = OwnHead(architecture.hidden_size, vocab)
        own.weight = nn.Parameter(tensors["lm_head.weight"])
    if head_config is None:
        head_config = HeadConfig(type="full") if own is None else HeadConfig(type="static", draft_vocab_size=len(vocab))
    model = SpecVocabDraft(architecture, head_config)
    model.own_head = own
    # assign=True keeps the stored type without casting the module, which would round its fp32 RoPE frequencies too.
    layer = {name: tensor for name, tensor in tensors.items() if name not in ("lm_head.weight", "d2t", "t2d")}
    model.draft.load_state_dict(layer, assign=True)
    return model


def _check_head(
    draft_vocab_size: int | None, architecture: DraftArchitecture, has_speculator: bool, where: str
) -> None:
    """See that a speculator, whose rows are the target's ids, does not stand on a head with rows of its own."""
    if has_speculator and draft_vocab_size is not None and draft_vocab_size < architecture.vocab_size:
        raise ConfigError(f"{where} has a speculator over {architecture.vocab_size} tokens and a head over "
                          f"{draft_vocab_size} of them, whose rows it would take for other tokens; leave one of "
                          "the two out")


def _read_provenance(folder: Path) -> dict[str, Any] | None:
    """``specvocab.json``, or ``None`` for a stock EAGLE-3 draft."""
    path = folder / PROVENANCE_FILE
    if not path.is_file():
        if (folder / SPECULATOR_FOLDER).exists():
            raise ConfigError(f"{folder} has a speculator but no {PROVENANCE_FILE}; copy the whole exported folder")
        return None
    record = read_json(path, COPY_AGAIN)
    check_schema_version(record, path)
    fields = {"num_unroll_steps": int, "target": dict, "speculator": dict | None}
    require_fields(record, fields, path, COPY_AGAIN)
    require_fields(record["target"], {"name": str, "fingerprint": str}, path, COPY_AGAIN)
    if record["speculator"] is None and (folder / SPECULATOR_FOLDER).exists():
        raise ConfigError(f"{folder} has a {SPECULATOR_FOLDER} that its {PROVENANCE_FILE} does not know: it is another "
                          f"draft's; {COPY_AGAIN}")
    return record


def _check_fingerprint(recorded: dict[str, Any], target_spec: TargetSpec, folder: Path) -> None:
    if recorded["fingerprint"] != target_spec.fingerprint:
        raise ConfigError(f"{folder} was made for {recorded['name']} (fingerprint {recorded['fingerprint'][:12]}), not "
                          f"for {target_spec.name} ({target_spec.fingerprint[:12]}); use the target it was made for")

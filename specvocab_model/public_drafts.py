"""EAGLE-3 drafts that others have trained, read for ``scripts/convert.py``; no code of theirs is run.

Folders in the naming of SafeAILab/EAGLE and SpecForge (``midlayer.*``; safetensors or pytorch_model.bin) and in that of
speculators (``layers.0.*``). Such a draft may bring a head of its own, often over a reduced vocabulary (``d2t``: the
target's id of row ``i`` is ``i + d2t[i]``), and a copy of the target's embedding. Its config.json may be careless about
the context length, which says how long its training rows were: where rotary positions do not depend on it, a checkpoint
gets the target's.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specvocab_model.config import ConfigError
from specvocab_model.draft import DraftArchitecture, SpecVocabDraft
from specvocab_model.eagle3 import ARCHITECTURE, check_target, read_architecture, read_draft_vocab_size
from specvocab_model.export import PROVENANCE_FILE, build_draft, load_checkpoint
from specvocab_model.files import read_json, require_fields
from specvocab_model.layouts import our_config, our_names
from specvocab_model.target import TargetSpec
from specvocab_model.tensor_files import read_safetensors

ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM")  # two names of one thing
LENGTH_DEPENDENT = ("dynamic", "longrope")  # types of RoPE
FETCH_AGAIN = "bring the whole draft here again (hf download OWNER/NAME --local-dir FOLDER)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicDraft:
    """A draft, and what its files hold beside it."""

    model: SpecVocabDraft  # with the head that it brings
    embed_tokens: Tensor | None = None  # [V, d]
    made_for: str | None = None  # the target's name, where the files know it


def open_draft(
    folder: str | Path, target_spec: TargetSpec, feature_layers: Sequence[int] | None = None
) -> PublicDraft:
    """Read a draft for ``target_spec``, a SpecVocab checkpoint or a public one, in its type, on the CPU.

    Args:
        feature_layers: that a public draft was trained with, where its config.json does not say so: indices into HF's
            ``hidden_states``. Numbers in ``eagle_config`` are understood as SGLang does, one less than these.

    Raises:
        ConfigError: one line naming what is missing, contradicts itself, or cannot be a SpecVocab draft.
    """
    if Path(folder, PROVENANCE_FILE).is_file():
        if feature_layers is not None:
            raise ConfigError(f"{folder} is a SpecVocab checkpoint, which says itself what it reads; leave out the "
                              f"feature layers {list(feature_layers)}")
        return PublicDraft(model=load_checkpoint(folder, target_spec))
    return _read_public_draft(Path(folder), target_spec, feature_layers)


def _read_public_draft(folder: Path, target_spec: TargetSpec, feature_layers: Sequence[int] | None) -> PublicDraft:
    path = folder / "config.json"
    written = read_json(path, FETCH_AGAIN)
    config = our_config(written, str(path))
    require_fields(config, {"hidden_size": int, "vocab_size": int}, path, FETCH_AGAIN)
    if (config.get("architectures") or [ARCHITECTURE])[0] in ARCHITECTURES:
        config["architectures"] = [ARCHITECTURE]
    if config.get("tie_word_embeddings"):
        raise ConfigError(f"{path} has tie_word_embeddings=true, and an EAGLE-3 draft has no embedding to tie its head "
                          "to; set it to false if the draft was trained with the target's lm_head or its own")
    if feature_layers is not None:
        config |= {"eagle_aux_hidden_state_layer_ids": list(feature_layers), "eagle_config": None}
    architecture = _with_context(read_architecture(config, str(path), None, target_spec), target_spec, str(path))
    check_target(architecture, target_spec, str(folder))
    tensors = our_names(read_weights(folder), str(folder))
    embed_tokens = tensors.pop("embed_tokens.weight", None)
    draft_vocab_size = _settle_head(tensors, config, str(folder))
    return PublicDraft(
        model=build_draft(architecture, tensors, draft_vocab_size, None, str(folder)),
        embed_tokens=embed_tokens,
        made_for=_target_name(written.get("speculators_config")),
    )


def _with_context(architecture: DraftArchitecture, target_spec: TargetSpec, where: str) -> DraftArchitecture:
    """The draft with the target's context length; its RoPE, whose defaults come of its own, has been read before.

    Raises:
        ConfigError: its rotary frequencies depend on the length itself.
    """
    length, rope_type = architecture.max_position_embeddings, architecture.rope_parameters["rope_type"]
    if rope_type in LENGTH_DEPENDENT and length != target_spec.max_position_embeddings:
        raise ConfigError(f"{where} has rope_type={rope_type!r} and max_position_embeddings={length}, on which its "
                          f"rotary frequencies depend, but {target_spec.name} is served up to "
                          f"{target_spec.max_position_embeddings}; such a draft cannot be converted for it")
    return replace(architecture, max_position_embeddings=target_spec.max_position_embeddings)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, of one file or of shards; a lost shard shows as missing tensors.

    Raises:
        ConfigError: there are none, or a file cannot be read.
    """
    if files := sorted(folder.glob("model*.safetensors")):
        parts = [read_safetensors(file, FETCH_AGAIN) for file in files]
    elif files := sorted(folder.glob("pytorch_model*.bin")):
        parts = [_read_pickle(file) for file in files]
    else:
        raise ConfigError(f"{folder} holds neither model.safetensors nor pytorch_model.bin; {FETCH_AGAIN}")
    return {name: tensor for part in parts for name, tensor in part.items()}


def _target_name(speculators: Any) -> str | None:
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    return verifier.get("name_or_path") if isinstance(verifier, dict) else None


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)  # runs no code from the file
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ConfigError(f"{path} is damaged, or holds more than tensors ({str(error).splitlines()[0]}); "
                          f"{FETCH_AGAIN}, or convert the file to safetensors") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConfigError(f"{path} holds no plain set of tensors; give the file of the model's weights alone")
    return content


def _settle_head(tensors: dict[str, Tensor], config: Mapping[str, Any], where: str) -> int | None:
    """Bring the head's tensors into the form of our checkpoints.

    Returns:
        Rows of the draft's own head; ``None`` where it shares the target's.

    Raises:
        ConfigError: weight, map and config.json are not of one head.
    """
    vocab_size, size = config["vocab_size"], read_draft_vocab_size(config, where)
    if "lm_head.weight" not in tensors:
        if size not in (None, vocab_size) or "d2t" in tensors:
            raise ConfigError(f"{where} has a reduced head (draft_vocab_size={size}) but no lm_head.weight; "
                              f"{FETCH_AGAIN}")
        tensors.pop("t2d", None)
        return None
    rows = tensors["lm_head.weight"].shape[0]
    if rows != (vocab_size if size is None else size):
        raise ConfigError(f"{where} has an lm_head.weight of {rows} rows, but its config.json says draft_vocab_size="
                          f"{size}; restore the config.json that the draft was trained with")
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if rows == vocab_size:
        if d2t is not None and d2t.any():
            raise ConfigError(f"{where} has a head over the full vocabulary and a d2t that renumbers it; the map "
                              "belongs to another head: remove it, or restore the head")
        return rows
    if d2t is None:
        raise ConfigError(f"{where} has a head of {rows} of {vocab_size} tokens but no d2t that says which; "
                          f"{FETCH_AGAIN}")
    if t2d is None:  # engines do not read it
        ids = d2t.long() + torch.arange(len(d2t))
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ids[(ids >= 0) & (ids < vocab_size)]] = True
    tensors |= {"d2t": d2t.long(), "t2d": t2d.bool()}
    return rows

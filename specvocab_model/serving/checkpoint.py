"""Where an engine's draft lies on this machine."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

from specvocab_model.export import DRAFT_FILE, PROVENANCE_FILE
from specvocab_model.speculator_files import SPECULATOR_FOLDER

FILES = ["config.json", DRAFT_FILE, PROVENANCE_FILE, f"{SPECULATOR_FOLDER}/*"]


def checkpoint_folder(name: str, revision: str | None) -> Path:
    """The folder of a checkpoint; of a hub id, what ``load_checkpoint`` reads of it, as engines fetch only theirs."""
    if Path(name).is_dir():
        return Path(name)
    return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))

"""The draft that an engine is about to build, where it is one of ours."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import snapshot_download

from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import DRAFT_FILE, PROVENANCE_FILE, load_checkpoint
from specvocab_model.speculator_files import SPECULATOR_FOLDER
from specvocab_model.target import TargetShape

FILES = ["config.json", DRAFT_FILE, PROVENANCE_FILE, f"{SPECULATOR_FOLDER}/*"]

logger = logging.getLogger(__name__)


def checkpoint_folder(name: str, revision: str | None, cache_dir: str | None = None) -> Path | None:
    """The folder of a checkpoint; of a hub id, what ``load_checkpoint`` reads of it, as engines fetch only theirs.

    Engines also know other stores. What is in one of them is no draft of ours: then ``None``, and a warning.

    Args:
        cache_dir: where the engine keeps what it fetches from the hub; the hub's own place by default.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, allow_patterns=FILES))
    except (OSError, ValueError) as error:  # of connections, of what is not there, of what is no hub id
        logger.warning("The draft %s is neither a folder nor on the hub (%s: %s); if it has a vocabulary speculator, "
                       "copy it into a folder to have it served", name, type(error).__name__, error)
        return None


def read_draft(folder: Path, target: TargetShape) -> SpecVocabDraft | None:
    """The checkpoint, and ``None`` where it is a draft of somebody else's, which the engine reads as it is.

    Args:
        target: as the engine serves it; its ``max_position_embeddings`` are the longest text that it serves.

    Raises:
        ConfigError: one line naming what is damaged, or does not fit the target.
    """
    if not ((folder / PROVENANCE_FILE).exists() or (folder / SPECULATOR_FOLDER).exists()):
        return None
    return load_checkpoint(folder, target)

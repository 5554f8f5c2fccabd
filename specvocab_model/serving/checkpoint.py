"""The draft that an engine is about to build, where it is one of ours."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import snapshot_download

from specvocab_model.config import ConfigError
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


def read_draft(folder: Path, target: TargetShape, num_ranks: int = 1) -> SpecVocabDraft | None:
    """The checkpoint, and ``None`` where it is a draft of somebody else's, which the engine reads as it is.

    Args:
        target: as the engine serves it; its ``max_position_embeddings`` are the longest text that it serves.
        num_ranks: among which the engine cuts the draft.

    Raises:
        ConfigError: one line naming what is damaged, does not fit the target or cannot be cut.
    """
    if not ((folder / PROVENANCE_FILE).exists() or (folder / SPECULATOR_FOLDER).exists()):
        return None
    draft = load_checkpoint(folder, target)
    sizes = draft.architecture
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(sizes, name)
        shared = size % num_ranks == 0 or (name == "num_key_value_heads" and num_ranks % size == 0)  # or repeated
        if not shared:
            raise ConfigError(f"{folder} has {name}={size}, which {num_ranks} ranks cannot share evenly; serve it with "
                              "another degree of tensor parallelism")
    return draft

"""The files of one checkpoint: a writer that a full disk does not break off, digests, and the random state."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from specvocab_model.config import ConfigError
from specvocab_model.files import read_json, require_fields, sha256
from specvocab_model.tensor_files import write_safetensors

STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
RNG_FILE = "rng.pt"
MODEL_FILE = "model.safetensors"


class CheckpointWriter:
    """Writes the files of one checkpoint into a new folder. After the first failure it does nothing but remember it:
    the other ranks are in the middle of a collective, and must be told when it is over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problem: str | None = None
        self.attempt(lambda: _new_folder(folder))

    def write(self, file: str, content: Any) -> None:
        path = self.folder / file
        if path.suffix == ".safetensors":
            self.attempt(lambda: write_safetensors(path, content))
        elif path.suffix == ".pt":
            self.attempt(lambda: _save_pickle(content, path))
        else:
            self.attempt(lambda: path.write_text(json.dumps(content, indent=2)))

    def attempt(self, action: Callable[[], Any]) -> None:
        if self.problem is not None:
            return
        try:
            action()
        except (OSError, SafetensorError) as error:
            self.problem = str(error)
            shutil.rmtree(self.folder, ignore_errors=True)


def _save_pickle(content: list[dict[str, Tensor]], path: Path) -> None:
    buffer = io.BytesIO()  # kilobytes; into a file, torch.save reports a full disk as a RuntimeError
    torch.save(content, buffer)
    path.write_bytes(buffer.getvalue())


def _new_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write_manifest(folder: Path) -> None:
    """SHA-256 of every file in ``folder``."""
    digests = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST_FILE).write_text(json.dumps(digests, indent=2))


def check_whole(folder: Path) -> None:
    """See that a checkpoint is as it was written; reads all of it.

    Raises:
        ConfigError: naming the first file that is not.
    """
    path, consequence = folder / MANIFEST_FILE, "this checkpoint cannot be used"
    digests = read_json(path, consequence)
    require_fields(digests, dict.fromkeys((STATE_FILE, MODEL_FILE, RNG_FILE), str), path, consequence)
    for name, digest in digests.items():
        if not (folder / name).is_file() or sha256(folder / name) != digest:
            raise ConfigError(f"{folder / name} is missing or damaged; {consequence}")


def random_state(device: torch.device) -> dict[str, Any]:
    """Of every generator of this rank, in types that ``torch.load`` takes with ``weights_only``."""
    of_numpy: Any = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (of_numpy[0], of_numpy[1].tolist(), *of_numpy[2:]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """What ``random_state`` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)

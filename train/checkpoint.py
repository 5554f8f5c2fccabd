"""Checkpoints to resume from, and the final weights that ``scripts/export.py`` reads.

    output_dir/checkpoints/step-120/   weights, optimizer state and RNG of every rank (accelerate), state.json
    output_dir/checkpoints/latest      name of the newest complete one
    output_dir/final/                  model.safetensors (fp32; draft.*, speculator.*), training.json

A checkpoint is written under another name and renamed when all of it is on the disk, so a run killed at any time leaves
the one before intact.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

from specvocab_model.config import Config, ConfigError
from specvocab_model.files import read_json, require_fields, sha256

STATE_FILE = "state.json"
LATEST_FILE = "latest"
MODEL_FILE = "model.safetensors"
TRAINING_FILE = "training.json"

# What may differ between the run that wrote a checkpoint and the one that resumes: it does not touch the numbers, or
# (loss_memory_mib, so that a run that was out of memory can go on) only the order of sums. The target and the data are
# compared by content, not by path, and the device by what it is, not by how it was asked for.
FREE_SETTINGS = (
    "action", "inspect", "run_name", "output_dir", "target.model", "target.chat_template_kwargs", "data.train_path",
    "data.validation_path", "data.features_path", "data.num_workers", "generation.", "tracking.", "eval.", "sweep.",
    "distributed.cpu", "trainer.resume", "trainer.log_every", "trainer.validate_every", "trainer.save_every",
    "trainer.keep_checkpoints", "trainer.loss_memory_mib", "head.quantization",
)


@dataclass(slots=True, kw_only=True)
class TrainState:
    """What a run remembers besides weights, optimizer and RNG. The loader's position is the step itself."""

    step: int = 0
    tracker_run_id: str | None = None


def run_identity(
    config: Config, *, world_size: int, device_type: str, target_fingerprint: str, data_sha256: str
) -> dict[str, Any]:
    """Everything that decides the numbers of a run, flat: a checkpoint is resumed only by the same."""
    settings = {key: value for key, value in flatten(asdict(config)) if not key.startswith(FREE_SETTINGS)}
    return {**settings, "number of ranks": world_size, "device": device_type,
            "target fingerprint": target_fingerprint, "training data sha256": data_sha256}


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class Checkpoints:
    """The checkpoints of one run.

    Args:
        output_dir: of the run, seen by all ranks.
        keep: number of newest checkpoints to keep.
        identity: of ``run_identity``.
    """

    def __init__(self, output_dir: Path, accelerator: Accelerator, *, keep: int, identity: dict[str, Any]) -> None:
        self.folder = output_dir / "checkpoints"
        self.final = output_dir / "final"
        self.accelerator = accelerator
        self.keep = keep
        self.identity = identity

    def save(self, state: TrainState) -> None:
        """Write a complete checkpoint; called by all ranks."""
        accelerator = self.accelerator
        partial = self.folder / f".partial-step-{state.step}"
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        if accelerator.is_main_process:
            parts = sorted(path for path in partial.rglob("*") if path.is_file())
            digests = {str(path.relative_to(partial)): sha256(path) for path in parts}
            content = {"state": asdict(state), "identity": self.identity, "sha256": digests}
            (partial / STATE_FILE).write_text(json.dumps(content, indent=2))
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process:
            _flush_tree(partial)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self._publish(partial, state.step)
        accelerator.wait_for_everyone()

    def _publish(self, partial: Path, step: int) -> None:
        """Make ``partial`` the newest checkpoint, then remove the ones that are not kept.

        Of a later step than ``step`` none is: ``latest`` did not point there, or this run would have begun there.
        """
        name = f"step-{step}"
        shutil.rmtree(self.folder / name, ignore_errors=True)
        partial.rename(self.folder / name)
        pointer = self.folder / f".{LATEST_FILE}.partial"
        pointer.write_text(name)
        _flush(pointer)
        os.replace(pointer, self.folder / LATEST_FILE)
        _flush(self.folder)
        names = ((path, path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))
        complete = {int(number): path for path, number in names if number.isdecimal()}  # a user's copy is kept
        kept = sorted(number for number in complete if number <= step)[-self.keep :]
        for number in complete.keys() - kept:
            shutil.rmtree(complete[number])

    def exist(self) -> bool:
        """Whether there is one to resume from."""
        return (self.folder / LATEST_FILE).exists()

    def restore(self) -> TrainState:
        """Load the newest checkpoint into the prepared model and optimizer, and the RNG of this rank.

        Raises:
            ConfigError: it was written by a run with other settings, data, target or number of ranks, or a part of it
                is missing or damaged.
        """
        folder = self._newest()
        content = self._read_state(folder)
        then, now = content["identity"], self.identity
        differences = [
            f"{key}: {then.get(key)!r} then, {now.get(key)!r} now"
            for key in sorted({*then, *now}) if then.get(key) != now.get(key)
        ]
        if differences:
            raise ConfigError(
                f"{folder} was written by another configuration ({'; '.join(differences)}); restore these settings, "
                "choose another run_name, or start over with trainer.resume=false"
            )
        for name, digest in content.get("sha256", {}).items():  # older checkpoints do not have it
            if not (folder / name).is_file() or sha256(folder / name) != digest:
                raise ConfigError(f"{folder / name} is missing or damaged; {self._go_back()}")
        self.accelerator.load_state(str(folder))
        return TrainState(**content["state"])

    def _newest(self) -> Path:
        name = (self.folder / LATEST_FILE).read_text(encoding="utf-8", errors="replace").strip()
        if name not in (path.name for path in self.folder.iterdir() if path.is_dir()):
            raise ConfigError(f"{self.folder / LATEST_FILE} names {name!r}, which is not there; {self._go_back()}")
        return self.folder / name

    def _read_state(self, folder: Path) -> dict[str, Any]:
        path = folder / STATE_FILE
        content = read_json(path, self._go_back())
        require_fields(content, {"state": dict, "identity": dict}, path, self._go_back())
        return content

    def _go_back(self) -> str:
        return (f"write the name of another checkpoint into {self.folder / LATEST_FILE} to go on from that one, or "
                "start over with trainer.resume=false")

    def discard(self) -> None:
        """Forget an earlier run of this name: checkpoints and result, which would pass for the result of this one."""
        if self.accelerator.is_main_process:
            for folder in (self.folder, self.final):
                shutil.rmtree(folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()


def save_final(folder: Path, accelerator: Accelerator, model: nn.Module, training: dict[str, Any]) -> None:
    """Write the consolidated fp32 weights and what is known about the run; called by all ranks.

    Args:
        model: prepared by ``accelerator``; ZeRO-3 gathers its partitions here.
        training: content of ``training.json``: ``step``, ``metrics``, ``config``, ``git_commit``,
            ``data_manifest_sha256``, ``target_fingerprint``.
    """
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        on_cpu = {name: tensor.to("cpu", torch.float32).contiguous() for name, tensor in weights.items()}
        save_file(on_cpu, partial / MODEL_FILE, metadata={"format": "pt"})
        record = training | {"model_sha256": sha256(partial / MODEL_FILE)}
        (partial / TRAINING_FILE).write_text(json.dumps(record, indent=2))
        _flush_tree(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    accelerator.wait_for_everyone()


def _flush_tree(folder: Path) -> None:
    """Force every file and folder of a tree to the disk: else a rename may survive a crash that its data do not."""
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

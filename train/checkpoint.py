"""Checkpoints to resume from, and the final weights that ``scripts/export.py`` reads.

    output_dir/checkpoints/step-120/   model.safetensors             the fp32 weights, by name
                                       exp_avg(_sq).safetensors      Adam's moments, by the weights' names
                                       rng.pt                        random state of every rank
                                       state.json                    step, tracker's run, best metric, settings
                                       manifest.json                 SHA-256 of every file above
    output_dir/checkpoints/latest      name of the newest one
    output_dir/final/                  model.safetensors (fp32; draft.*, speculator.*), training.json

Nothing in a checkpoint depends on how the run was distributed: it resumes on another number of ranks and under another
strategy. Rank 0 writes all of it under another name, flushes it to the disk and renames it, so a run killed at any time
leaves the one before intact. All ranks must see ``output_dir``.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from specvocab_model.config import ConfigError
from specvocab_model.files import flush, flush_tree, read_json, replace_folder, require_fields, sha256
from train.checkpoint_files import (
    MODEL_FILE,
    RNG_FILE,
    STATE_FILE,
    CheckpointWriter,
    check_whole,
    random_state,
    set_random_state,
    write_manifest,
)
from train.optim import MOMENTS, Updater

logger = logging.getLogger(__name__)

LATEST_FILE = "latest"
TRAINING_FILE = "training.json"
BEST_METRIC = "simulated_tau/candidates"  # of the validation data, to be large

class CheckpointError(RuntimeError):
    """A checkpoint that could not be written; the ones before are intact."""


@dataclass(slots=True, kw_only=True)
class TrainState:
    """What a run remembers besides weights, moments and RNG. The loader's position is the step itself."""

    step: int = 0
    skipped_steps: int = 0  # of these, the ones that changed nothing, because a loss or gradient was not finite
    validated_step: int = 0  # the last one after which the validation data were measured
    best_tau: float = 0.0  # simulated acceptance length under the candidates, on the validation data
    best_step: int = 0
    tracker_run_id: str | None = None


class Checkpoints:
    """The checkpoints of one run.

    Args:
        output_dir: of the run, seen by all ranks.
        keep: number of newest checkpoints to keep.
        keep_best: also keep that of ``TrainState.best_step``.
        identity: of ``run_identity``.
    """

    def __init__(
        self, output_dir: Path, accelerator: Accelerator, *, keep: int, keep_best: bool, identity: dict[str, Any]
    ) -> None:
        self.folder = output_dir / "checkpoints"
        self.final = output_dir / "final"
        self.accelerator = accelerator
        self.keep = keep
        self.keep_best = keep_best
        self.identity = identity
        self.newest_step = 0

    # Saving.

    def save(self, state: TrainState, updater: Updater) -> None:
        """Write a complete checkpoint; called by all ranks.

        Raises:
            CheckpointError: on all ranks, if rank 0 could not write (a full disk, above all). What it wrote is removed.
        """
        partial = self.folder / f".partial-step-{state.step}"
        writer = CheckpointWriter(partial) if self.accelerator.is_main_process else None
        for file, content in self._contents(state, updater):
            if writer is not None:
                writer.write(file, content)
        if writer is not None:
            writer.attempt(lambda: self._publish(partial, state))
        problem = broadcast_object_list([None if writer is None else writer.problem])[0]
        if problem is not None:
            raise CheckpointError(f"the checkpoint of step {state.step} could not be written to {self.folder} "
                                  f"({problem}); those before it are intact: make room, then start the same command")
        self.newest_step = state.step

    def _contents(self, state: TrainState, updater: Updater) -> Iterator[tuple[str, Any]]:
        """Files and what they hold, one after the other to spare memory; every ``next`` is called by all ranks."""
        yield MODEL_FILE, updater.gather_weights()
        if state.step > state.skipped_steps:
            for key in MOMENTS:
                yield f"{key}.safetensors", updater.gather_moment(key)
        yield RNG_FILE, gather_object([random_state(self.accelerator.device)])
        yield STATE_FILE, {"state": asdict(state), "identity": self.identity}

    def _publish(self, partial: Path, state: TrainState) -> None:
        """Make ``partial`` the newest checkpoint, then remove the ones that are not kept.

        Of a later step than ``state.step`` none is: this run would have begun there, had it been whole.
        """
        name = f"step-{state.step}"
        write_manifest(partial)
        flush_tree(partial)
        shutil.rmtree(self.folder / name, ignore_errors=True)
        partial.rename(self.folder / name)
        pointer = self.folder / f".{LATEST_FILE}.partial"
        pointer.write_text(name)
        flush(pointer)
        os.replace(pointer, self.folder / LATEST_FILE)
        flush(self.folder)
        complete = self._by_step()
        kept = set(sorted(step for step in complete if step <= state.step)[-self.keep :])
        if self.keep_best:
            kept.add(state.best_step)
        for step in complete.keys() - kept:
            shutil.rmtree(complete[step])

    def _by_step(self) -> dict[int, Path]:
        names = ((path, path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))
        return {int(number): path for path, number in names if number.isdecimal()}  # a user's copy is none of them

    # Resuming.

    def find(self) -> Path | None:
        """The newest whole checkpoint, the same on all ranks; None if there never was one.

        Raises:
            ConfigError: there are some, but all are damaged; or it was written by a run with other settings, data or
                target.
        """
        found: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                found[0] = self._newest_whole()
            except ConfigError as error:
                found[1] = str(error)
        folder, problem = broadcast_object_list(found)
        if problem is not None:
            raise ConfigError(problem)
        return folder

    def _newest_whole(self) -> Path | None:
        if not self.folder.exists():
            return None
        by_step = self._by_step()
        candidates = [by_step[step] for step in sorted(by_step, reverse=True)]
        pointer = self.folder / LATEST_FILE
        if pointer.exists():  # what came after it was never finished
            named = self.folder / pointer.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
            candidates = candidates[candidates.index(named) :] if named in candidates else candidates
        damages: list[str] = []
        for folder in candidates:
            try:
                check_whole(folder)
            except ConfigError as error:
                damages.append(str(error))
                continue
            for damage in damages:
                logger.warning("%s: resuming from %s", damage, folder)
            self._check_identity(folder)
            return folder
        if damages or pointer.exists():
            raise ConfigError(f"no checkpoint in {self.folder} is whole ({'; '.join(damages) or 'none is there'}); "
                              "start over with trainer.resume=false")
        return None

    def _check_identity(self, folder: Path) -> None:
        then, now = json.loads((folder / STATE_FILE).read_text())["identity"], self.identity
        then = {"head.tied": False} | then  # what earlier versions did
        differences = [
            f"{key}: {then.get(key)!r} then, {now.get(key)!r} now"
            for key in sorted({*then, *now}) if then.get(key) != now.get(key)
        ]
        if differences:
            raise ConfigError(
                f"{folder} was written by another configuration ({'; '.join(differences)}); restore these settings, "
                "choose another run_name, or start over with trainer.resume=false"
            )

    def load_weights(self, folder: Path, model: nn.Module) -> None:
        """Into the model of this rank, before it is prepared."""
        model.load_state_dict(load_file(folder / MODEL_FILE))

    def restore(self, folder: Path, updater: Updater) -> TrainState:
        """Adam's moments into the prepared optimizer, and this rank's random state; called by all ranks."""
        state = TrainState(**json.loads((folder / STATE_FILE).read_text())["state"])
        if state.step > state.skipped_steps:
            files = {key: safe_open(folder / f"{key}.safetensors", "pt") for key in MOMENTS}
            updater.load_moments(lambda key, name: files[key].get_tensor(name), state.step - state.skipped_steps)
        random_states = torch.load(folder / RNG_FILE, weights_only=True)
        if self.accelerator.process_index < len(random_states):  # a rank that was not there keeps that of its seed
            set_random_state(random_states[self.accelerator.process_index], self.accelerator.device)
        self.newest_step = state.step
        return state

    def discard(self) -> None:
        """Forget an earlier run of this name: checkpoints and result, which would pass for the result of this one."""
        if self.accelerator.is_main_process:
            for folder in (self.folder, self.final):
                shutil.rmtree(folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()


def save_final(folder: Path, accelerator: Accelerator, updater: Updater, training: dict[str, Any]) -> None:
    """Write the consolidated fp32 weights and what is known about the run; called by all ranks.

    Args:
        training: content of ``training.json``: ``step``, ``metrics``, ``config``, ``git_commit``,
            ``data_manifest_sha256``, ``target_fingerprint``.

    Raises:
        CheckpointError: on all ranks, if rank 0 could not write.
    """
    weights, problem = updater.gather_weights(), None
    if accelerator.is_main_process:
        partial = folder.with_name(f".{folder.name}.partial")
        writer = CheckpointWriter(partial)
        writer.write(MODEL_FILE, weights)
        writer.attempt(lambda: training.update(model_sha256=sha256(partial / MODEL_FILE)))
        writer.write(TRAINING_FILE, training)
        writer.attempt(lambda: replace_folder(partial, folder))
        problem = writer.problem
    problem = broadcast_object_list([problem])[0]
    if problem is not None:
        raise CheckpointError(f"the result could not be written to {folder} ({problem}); the checkpoints are intact: "
                              "make room, then start the same command")


def best_checkpoint(output_dir: Path) -> tuple[Path, TrainState]:
    """The checkpoint with the best simulated tau on the validation data, and the state of the run that says so.

    Raises:
        ConfigError: there is none, because nothing was validated or it was not kept, or it is damaged.
    """
    folder, fix = output_dir / "checkpoints", "export the final weights (export.weights=final)"
    pointer = folder / LATEST_FILE
    if not pointer.is_file():
        raise ConfigError(f"{folder} holds no checkpoint; {fix}")
    path = folder / pointer.read_text(encoding="utf-8", errors="replace").strip("\0\n ") / STATE_FILE
    content = read_json(path, fix)
    require_fields(content, {"state": dict}, path, fix)
    require_fields(content["state"], {"best_step": int, "best_tau": float}, path, fix)
    state = TrainState(**content["state"])
    best = folder / f"step-{state.best_step}"
    if not best.is_dir():
        raise ConfigError(f"{best}, the best of the run, was not kept (trainer.keep_best); {fix}")
    check_whole(best)
    return best, state

"""Where metrics go: files always, W&B or TensorBoard on request. Rank 0 only.

    output_dir/metrics.jsonl    one object a line: step and metrics
    output_dir/samples.jsonl    one drafted text a line, see samples.py
    output_dir/run.json         what the numbers depend on beside config.yaml: git commit, data, target, versions

Metrics are written to the files first, and a resumed W&B run is given from there what it has not got.
"""

from __future__ import annotations

import html
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import yaml

from specvocab_model.config import ConfigError, TrackingConfig
from train.samples import Sample

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
RUN_FILE = "run.json"
WANDB_INIT_TIMEOUT_S = 30.0
WANDB_FINISH_TIMEOUT_S = 60.0
WANDB_SLOWEST_UPLOAD = 2e6  # bytes a second; an artifact that takes longer is given up

SAMPLE_STYLES = {
    "accepted": "background:#c6efce;color:#0b5d1e",
    "rejected": "text-decoration:line-through;color:#b00020",
}


class TrackingError(RuntimeError):
    """The run's own files could not be written."""


class Backend(Protocol):
    """A service or file that takes what a run reports."""

    run_id: str | None  # what the service needs to continue the same run

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_samples(self, samples: Sequence[Sample], step: int) -> None: ...

    def log_artifact(self, folder: Path) -> None: ...

    def finish(self, exit_code: int) -> None: ...


class JsonlBackend:
    """One JSON object a line. A resumed run drops the lines that it is about to write again."""

    run_id: str | None = None

    def __init__(self, folder: Path, first_step: int) -> None:
        self.files = {}
        for name in (METRICS_FILE, SAMPLES_FILE):
            path = folder / name
            if path.exists():
                rewritten = path.with_suffix(".partial")
                rewritten.write_text("".join(json.dumps(line) + "\n" for line in read_lines(path, first_step)))
                os.replace(rewritten, path)
            self.files[name] = path.open("a", buffering=1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._write(METRICS_FILE, {"step": step, **metrics})

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        for sample in samples:
            self._write(SAMPLES_FILE, {"step": step, **sample.to_dict()})

    def _write(self, name: str, line: dict[str, Any]) -> None:
        try:
            self.files[name].write(json.dumps(line) + "\n")
        except OSError as error:
            raise TrackingError(f"step {line['step']} could not be written to {self.files[name].name} ({error}); make "
                                "room there and start the same command again, it goes on from the last checkpoint"
                                ) from error

    def log_artifact(self, folder: Path) -> None:
        pass  # it lies beside the files

    def finish(self, exit_code: int) -> None:
        for file in self.files.values():
            file.close()


def read_lines(path: Path, before_step: float = float("inf")) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file of a run that may be under way, or was killed while it wrote the last one."""
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if line["step"] < before_step:
            yield line


def check_installed(config: TrackingConfig) -> None:
    """
    Raises:
        ConfigError: the backend's package, which is an extra, is not installed.
    """
    if config.backend == "tensorboard" and find_spec("tensorboard") is None:
        raise ConfigError("tracking=tensorboard needs tensorboard: pip install 'specvocab[tensorboard]'")


class TensorBoardBackend:
    """Event files in ``output_dir/tensorboard``."""

    run_id: str | None = None

    def __init__(self, folder: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step)
        self.writer.add_text("settings", f"```\n{yaml.safe_dump(dict(settings), sort_keys=False)}```", first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self.writer.add_text("drafted text", samples_html(samples), step)

    def log_artifact(self, folder: Path) -> None:
        raise NotImplementedError("TensorBoard keeps no artifacts")  # TrackingConfig refuses to ask for it

    def finish(self, exit_code: int) -> None:
        self.writer.close()


class WandbBackend:
    """A W&B run, continued under the same id after a resume.

    Without a key, or when the server does not answer within ``WANDB_INIT_TIMEOUT_S``, the run is written to
    ``output_dir/wandb`` (``wandb sync`` uploads it later) and training goes on; ``WANDB_MODE`` overrides. Once it runs,
    metrics are queued and sent by a process of W&B's, and ``finish`` waits ``WANDB_FINISH_TIMEOUT_S`` for what is left.

    Args:
        history: the metrics of all steps before this process, by step. The service may not have the last of them: what
            a killed process had queued is lost, and one that was offline wrote into another folder.
    """

    def __init__(
        self, config: TrackingConfig, *, name: str, folder: Path, run_id: str | None, settings: dict[str, Any],
        history: Iterator[dict[str, Any]],
    ) -> None:
        import wandb

        options: dict[str, Any] = {
            "project": config.project, "entity": config.entity, "group": config.group, "tags": config.tags,
            "name": name, "dir": str(folder), "id": run_id, "resume": "allow", "config": settings,
            "settings": wandb.Settings(init_timeout=WANDB_INIT_TIMEOUT_S, finish_timeout=WANDB_FINISH_TIMEOUT_S),
        }
        if config.offline:
            options["mode"] = "offline"
        elif "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False):
            logger.warning("no W&B key: the run is tracked offline in %s", folder / "wandb")
            options["mode"] = "offline"
        try:
            self.run = wandb.init(**options)
        except wandb.errors.CommError as error:
            logger.warning("W&B cannot be reached (%s): the run is tracked offline in %s", error, folder / "wandb")
            wandb.teardown()  # the service still holds the run's id
            self.run = wandb.init(**{**options, "mode": "offline"})
        self.run_id: str | None = self.run.id
        first_missing = self.run.step
        for line in history:
            if line["step"] >= first_missing:
                self.log({key: value for key, value in line.items() if key != "step"}, line["step"])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        import wandb

        self.run.log({"drafted text": wandb.Html(samples_html(samples))}, step=step)

    def log_artifact(self, folder: Path) -> None:
        """Waits for the upload: ``finish`` alone would break off that of a large draft."""
        import wandb

        artifact = wandb.Artifact(f"run-{self.run_id}-{folder.name}", type="model")
        artifact.add_dir(str(folder), policy="immutable")  # else W&B copies it into the home directory first
        try:
            self.run.log_artifact(artifact)
            if not self.run.offline:
                artifact.wait(timeout=math.ceil(WANDB_FINISH_TIMEOUT_S + artifact.size / WANDB_SLOWEST_UPLOAD))
        except (wandb.errors.Error, ValueError) as error:  # W&B raises the latter where the server refuses
            logger.warning("%s did not reach W&B (%s): `wandb artifact put --type model --name %s/%s %s` uploads it",
                           folder, error, self.run.project, artifact.name, folder)

    def finish(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)


def samples_html(samples: Sequence[Sample]) -> str:
    """Drafted texts for a browser: accepted tokens on green, the first rejected one of each chain struck out."""
    parts = ["<div style='font:14px/1.6 sans-serif'>"]
    for sample in samples:
        text = "".join(
            f"<span style='{SAMPLE_STYLES[kind]}'>{html.escape(piece)}</span>" if kind in SAMPLE_STYLES
            else html.escape(piece)
            for kind, piece in sample.pieces
        )
        parts.append(f"<p><b>{html.escape(sample.id)}</b>, {sample.tokens_per_round:.2f} tokens a round</p>"
                     f"<pre style='white-space:pre-wrap'>{text}</pre>")
    return "".join([*parts, "</div>"])


class Tracker:
    """All backends of a run; on every rank but 0 it has none.

    Args:
        first_step: the first step this process will log.
        settings: the resolved configuration, shown beside the metrics.
        provenance: what else the numbers depend on; flat.
    """

    def __init__(
        self, config: TrackingConfig, *, name: str, output_dir: Path, run_id: str | None, first_step: int,
        settings: dict[str, Any], provenance: dict[str, Any], is_main: bool,
    ) -> None:
        self.backends: list[Backend] = []
        if not is_main:
            return
        (output_dir / RUN_FILE).write_text(json.dumps(provenance, indent=2) + "\n")
        self.backends.append(JsonlBackend(output_dir, first_step))
        shown = {**settings, "provenance": provenance}
        if config.backend == "tensorboard":
            self.backends.append(TensorBoardBackend(output_dir / "tensorboard", first_step, shown))
        elif config.backend == "wandb":
            history = read_lines(output_dir / METRICS_FILE, first_step)
            self.backends.append(WandbBackend(config, name=name, folder=output_dir, run_id=run_id, settings=shown,
                                              history=history))

    @property
    def run_id(self) -> str | None:
        return next((backend.run_id for backend in self.backends if backend.run_id), None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._on_each(lambda backend: backend.log(metrics, step))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Drafted texts; none are no entry."""
        if samples:
            self._on_each(lambda backend: backend.log_samples(samples, step))

    def log_artifact(self, folder: Path) -> None:
        """Hand a folder of results to the service."""
        self._on_each(lambda backend: backend.log_artifact(folder))

    def finish(self, exit_code: int = 0) -> None:
        """Close everything; 0 says that the run came to its end. Once only."""
        self._on_each(lambda backend: backend.finish(exit_code))
        self.backends = []

    def _on_each(self, action: Callable[[Backend], None]) -> None:
        """A scheduler that stops a job signals all its processes, and W&B's own ends at once: training needs it not."""
        for backend in list(self.backends):
            try:
                action(backend)
            except ConnectionError as error:
                logger.warning("W&B's process is gone (%s); a resumed run sends what it had not written yet", error)
                self.backends.remove(backend)

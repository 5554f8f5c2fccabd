"""Where metrics go: a JSONL file always, W&B or TensorBoard on request. Rank 0 only."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from specvocab_model.config import TrackingConfig

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
WANDB_INIT_TIMEOUT_S = 30.0
WANDB_FINISH_TIMEOUT_S = 60.0


class Backend(Protocol):
    """A service or file that takes metrics."""

    run_id: str | None  # what the service needs to continue the same run

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


class JsonlBackend:
    """One JSON object a line in ``metrics.jsonl``. A resumed run drops the lines it is about to write again."""

    run_id: str | None = None

    def __init__(self, path: Path, first_step: int) -> None:
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) < first_step]
            rewritten = path.with_suffix(".partial")
            rewritten.write_text("".join(line + "\n" for line in kept))
            os.replace(rewritten, path)
        self.file = path.open("a", buffering=1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")

    def finish(self) -> None:
        self.file.close()


def _step_of(line: str) -> float:
    """Step of a line; infinite for the last line of a run that was killed while writing it."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return float("inf")


class TensorBoardBackend:
    """Event files in ``output_dir/tensorboard``."""

    run_id: str | None = None

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


class WandbBackend:
    """A W&B run, continued under the same id after a resume.

    Without a key, or when the server does not answer within ``WANDB_INIT_TIMEOUT_S``, the run is written to
    ``output_dir/wandb`` (``wandb sync`` uploads it later) and training goes on; ``WANDB_MODE`` overrides.
    """

    def __init__(self, config: TrackingConfig, *, name: str, folder: Path, run_id: str | None, settings: dict) -> None:
        import wandb

        options: dict[str, Any] = {
            "project": config.project, "entity": config.entity, "group": config.group, "tags": config.tags,
            "name": name, "dir": str(folder), "id": run_id, "resume": "allow", "config": settings,
            "settings": wandb.Settings(init_timeout=WANDB_INIT_TIMEOUT_S, finish_timeout=WANDB_FINISH_TIMEOUT_S),
        }
        if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False):
            logger.warning("no W&B key: the run is tracked offline in %s", folder / "wandb")
            options["mode"] = "offline"
        try:
            self.run = wandb.init(**options)
        except wandb.errors.CommError as error:
            logger.warning("W&B cannot be reached (%s): the run is tracked offline in %s", error, folder / "wandb")
            wandb.teardown()  # the service still holds the run's id
            self.run = wandb.init(**{**options, "mode": "offline"})
        self.run_id: str | None = self.run.id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self.run.finish()


class Tracker:
    """All backends of a run; on every rank but 0 it has none.

    Args:
        first_step: the first step this process will log.
        settings: the resolved configuration, shown beside the metrics.
    """

    def __init__(
        self, config: TrackingConfig, *, name: str, output_dir: Path, run_id: str | None, first_step: int,
        settings: dict[str, Any], is_main: bool,
    ) -> None:
        self.backends: list[Backend] = []
        if not is_main:
            return
        self.backends.append(JsonlBackend(output_dir / METRICS_FILE, first_step))
        if config.backend == "tensorboard":
            self.backends.append(TensorBoardBackend(output_dir / "tensorboard", first_step))
        elif config.backend == "wandb":
            self.backends.append(
                WandbBackend(config, name=name, folder=output_dir, run_id=run_id, settings=settings)
            )

    @property
    def run_id(self) -> str | None:
        return next((backend.run_id for backend in self.backends if backend.run_id), None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for backend in self.backends:
            backend.log(metrics, step)

    def finish(self) -> None:
        for backend in self.backends:
            backend.finish()

"""What training runs have left in their folders, for who reports on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specvocab_model.config import ConfigError
from specvocab_model.files import read_json
from train.identity import flatten
from train.tracking import METRICS_FILE, RUN_FILE, SAMPLES_FILE, read_lines

FIX = "remove it: what it says is then left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What a run has written so far."""

    label: str
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    config: dict[str, Any]
    provenance: dict[str, Any]
    finished: bool

    @property
    def num_steps(self) -> int:
        return max((line["step"] for line in self.metrics), default=0)

    def points(self, name: str) -> list[tuple[float, float]]:
        return [(line["step"], line[name]) for line in self.metrics if name in line]

    def last(self, name: str) -> float | None:
        points = self.points(name)
        return points[-1][1] if points else None


def read_runs(folders: Sequence[Path]) -> list[RunFiles]:
    """Runs by their folders' names, or by their whole paths where two names are the same.

    Raises:
        ConfigError: a folder is not that of a run, or what lies in it is damaged.
    """
    if missing := [folder for folder in folders if not (folder / METRICS_FILE).is_file()]:
        raise ConfigError(f"no {METRICS_FILE} in {', '.join(map(str, missing))}; name output folders of training runs")
    names = [folder.resolve().name for folder in folders]
    return [read_run(folder, name if names.count(name) == 1 else str(folder))
            for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, label: str) -> RunFiles:
    config, provenance, samples = folder / "config.yaml", folder / RUN_FILE, folder / SAMPLES_FILE
    settings: Any = {}
    if config.exists():
        try:
            settings = yaml.safe_load(config.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{config} is damaged: it is not YAML ({' '.join(str(error).split())}); {FIX}") from error
        if not isinstance(settings, dict):
            raise ConfigError(f"{config} is damaged: it holds no settings; {FIX}")
    return RunFiles(
        label=label,
        metrics=list(read_lines(folder / METRICS_FILE)),
        samples=list(read_lines(samples)) if samples.exists() else [],
        config=dict(flatten(settings)),
        provenance=read_json(provenance, FIX) if provenance.exists() else {},
        finished=(folder / "final" / "training.json").exists(),
    )

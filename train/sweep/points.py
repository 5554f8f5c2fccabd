"""A point of a sweep: one training run, its folder, its command and what became of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specvocab_model.cli import compose
from specvocab_model.config import Config, ConfigError
from specvocab_model.files import read_json, replace_json, require_fields
from train.identity import FREE_SETTINGS, flatten
from train.tracking import METRICS_FILE, read_lines

POINT_FILE = "point.json"
LOG_FILE = "log.txt"
MAX_NAME = 80
# A line that says why a run failed: our own, or an exception; not what launchers say about a rank that has failed.
REASON = re.compile(r"(\[rank\d+\]: ?)?(?!.*(CalledProcess|ChildFailed)Error)(\w+\.)*(error|\w+Error|\w+Exception)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of ``train/main.py``."""

    name: str
    parameters: dict[str, Any]
    folder: Path
    arguments: list[str]  # of train/main.py
    config: Config

    def values(self, metric: str) -> list[tuple[int, float]]:
        """(optimizer step, value) of everything logged so far."""
        path = self.folder / METRICS_FILE
        return [(line["step"], line[metric]) for line in read_lines(path) if metric in line] if path.exists() else []

    def is_finished(self) -> bool:
        """Whether the run came to its end with these settings, as far as they touch the numbers."""
        path = self.folder / "final" / "training.json"
        if not path.exists():
            return False
        fix = f"remove the folder {path.parent}: the run goes on from its last checkpoint"
        training = read_json(path, fix)
        require_fields(training, {"config": dict}, path, fix)
        return decisive(training["config"]) == decisive(asdict(self.config))

    def outcome(self) -> dict[str, Any]:
        """What the last sweep that ran it has noted; empty if none has."""
        path = self.folder / POINT_FILE
        return read_json(path, "remove it: only how the point ended is forgotten") if path.exists() else {}

    def note(self, **outcome: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_json(self.folder / POINT_FILE, self.outcome() | {"parameters": self.parameters} | outcome)

    def last_words(self) -> str:
        """The line of the log that says why the run failed."""
        path = self.folder / LOG_FILE
        text = path.read_text(errors="replace") if path.exists() else ""
        lines = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if REASON.match(line)]
        return (errors or lines or ["it left no message"])[-1].strip()


def decisive(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide the numbers of a run, flat, as JSON gives them back."""
    flat = json.loads(json.dumps(dict(flatten(settings))))
    kept = {key: value for key, value in flat.items() if not key.startswith(FREE_SETTINGS)}
    factors = ("trainer.micro_batch_size", "trainer.gradient_accumulation_steps")
    return kept | {f"rows a step and rank ({' * '.join(factors)})": flat[factors[0]] * flat[factors[1]]}


class Points:
    """Makes the points of one sweep, each checked by composing its whole configuration.

    Args:
        arguments: of the sweep's own command; points take over all of them but the sweep's.
    """

    def __init__(self, config: Config, arguments: Sequence[str]) -> None:
        self.base = config
        self.folder = Path(config.output_dir) / "sweeps" / config.sweep.name
        self.flags, self.overrides = split_arguments(arguments)

    def make(self, parameters: Mapping[str, Any], name: str | None = None) -> Point:
        """
        Raises:
            ConfigError: a key or a value is not one that training takes.
        """
        name = point_name(parameters) if name is None else name
        folder = self.folder / name
        own = [f"{key}={literal(value)}" for key, value in parameters.items()]
        identity = {"run_name": f"{self.base.run_name}-{self.base.sweep.name}-{name}", "output_dir": str(folder),
                    "tracking.group": self.base.tracking.group or f"{self.base.run_name}-{self.base.sweep.name}"}
        overrides = [*self.overrides, *own, *(f"{key}={literal(value)}" for key, value in identity.items())]
        try:
            config = compose(overrides, self.flags.get("--config-dir"))
        except ConfigError as error:
            raise ConfigError(f"sweep={self.base.sweep.name}, point {', '.join(own)}: {error}") from error
        flags = [part for flag in self.flags.items() for part in flag]
        return Point(name=name, parameters=dict(parameters), folder=folder, arguments=[*flags, *overrides],
                     config=config)


def split_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """``--config-dir`` and the overrides that are not about the sweep.

    Raises:
        ConfigError: another flag.
    """
    flags, overrides = {}, []
    waiting = iter(arguments)
    for argument in waiting:
        name, _, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            flags["--config-dir"] = os.path.abspath(value or next(waiting, ""))
        elif argument.startswith("-"):
            raise ConfigError(f"a sweep cannot pass {argument} on to its points; drop it")
        elif not re.match(r"[+~]*sweep([.=@]|$)", argument):
            overrides.append(argument)
    return flags, overrides


def literal(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(literal, value)) + "]"
    text = str(value)
    if re.fullmatch(r"[A-Za-z_][\w/.-]*", text) and text.lower() not in ("null", "true", "false", "nan", "inf"):
        return text  # choices of groups must be bare
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", text) + "'"


def point_name(parameters: Mapping[str, Any]) -> str:
    """A folder's name that says what is special about a point: ``lr-0.001_rank-64``."""
    whole = "_".join(f"{key.rpartition('.')[2]}-{literal(value)}" for key, value in parameters.items())
    name = re.sub(r"[^\w.+-]", "", whole)
    if name == whole and len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(json.dumps(dict(parameters), sort_keys=True).encode()).hexdigest()[:8]
    return f"{name[:MAX_NAME]}-{digest}"

"""One experiment from prompts to a measured checkpoint: generate, train, export, evaluate.

    python scripts/pipeline.py +experiment=quickstart [any Hydra overrides]

Each stage is the command that a user would type, started as a process of its own with the same overrides. A stage that
has finished with the same settings is skipped, as long as its result is still there and no other is in its place; one
that was stopped anywhere is started again and resumes by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from data_gen.shards import MANIFEST_FILE, read_manifest
from specvocab_model.cli import hydra_main
from specvocab_model.config import Config, ConfigError, TargetConfig
from specvocab_model.export import PARTS, PROVENANCE_FILE
from specvocab_model.files import exclusive, listing, read_json, replace_json, require_fields, sha256
from specvocab_model.signals import exit_on_sigterm, running

REPOSITORY = Path(__file__).resolve().parent.parent
HEARTBEAT_S = 2.0  # how much of a stage's time a kill can lose
FORGET_IT = "remove it: its stages are started again, and go on where they were"
FINISHED = "finished before"
CHANGED = "its result is gone, or another is in its place; made again"
GOES_ON = "; the same command goes on from here"
ENVIRONMENT = {
    "GOMP_SPINCOUNT": "2000",  # see scripts/environment.sh
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",  # one flashes by whenever a shard is opened
    "TOKENIZERS_PARALLELISM": "false",  # otherwise tokenizers warns when loader workers are forked
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command, and what tells whether it has to run."""

    name: str
    script: str
    settings: dict[str, Any]  # everything its result depends on beside the stages before it
    results: tuple[Path, ...]  # files that exist once it has finished, and tell its result from any other
    several_ranks: bool = False  # can be started on several devices at once

    def digest(self) -> str | None:
        """Of its result; ``None`` where that is not whole."""
        return _hash([sha256(path) for path in self.results]) if all(map(Path.is_file, self.results)) else None


@hydra_main
def main(config: Config) -> None:
    exit_on_sigterm()
    output = Path(config.output_dir)
    stages = plan(config)
    with exclusive(output / "pipeline.lock", f"waiting for an earlier run in {output} to end", wait=True) as lock:
        if needs_fetch(config.target):
            fetch(config.target)
        record = Record(output / "pipeline.json")
        fingerprint = ""
        for number, stage in enumerate(stages, start=1):
            fingerprint = _hash([fingerprint, stage.settings])
            standing = record.standing(stage, fingerprint)
            print(f"[{number}/{len(stages)}] {stage.name}{standing and ': '}{standing}", flush=True)
            if standing != FINISHED:
                run(stage, fingerprint, config, record, lock)
            fingerprint = _hash([fingerprint, record.stages[stage.name]["result"]])
        results = collect(config, record.seconds())
        replace_json(output / "results.json", results)
    print(table(results, output))


def needs_fetch(target: TargetConfig) -> bool:
    """Whether the target is named by a hub id alone; what else a target can be, is here or on the hub."""
    return not (target.gguf_file or target.revision or Path(target.model).expanduser().is_dir())


def fetch(target: TargetConfig) -> None:
    """See that the target is on this machine before several ranks look for it; exits if it cannot be had."""
    command = [sys.executable, str(REPOSITORY / "scripts/fetch_target.py"), target.model]
    with running(command, stdin=subprocess.DEVNULL) as process:  # a process, for the memory that it takes
        code = process.wait()
    if code != 0:
        sys.exit(code if code > 0 else 128 - code)


def plan(config: Config) -> list[Stage]:
    """The four stages with their settings.

    Raises:
        ConfigError: a prompt file does not exist, or there would be nothing to compare.
    """
    if config.head.type != "speculative" or config.eval.temperature > 0:
        raise ConfigError("the pipeline compares greedy output under the speculative head; with head.type="
                          f"{config.head.type} and eval.temperature={config.eval.temperature} start its four commands "
                          "one by one")
    nodes = asdict(config)
    output = Path(config.output_dir)
    export = output / "export"
    prompts = [_file_hash("generation.prompt_files", name) for name in config.generation.prompt_files]
    prompts += [_source_hash(source.path) for source in config.generation.sources]
    return [
        Stage(
            name="generate",
            script="data_gen/main.py",
            settings={"prompts": prompts, "folders": [config.data.train_path, config.data.validation_path]}
            | {key: nodes[key] for key in ("seed", "target", "generation")},
            results=(Path(config.data.train_path, MANIFEST_FILE),),
            several_ranks=True,
        ),
        Stage(
            name="train",
            script="train/main.py",
            settings={key: nodes[key] for key in ("draft", "data", "trainer", "optim", "distributed")}
            | {"head": {key: value for key, value in nodes["head"].items() if key != "quantization"}},
            results=(output / "final" / "training.json",),  # has the weights' digest
            several_ranks=True,
        ),
        Stage(
            name="export",
            script="scripts/export.py",
            settings={"quantization": config.head.quantization, "export": nodes["export"]},
            results=tuple(export / part for part in PARTS),
        ),
        Stage(
            name="evaluate",
            script="scripts/evaluate.py",
            settings={"prompts": _file_hash("eval.prompts", config.eval.prompts), "eval": nodes["eval"]},
            results=(output / "evaluation.json", export / PROVENANCE_FILE),  # which it adds its figures to
        ),
    ]


class Record:
    """What has run and for how long, in a JSON file that survives a kill at any moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.stages = read_json(path, FORGET_IT)
        for stage in self.stages.values():
            require_fields(stage, {"fingerprint": str, "finished": bool, "seconds": float}, path, FORGET_IT)

    def standing(self, stage: Stage, fingerprint: str) -> str:
        """``FINISHED``, ``CHANGED``, or nothing for a stage that has not finished with these settings."""
        entry = self.stages.get(stage.name, {})
        if entry.get("fingerprint") != fingerprint or not entry["finished"]:
            return ""
        result = stage.digest()
        return FINISHED if result is not None and result == entry.get("result") else CHANGED  # older ones have none

    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds of each stage, over all its starts with the present settings."""
        return {name: round(entry["seconds"], 1) for name, entry in self.stages.items()}

    def start(self, stage: Stage, fingerprint: str) -> float:
        """Note that the stage runs; returns the seconds it has had before."""
        entry = self.stages.get(stage.name, {})
        resumed = entry.get("fingerprint") == fingerprint and not entry["finished"]
        self.stages[stage.name] = {"fingerprint": fingerprint, "finished": False, "result": None,
                                   "seconds": entry["seconds"] if resumed else 0.0}
        self._save()
        return self.stages[stage.name]["seconds"]

    def update(self, stage: Stage, *, seconds: float, finished: bool) -> None:
        self.stages[stage.name].update(seconds=seconds, finished=finished, result=stage.digest() if finished else None)
        self._save()

    def _save(self) -> None:
        replace_json(self.path, self.stages)


def command(stage: Stage, config: Config) -> list[str]:
    """What is typed to run the stage alone; several ranks are started as the user has set up ``accelerate``."""
    several = stage.several_ranks and config.distributed.strategy != "single"
    launcher = ["-m", "accelerate.commands.launch"] if several else []
    return [sys.executable, *launcher, str(REPOSITORY / stage.script), *sys.argv[1:]]


def run(stage: Stage, fingerprint: str, config: Config, record: Record, lock: int) -> None:
    """Run one stage to its end; exits with its exit code if it fails."""
    before, start = record.start(stage, fingerprint), time.monotonic()
    options = {"stdin": subprocess.DEVNULL, "env": ENVIRONMENT | os.environ}
    # The stage inherits the lock: should this process be killed alone, no second run starts while the stage lives on.
    try:
        with running(command(stage, config), pass_fds=(lock,), **options) as process:
            code = None
            while code is None:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=HEARTBEAT_S)
                record.update(stage, seconds=before + time.monotonic() - start, finished=code == 0)
    except KeyboardInterrupt:
        _stop(f"{stage.name} was interrupted{GOES_ON}", 130)
    except SystemExit:
        _stop(f"{stage.name} was terminated{GOES_ON}", 143)
    if code < 0:
        _stop(f"{stage.name} was killed by signal {-code}{GOES_ON}", 128 - code)
    if code > 0:  # it has said why, and would say it again
        _stop(f"{stage.name} failed with exit code {code}; its message is above", code)


def _stop(line: str, code: int) -> NoReturn:
    print(line, file=sys.stderr)
    sys.exit(code)


def collect(config: Config, seconds: dict[str, float]) -> dict[str, Any]:
    """The figures of ``results.json``, from what the stages wrote."""
    output = Path(config.output_dir)
    again = "remove it and start the same command again"
    evaluation = read_json(output / "evaluation.json", again)
    speculator = read_json(output / "export/vocabulary_speculator/config.json", again)
    recall = evaluation["candidate_recall"]
    speed = evaluation["tokens_per_second"]
    return {
        "target": config.target.model,
        "num_train_tokens": read_manifest(config.data.train_path).num_loss_tokens,
        "tau": {name: evaluation["tau"][name] for name in ("untrained", "full", "speculative")},
        "candidate_recall": {name: recall[name] for name in ("target_top1", "draft_top1")},
        "num_candidates": speculator["num_candidates"],
        "rank": speculator["rank"],
        "lossless": evaluation["lossless"],
        "tokens_per_second": {name: speed[name] for name in ("autoregressive", "speculative")},
        "seconds": seconds,
    }


def table(results: dict[str, Any], output: Path) -> str:
    """``results`` for a person."""
    tau, recall, speed = results["tau"], results["candidate_recall"], results["tokens_per_second"]
    rows = [
        ("", "acceptance length", "tokens/s"),
        ("target alone", "1.00", f"{speed['autoregressive']:.1f}"),
        ("untrained draft", f"{tau['untrained']:.2f}", ""),
        ("trained, full vocabulary", f"{tau['full']:.2f}", ""),
        ("trained, speculated vocabulary", f"{tau['speculative']:.2f}", f"{speed['speculative']:.1f}"),
    ]
    lines = [f"{name:32}{length:>18}{rate:>12}" for name, length, rate in rows]
    return "\n".join([
        "",
        f"{results['target']}, held-out prompts",
        *lines,
        f"output is the target's own, token for token: {'yes' if results['lossless'] else 'NO'}",
        f"{results['num_candidates']} candidates of rank {results['rank']} hold the target's first choice in "
        f"{_percent(recall['target_top1'])} and the draft's in {_percent(recall['draft_top1'])} of cases",
        f"{results['num_train_tokens']} response tokens; seconds: "
        + ", ".join(f"{name} {value:.0f}" for name, value in results["seconds"].items()),
        f"checkpoint: {output / 'export'}, figures: {output / 'results.json'}",
    ])


def _percent(share: float | None) -> str:
    """``None``: the answers were too short for a single draft to be judged."""
    return "–" if share is None else f"{share:.1%}"


def _file_hash(key: str, name: str) -> str:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {name!r} (relative to {Path.cwd()})")
    return sha256(path)


def _source_hash(name: str) -> str:
    """Of what is here: a file's content, or what a folder's files are called and when they were written."""
    path = Path(name)
    return _file_hash("generation.sources", name) if path.is_file() else _hash(listing(path))


def _hash(settings: list[Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


if __name__ == "__main__":
    main()

"""Train many points: every combination of a grid, or trials of Optuna's search.

    python scripts/sweep.py +experiment=qwen3_8b sweep=learning_rate distributed=zero2 tracking=wandb
    python scripts/sweep.py +experiment=qwen3_8b sweep=search distributed=zero2 sweep.launcher=submitit_slurm \\
        sweep.parallel=8 '+sweep.submitit={gpus_per_node: 8, timeout_min: 1440, slurm_partition: gpu}'

Every point is one ``accelerate launch train/main.py`` in a folder of its own, ``output_dir/sweeps/NAME/POINT``. Points
are composed before anything starts, so a key that does not exist stops the sweep at once. A point that fails does not
stop the others. The same command goes on where a sweep was stopped: finished points are skipped, others resume from
their checkpoints.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from specvocab_model.cli import hydra_main
from specvocab_model.config import Config, ConfigError
from specvocab_model.files import exclusive, read_json, replace_json
from specvocab_model.signals import exit_on_sigterm, held_back
from train.charts import number
from train.sweep.launchers import GRACE_S, POLL_S, Job, Launcher, build_launcher
from train.sweep.points import Point, Points, decisive
from train.sweep.sources import Source, build_source, check_metric
from train.sweep.summary import text_table, write_summary


@dataclass(slots=True)
class Running:
    """A point under way."""

    point: Point
    job: Job
    before: float  # seconds of earlier starts
    began: float = field(default_factory=time.monotonic)
    given_up_at: float | None = None

    def seconds(self) -> float:
        return round(self.before + time.monotonic() - self.began, 1)


@hydra_main
def main(config: Config) -> None:
    check_metric(config)
    points = Points(config, sys.argv[1:])
    busy = (f"another sweep writes to {points.folder}; wait for it, stop it, or choose another name than "
            f"sweep.name={config.sweep.name}")
    with exclusive(points.folder / "sweep.lock", busy) as lock:
        check_same_settings(points.folder / "sweep.json", config)
        source = build_source(points)
        launcher = build_launcher(config, points.folder, lock)
        exit_on_sigterm()
        stopped = Sweep(source, launcher, config).run()
        rows = write_summary(points.folder, source.points(), config.sweep.metric)
    print("\n" + text_table(rows))
    print(f"written to {points.folder / 'summary.html'}, .csv and .json")
    if stopped:
        print("the sweep was interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(stopped)
    sys.exit(1 if any(row["status"] == "failed" for row in rows) else 0)


class Sweep:
    """Keeps ``sweep.parallel`` points under way until the source has no more."""

    def __init__(self, source: Source, launcher: Launcher, config: Config) -> None:
        self.source = source
        self.launcher = launcher
        self.parallel = config.sweep.parallel
        self.metric = config.sweep.metric
        self.running: list[Running] = []

    def run(self) -> int:
        """Run to the end; returns the exit code of an interruption, 0 without one."""
        try:
            while self._fill():
                time.sleep(POLL_S)
                for one in list(self.running):
                    self._look_after(one)
        except (KeyboardInterrupt, SystemExit) as stop:
            return stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 130
        finally:  # whatever went wrong here, a launcher that cannot start a point say: no point outlives the sweep
            self._stop_all()
        return 0

    def _fill(self) -> bool:
        """Start what there is room for; returns whether anything is under way."""
        while len(self.running) < self.parallel and (point := self.source.next()) is not None:
            before = point.outcome().get("seconds", 0.0)
            print(f"{point.name}: started, log in {point.folder}", flush=True)
            with held_back():  # else a point that has just started would not be stopped
                point.note(status="running", error=None)
                self.running.append(Running(point, self.launcher.start(point), before))
        return bool(self.running)

    def _look_after(self, one: Running) -> None:
        code = one.job.exit_code()
        if code is None:
            if one.given_up_at is None:
                if self.source.falls_behind(one.point):
                    one.given_up_at = time.monotonic()
                    one.job.stop()
            elif time.monotonic() > one.given_up_at + GRACE_S:
                one.job.kill()
            return
        self.running.remove(one)
        status = "finished" if code == 0 and one.point.is_finished() else "pruned" if one.given_up_at else "failed"
        error = None
        if status == "failed":
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            error = f"{how}: {one.point.last_words()}"
        one.point.note(status=status, exit_code=code, seconds=one.seconds(), error=error)
        self.source.ended(one.point, status)
        values = one.point.values(self.metric)
        result = f", {self.metric} {number(values[-1][1])}" if values else ""
        print(f"{one.point.name}: {status}{result}, {one.seconds():.0f} s{f', {error}' if error else ''}", flush=True)

    def _stop_all(self) -> None:
        """Let every point write its checkpoint; a second Ctrl-C, or too long a wait, kills."""
        if not self.running:
            return
        print(f"stopping {len(self.running)} points", file=sys.stderr, flush=True)
        deadline = time.monotonic() + GRACE_S
        try:
            for one in self.running:
                one.job.stop()
            while any(one.job.exit_code() is None for one in self.running) and time.monotonic() < deadline:
                time.sleep(POLL_S / 10)
        except (KeyboardInterrupt, SystemExit):
            pass
        for one in self.running:
            if one.job.exit_code() is None:
                one.job.kill()
            one.point.note(status="interrupted", seconds=one.seconds())


def check_same_settings(path: Path, config: Config) -> None:
    """Note the settings that a sweep begins with; refuse to continue it with others, where it does not vary them.

    A grid may grow. A search may not change: the trials of its study have the parameters that it began with.

    Raises:
        ConfigError: naming what differs.
    """
    now = decisive(asdict(config))
    if config.sweep.search:
        now["sweep.search"] = json.loads(json.dumps(config.sweep.search))
    if not path.exists():
        replace_json(path, now)
        return
    then = read_json(path, "remove it: the settings that this sweep began with are then not compared")
    varied = {*config.sweep.grid, *config.sweep.search}
    differing = [f"{key}: {then.get(key)!r} then, {now.get(key)!r} now" for key in sorted({*then, *now})
                 if then.get(key) != now.get(key) and not any(f"{key}.".startswith(f"{one}.") for one in varied)]
    if differing:
        raise ConfigError(f"{path.parent} was begun with other settings ({'; '.join(differing)}); restore them, or "
                          "choose another sweep.name")


if __name__ == "__main__":
    main()

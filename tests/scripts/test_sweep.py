"""What a sweep runs, skips, stops and reports. Training is a small program here; the last test uses the real one."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts import sweep
from specvocab_model.cli import compose
from specvocab_model.config import CONFIG_DIR, ConfigError, SweepConfig
from tests.composing import config_of
from tests.train.runs import overrides, write_experiment
from train.sweep import launchers
from train.sweep.points import Points, literal, point_name, split_arguments
from train.sweep.sources import build_source, corners, distribution

REPOSITORY = Path(CONFIG_DIR).parent
# tau grows with the learning rate; 0.5 explodes; 0.25 waits to be told to end. What it has done survives a restart.
TRAINING = """
import json, pathlib, signal, sys, time
from dataclasses import asdict
from tests.composing import config_of

config = config_of(sys.argv[1:])
output = pathlib.Path(config.output_dir)
lr = config.optim.lr
def end(*_):
    (output / "saved").write_text("")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
with (output / "starts").open("a") as file:
    file.write("x")
if lr == 0.5:
    raise RuntimeError("the loss exploded")
for step in range(1, 6):
    with (output / "metrics.jsonl").open("a") as file:
        names = ("simulated_tau/candidates", "simulated_tau/full", "candidate_recall/target_top1", "loss")
        file.write(json.dumps({"step": step, **{f"validation/{name}": 1 + lr * step for name in names}}) + "\\n")
    while lr == 0.25 and not (output / "saved").exists():
        time.sleep(0.05)
(output / "final").mkdir()
(output / "final/training.json").write_text(json.dumps({"config": asdict(config)}))
"""


@pytest.fixture
def arguments(tmp_path, monkeypatch, forked) -> list[str]:
    """A sweep's arguments in ``tmp_path``, with the small program as training and no launcher around it."""
    program = tmp_path / "training.py"
    program.write_text(TRAINING)
    monkeypatch.setattr(launchers, "command", lambda point, flags: [sys.executable, str(program), *point.arguments])
    monkeypatch.setattr(launchers, "POLL_S", 0.1)
    monkeypatch.setattr(sweep, "POLL_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")]))
    arguments = ["+experiment=smollm2_135m", f"output_dir={tmp_path / 'out'}", "sweep.name=mine"]
    for head in ([], ["head=full"], ["head=speculative"]):
        config_of([*arguments, *head])  # the processes that are forked know what comes out
    return arguments


def grid(**values: list) -> str:
    return "+sweep.grid={" + ",".join(f"{key}:{literal(items)}" for key, items in values.items()) + "}"


LR = "optim.lr"


def run(monkeypatch, arguments: list[str]) -> int:
    monkeypatch.setattr(sys, "argv", ["scripts/sweep.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        sweep.main()
    return stop.value.code


def summary(tmp_path: Path) -> dict[str, dict]:
    return {row["point"]: row for row in json.loads((tmp_path / "out/sweeps/mine/summary.json").read_text())}


def starts(tmp_path: Path) -> dict[str, int]:
    return {path.parent.name: len(path.read_text()) for path in (tmp_path / "out/sweeps/mine").glob("*/starts")}


def test_a_grid_runs_every_point_and_a_failure_stops_no_other(tmp_path, arguments, monkeypatch, capsys):
    arguments = [*arguments, grid(**{LR: [0.1, 0.5, 0.2], "head": ["full", "speculative"]}), "sweep.parallel=3"]
    assert run(monkeypatch, arguments) == 1
    rows = summary(tmp_path)
    assert list(rows)[:4] == [  # the best first; equal ones in the order of the grid
        "lr-0.2_head-full", "lr-0.2_head-speculative", "lr-0.1_head-full", "lr-0.1_head-speculative"]
    best, failed = rows["lr-0.2_head-full"], rows["lr-0.5_head-full"]
    assert best["status"] == "finished" and best["validation/simulated_tau/candidates"] == 2.0 and best["step"] == 5
    assert (best["optim.lr"], best["head"], best["tau_full"]) == (0.2, "full", 2.0)
    assert failed["status"] == "failed" and failed["error"] == "exit code 1: RuntimeError: the loss exploded"
    out = capsys.readouterr().out
    assert "lr-0.5_head-full: failed" in out and "    exit code 1: RuntimeError: the loss exploded" in out
    folder = tmp_path / "out/sweeps/mine"
    with (folder / "summary.csv").open() as file:
        assert [row["point"] for row in csv.DictReader(file)] == list(rows)
    page = (folder / "summary.html").read_text()
    assert page.count("<polyline") == 4 and "simulated_tau/candidates by optim.lr" in page

    assert run(monkeypatch, arguments) == 1  # finished points are skipped, failed ones are tried again
    assert starts(tmp_path) == {name: 1 if row["status"] == "finished" else 2 for name, row in rows.items()}


def test_points_share_a_group_and_have_names_of_their_own(arguments):
    points = Points(compose([*arguments]), arguments)
    first, second = (points.make({LR: lr, "head": "full"}) for lr in (0.1, 0.2))
    assert first.config.tracking.group == second.config.tracking.group == "smollm2_135m-mine"
    assert first.config.run_name == "smollm2_135m-mine-lr-0.1_head-full"
    assert first.config.output_dir == str(points.folder / first.name) != second.config.output_dir
    assert first.config.data == second.config.data and first.config.head.type == "full"
    assert first.config.sweep == SweepConfig()


@pytest.mark.parametrize(("change", "message"), [
    (grid(**{LR: [0.1], "optim.lrr": [1]}), "Key 'lrr' not in 'OptimConfig'"),
    (grid(**{LR: [0.1, -1]}), "point optim.lr=-1: optim.lr=-1.0 must be positive"),
    (grid(**{"head": ["fulll"]}), "Could not find 'head/fulll'"),
    (grid(**{LR: [0.1, 0.1]}), "names a combination twice"),
    (grid(**{LR: []}), "sweep.grid: optim.lr has no values"),
    ("seed=0", "nothing to vary"),
    ("+sweep.search={optim.lr:{low:1e-3,high:1e-1},optim.lrr:[1]}", "Key 'lrr' not in 'OptimConfig'"),
    ("+sweep.search={optim.lr:{low:1e-3,hi:1e-1}}", "must be a list of values, or a range"),
    ("+sweep.search={optim.lr:{low:1e-1,high:1e-3}}", "sweep.search.optim.lr="),
    ("+sweep.search={optim.lr:{low:-1.0,high:1e-3}}", "point optim.lr=-1.0: optim.lr=-1.0 must be positive"),
    ("sweep.metric=validation/tau", "'validation/tau' is not logged at validation, or not to be large; choose "
                                     "one of validation/acc"),
    ("sweep.metric=validation/loss", "'validation/loss' is not logged at validation, or not to be large"),
    ("sweep.launcher=submitit_slurm", "there is no sbatch on this machine"),
    ("sweep.launcher=ssh", "sweep.launcher='ssh' is not known"),
])
def test_a_mistake_stops_before_anything_starts(tmp_path, arguments, monkeypatch, capsys, change, message):
    needs_points = change.startswith("sweep.")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(monkeypatch, [*arguments, change, *([grid(**{LR: [0.1]})] if needs_points else [])]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert starts(tmp_path) == {}


def test_a_sweep_continues_only_with_the_same_settings(tmp_path, arguments, monkeypatch, capsys):
    assert run(monkeypatch, [*arguments, grid(**{LR: [0.1]})]) == 0
    assert run(monkeypatch, [*arguments, grid(**{LR: [0.1, 0.2]}), "trainer.log_every=3"]) == 0  # a larger grid
    assert starts(tmp_path) == {"lr-0.1": 1, "lr-0.2": 1}
    assert run(monkeypatch, [*arguments, grid(**{LR: [0.1]}), "trainer.max_steps=7"]) == 2
    assert "begun with other settings (trainer.max_steps: None then, 7 now)" in capsys.readouterr().err
    rows, num_rows = "trainer.gradient_accumulation_steps", config_of(arguments).trainer.micro_batch_size
    assert run(monkeypatch, [*arguments, grid(**{LR: [0.1]}), f"{rows}=4"]) == 2
    assert f"{rows}): {num_rows} then, {4 * num_rows} now)" in capsys.readouterr().err
    assert run(monkeypatch, [*arguments, grid(**{LR: [0.1], "head": ["full"]})]) == 0  # one more key
    assert run(monkeypatch, [*arguments, grid(**{LR: [0.1]})]) == 0  # and back
    assert starts(tmp_path) == {"lr-0.1": 1, "lr-0.2": 1, "lr-0.1_head-full": 1}


def test_a_varied_key_hides_no_other_that_begins_like_it(tmp_path, arguments):
    arguments = [*arguments, grid(**{"trainer.loss": ["forward_kl", "jsd"]})]
    sweep.check_same_settings(tmp_path / "sweep.json", config_of(arguments))
    sweep.check_same_settings(tmp_path / "sweep.json", config_of([*arguments, "trainer.loss=tv"]))
    with pytest.raises(ConfigError, match=r"loss_normalization: 'valid' then, 'slot' now"):
        sweep.check_same_settings(tmp_path / "sweep.json", config_of([*arguments, "trainer.loss_normalization=slot"]))


@pytest.mark.parametrize("content", ["", "[]", '{"seed": 0'])
def test_damaged_settings_of_a_sweep_are_named(content, tmp_path, arguments):
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(ConfigError, match=r"sweep\.json is damaged: .*; remove it"):
        sweep.check_same_settings(tmp_path / "sweep.json", config_of(arguments))


def test_damaged_notes_of_a_point_are_named(arguments):
    point = Points(config_of([*arguments, grid(**{LR: [0.1]})]), arguments).make({LR: 0.1})
    (point.folder / "final").mkdir(parents=True)
    for name, ask, message in (("point.json", point.outcome, r"point\.json is damaged: .*; remove it"),
                               ("final/training.json", point.is_finished, r"damaged: it has no config; remove")):
        (point.folder / name).write_text("{}" if "final" in name else "{")
        with pytest.raises(ConfigError, match=message):
            ask()


def test_a_search_does_not_go_on_with_other_parameters(tmp_path, arguments, monkeypatch, capsys):
    search = ["sweep.num_trials=1", "+sweep.search={optim.lr:{low:0.01,high:0.2}}"]
    assert run(monkeypatch, [*arguments, *search]) == 0
    more = "+sweep.search={optim.lr:{low:0.01,high:0.2},optim.warmup_ratio:[0.0,0.1]}"
    assert run(monkeypatch, [*arguments, "sweep.num_trials=2", more]) == 2
    error = capsys.readouterr().err
    assert "begun with other settings (sweep.search: " in error and error.count("\n") == 1
    assert run(monkeypatch, [*arguments, *search]) == 0  # the refused attempt has left no trace
    assert starts(tmp_path) == {"trial-0000": 1}


PROGRAM = """
import sys
from train.sweep import launchers
launchers.command = lambda point, flags: [sys.executable, {training!r}, *point.arguments]
from scripts import sweep
sweep.POLL_S = launchers.POLL_S = 0.1
sweep.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_let_points_save_and_the_sweep_resumes(tmp_path, arguments, monkeypatch, number, code):
    arguments = [*arguments, grid(**{LR: [0.25, 0.1]})]
    program = PROGRAM.format(training=str(tmp_path / "training.py"))
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=REPOSITORY, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    waiting = tmp_path / "out/sweeps/mine/lr-0.25/metrics.jsonl"
    while not waiting.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 1
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert err.splitlines()[-1] == "the sweep was interrupted; the same command goes on from here"
    assert (waiting.parent / "saved").exists() and not psutil.pid_exists(children[0].pid)
    assert {name: row["status"] for name, row in summary(tmp_path).items()} == {
        "lr-0.25": "interrupted", "lr-0.1": "waiting"}
    assert run(monkeypatch, arguments) == 0
    assert starts(tmp_path) == {"lr-0.25": 2, "lr-0.1": 1}


class Job:
    """A point that runs until it is stopped."""

    stopped = False

    def exit_code(self) -> int | None:
        return 75 if self.stopped else None

    def stop(self) -> None:
        self.stopped = True


def test_a_launcher_that_fails_leaves_no_point_behind(arguments):
    class Launcher:
        def __init__(self) -> None:
            self.jobs: list[Job] = []

        def start(self, point):
            if self.jobs:
                raise RuntimeError("the queue takes no more")
            self.jobs.append(Job())
            return self.jobs[0]

    arguments = [*arguments, grid(**{LR: [0.25, 0.1]}), "sweep.parallel=2"]
    config, launcher = config_of(arguments), Launcher()
    with pytest.raises(RuntimeError, match="takes no more"):
        sweep.Sweep(build_source(Points(config, arguments)), launcher, config).run()
    assert launcher.jobs[0].stopped


def test_a_point_that_is_just_being_started_is_stopped_too(arguments):
    class Launcher:
        def start(self, point):
            self.job = Job()
            signal.raise_signal(signal.SIGINT)
            return self.job

    arguments = [*arguments, grid(**{LR: [0.25]})]
    config, launcher = config_of(arguments), Launcher()
    assert sweep.Sweep(build_source(Points(config, arguments)), launcher, config).run() == 130
    assert launcher.job.stopped


def test_while_a_run_of_a_killed_sweep_lives_no_second_one_starts(tmp_path, arguments, monkeypatch, capsys):
    arguments = [*arguments, grid(**{LR: [0.25]})]
    program = PROGRAM.format(training=str(tmp_path / "training.py"))
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE)
    waiting = tmp_path / "out/sweeps/mine/lr-0.25/metrics.jsonl"
    while not waiting.exists():
        assert process.poll() is None
        time.sleep(0.05)
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    assert run(monkeypatch, arguments) == 2
    assert "another sweep writes to" in capsys.readouterr().err
    child.terminate()
    child.wait(30)
    assert run(monkeypatch, arguments) == 0


def test_a_search_prunes_resumes_and_finds_the_best(tmp_path, arguments, monkeypatch):
    arguments = [*arguments, "+sweep.search={optim.lr:{low:0.01,high:0.2,log:true},head:[full,speculative]}",
                 "sweep.startup_trials=2", "sweep.num_trials=3"]
    assert run(monkeypatch, arguments) == 0
    assert run(monkeypatch, [*arguments[:-1], "sweep.num_trials=6"]) == 0  # goes on in the same study
    rows = summary(tmp_path)
    assert set(rows) == {f"trial-{number:04}" for number in range(6)}
    assert set(starts(tmp_path).values()) == {1}
    finished = [row for row in rows.values() if row["status"] == "finished"]
    best = finished[0]
    assert best["validation/simulated_tau/candidates"] == pytest.approx(1 + 5 * best["optim.lr"])
    assert best["optim.lr"] == max(row["optim.lr"] for row in finished)
    assert {row["status"] for row in rows.values()} <= {"finished", "pruned"}


def test_a_trial_that_falls_behind_is_stopped(tmp_path, arguments, monkeypatch):
    """Trials of 0.25 wait after their first step; one that is below the median is told to end and counts as pruned."""
    arguments = [*arguments, "+sweep.search={optim.lr:[0.25]}", "sweep.startup_trials=1", "sweep.num_trials=2"]
    source = sweep.build_source(Points(config_of(arguments), arguments))
    good = source.next()
    good.folder.mkdir(parents=True)
    metric = "validation/simulated_tau/candidates"
    (good.folder / "metrics.jsonl").write_text(json.dumps({"step": 1, metric: 9.0}) + "\n")
    source.ended(good, "finished")
    assert run(monkeypatch, arguments) == 0
    rows = summary(tmp_path)
    assert rows["trial-0001"]["status"] == "pruned" and rows["trial-0001"]["step"] == 1
    assert (tmp_path / "out/sweeps/mine/trial-0001/saved").exists()


def test_an_interrupted_trial_is_the_first_to_go_on(arguments):
    arguments = [*arguments, "+sweep.search={optim.lr:{low:0.01,high:0.2}}", "sweep.num_trials=2"]
    config = config_of(arguments)
    interrupted = sweep.build_source(Points(config, arguments)).next()
    again = sweep.build_source(Points(config, arguments))
    assert again.next() == interrupted
    another = again.next()
    assert another.name == "trial-0001" and another.parameters != interrupted.parameters
    assert again.next() is None


def test_ranges_are_checked_at_their_ends():
    distributions = {"a": distribution("a", {"low": 1, "high": 8}), "b": distribution("b", ["x", "y", "z"])}
    assert list(corners(distributions)) == [{"a": 1, "b": "x"}, {"a": 8, "b": "y"}, {"a": 1, "b": "z"}]
    with pytest.raises(ConfigError, match=r"sweep\.search\.a=3 must be a list of values, or a range"):
        distribution("a", 3)


@pytest.mark.parametrize("value", [0.1, 3, True, None, "full", "a b", "it's", "1e-3", "null", [0.9, 0.95], ["a,b"]])
def test_values_survive_the_override_grammar(value):
    key = "+target.chat_template_kwargs.value"
    config = compose(["+experiment=quickstart", f"{key}={literal(value)}"])
    assert config.target.chat_template_kwargs["value"] == value


def test_names_of_points():
    assert point_name({"optim.lr": 0.001, "head.rank": 64}) == "lr-0.001_rank-64"
    odd = {point_name({"draft.feature_layers": layers}) for layers in ([2, 4, 6], [2, 46])}
    assert len(odd) == 2 and all("/" not in name and " " not in name for name in odd)
    assert len(point_name({"run_name": "x" * 300})) < 100


def test_arguments_of_the_sweep_do_not_reach_its_points(tmp_path):
    arguments = ["sweep=search", "+sweep.grid={a:[1]}", "sweep.name=x", "optim.lr=1", "--config-dir", str(tmp_path)]
    assert split_arguments(arguments) == ({"--config-dir": str(tmp_path)}, ["optim.lr=1"])
    with pytest.raises(ConfigError, match="cannot pass --info on"):
        split_arguments(["--info"])


@pytest.mark.parametrize(("log", "reason"), [
    ("error: rank=99 is too large; change head.rank\nTraceback (most recent call last):\n  raise CalledProcessError(\n"
     "subprocess.CalledProcessError: Command '['train/main.py']' returned non-zero exit status 2.\n",
     "error: rank=99 is too large; change head.rank"),
    ("[rank1]: Traceback\n[rank1]: torch.OutOfMemoryError: CUDA out of memory\n[rank0]: at a line\n"
     "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
     "[rank1]: torch.OutOfMemoryError: CUDA out of memory"),
    ("step 1/2 | errors 0\nKilled\n\n", "Killed"),
    ("", "it left no message"),
])
def test_the_reason_of_a_failure_is_found_in_the_log(arguments, log, reason):
    point = Points(config_of(arguments), arguments).make({LR: 0.1})
    point.folder.mkdir(parents=True)
    (point.folder / "log.txt").write_text(log)
    assert point.last_words() == reason


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_real_training_through_submitit(tmp_path, monkeypatch):
    """Two points, each `accelerate launch train/main.py` in a job of submitit's local executor; one cannot train."""
    pytest.importorskip("submitit", reason="needs submitit (pip install 'specvocab[sweep]')")
    root = write_experiment(tmp_path)
    arguments = [*overrides(root, "base", "trainer.max_steps=2", "trainer.validate_every=1", "sweep.name=mine"),
                 grid(**{"head.rank": [6, 99]}), "sweep.launcher=submitit_local", "sweep.parallel=2"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")]))
    assert run(monkeypatch, arguments) == 1
    rows = {row["point"]: row for row in json.loads((root / "base/sweeps/mine/summary.json").read_text())}
    assert rows["rank-6"]["status"] == "finished" and rows["rank-6"]["step"] == 2
    assert rows["rank-6"]["validation/simulated_tau/candidates"] >= 1
    assert rows["rank-99"]["status"] == "failed" and "rank=99 must lie between 1 and" in rows["rank-99"]["error"]
    assert (root / "base/sweeps/mine/rank-6/final/model.safetensors").exists()

"""What the pipeline skips, remembers and stops at. Stages are small programs here, real in test_end_to_end.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
from hydra import compose, initialize_config_dir

from scripts.pipeline import (
    CHANGED,
    FINISHED,
    Record,
    Stage,
    command,
    main,
    needs_fetch,
    plan,
    run,
    table,
)
from specvocab_model.config import CONFIG_DIR, Config, ConfigError, parse_config, register_schemas
from specvocab_model.signals import exit_on_sigterm

REPOSITORY = Path(CONFIG_DIR).parent
STAGES = ["generate", "train", "export", "evaluate"]


def quickstart(*overrides: str) -> Config:
    register_schemas()
    with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
        return parse_config(compose("config", overrides=["+experiment=quickstart", *overrides]))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(name="train", script=str(tmp_path / "stage.py"), settings={}, results=(tmp_path / "result",))


def write(stage: Stage, program: str) -> None:
    Path(stage.script).write_text(program)


@pytest.mark.parametrize(("override", "changed"), [
    ("seed=1", "generate"),
    ("target=gemma3_270m", "generate"),
    ("generation.max_new_tokens=7", "generate"),
    ("data.seq_len=7", "train"),
    ("head.num_candidates=7", "train"),
    ("head.quantization=fp8", "export"),
    ("export.own_lm_head=true", "export"),
    ("optim.lr=7", "train"),
    ("draft.num_unroll_steps=5", "train"),
    ("distributed=zero2", "train"),
    ("eval.max_new_tokens=7", "evaluate"),
    ("tracking=wandb", None),
])
def test_settings_belong_to_the_stage_that_they_change(override, changed, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    before, after = plan(quickstart()), plan(quickstart(override))
    assert [stage.name for stage in before] == STAGES
    different = [old.name for old, new in zip(before, after, strict=True) if old.settings != new.settings]
    assert different == ([changed] if changed else [])


def test_edited_prompts_are_other_settings(monkeypatch, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    prompts = tmp_path / "prompts.jsonl"
    seen = []
    for text in ("one", "two"):
        prompts.write_text(text)
        seen.append(plan(quickstart(f"generation.prompt_files=[{prompts}]", f"eval.prompts={prompts}")))
    different = [old.name for old, new in zip(*seen, strict=True) if old.settings != new.settings]
    assert different == ["generate", "evaluate"]


def test_changed_sources_are_other_settings(monkeypatch, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    (tmp_path / "set").mkdir()
    seen = []
    for text in ("one", "two!"):
        for name in ("set/train.jsonl", "file.jsonl"):
            (tmp_path / name).write_text(text)
            sources = f"generation.sources=[{{path: {tmp_path}/set}}, {{path: {tmp_path}/file.jsonl}}, {{path: a/hub}}]"
            seen.append(plan(quickstart(sources))[0].settings)
    assert [later != earlier for earlier, later in pairwise(seen)] == [True, True, True]


def test_missing_prompt_file_is_named(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(ConfigError, match=r"eval\.prompts: there is no file 'nowhere\.jsonl'"):
        plan(quickstart("eval.prompts=nowhere.jsonl"))


@pytest.mark.parametrize(("overrides", "expected"), [
    ([], True),
    (["target.model=owner/name"], True),
    (["target.revision=abc"], False),
    (["target.gguf_file=a.gguf"], False),
    (["target.model={folder}"], False),
    (["target.model={folder}/absent"], True),  # fetching says that it is nowhere
])
def test_a_target_is_fetched_where_a_hub_id_names_it(overrides, expected, tmp_path):
    config = quickstart(*(override.format(folder=tmp_path) for override in overrides))
    assert needs_fetch(config.target) == expected


def test_a_target_that_cannot_be_fetched_stops_the_pipeline_before_its_stages(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", ["pipeline", "+experiment=quickstart", f"output_dir={tmp_path}/run",
                                      "target.model=owner/unknown"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    out, err = capfd.readouterr()
    assert err.startswith("error: target.model='owner/unknown'") and err.count("\n") == 1
    assert "[1/4]" not in out


@pytest.mark.parametrize("override", ["head=full", "eval.temperature=1"])
def test_what_has_no_results_is_refused(override, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(ConfigError, match="start its four commands one by one"):
        plan(quickstart(override))


@pytest.mark.usefixtures("forked")
def test_a_strategy_of_several_ranks_goes_through_accelerate(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "+experiment=quickstart", "distributed=zero2"])
    config = quickstart("distributed=zero2")
    launched = [stage.name for stage in plan(config) if "accelerate.commands.launch" in command(stage, config)]
    assert launched == ["generate", "train"]
    for stage in plan(config):
        assert command(stage, config)[-3:] == [str(REPOSITORY / stage.script), *sys.argv[1:]]
        assert Path(command(stage, config)[-3]).is_file()
    assert not any("accelerate.commands.launch" in command(stage, quickstart()) for stage in plan(quickstart()))


def test_a_stage_is_finished_only_with_the_same_settings_and_its_result(stage, tmp_path):
    (result,) = stage.results
    write(stage, f"open({str(result)!r}, 'w')")
    record = Record(tmp_path / "record.json")
    assert not record.standing(stage, "a")
    run(stage, "a", quickstart(), record, os.open(tmp_path, os.O_RDONLY))
    record = Record(tmp_path / "record.json")  # as the next start reads it
    assert record.standing(stage, "a") == FINISHED
    assert not record.standing(stage, "b")
    result.write_text("of another command")
    assert record.standing(stage, "a") == CHANGED
    result.unlink()
    assert record.standing(stage, "a") == CHANGED


def test_seconds_add_up_over_restarts_and_start_anew_with_other_settings(stage, tmp_path):
    record = Record(tmp_path / "record.json")
    assert record.start(stage, "a") == 0
    record.update(stage, seconds=5.0, finished=False)  # then killed
    record = Record(tmp_path / "record.json")
    assert record.start(stage, "a") == 5.0
    record.update(stage, seconds=7.0, finished=True)
    assert record.seconds() == {"train": 7.0}
    assert record.start(stage, "b") == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"train": {"finished": true}}', '{"train": 3}'])
def test_a_damaged_record_is_named(content, tmp_path):
    (tmp_path / "pipeline.json").write_text(content)
    with pytest.raises(ConfigError, match=r"pipeline\.json is damaged: .*; remove it"):
        Record(tmp_path / "pipeline.json")


@pytest.mark.parametrize(("program", "code", "message"), [
    ("import sys; sys.exit(2)", 2, "train failed with exit code 2; its message is above"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL,
     "train was killed by signal 9; the same command goes on from here"),
])
def test_a_failed_stage_stops_the_pipeline_with_its_code(program, code, message, stage, tmp_path, capsys):
    """Going on is promised only to a stage that was stopped from outside: one that refused would refuse again."""
    write(stage, program)
    record = Record(tmp_path / "record.json")
    with pytest.raises(SystemExit) as stop:
        run(stage, "a", quickstart(), record, os.open(tmp_path, os.O_RDONLY))
    assert stop.value.code == code
    assert capsys.readouterr().err == message + "\n"
    assert not record.standing(stage, "a")


class Interrupted(subprocess.Popen):
    """Its maker gets SIGTERM before it has the process in hand."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.made.append(self)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # where Python looks for signals

    made: ClassVar[list[subprocess.Popen]] = []


def test_a_stage_that_is_just_being_started_is_ended_too(stage, tmp_path, monkeypatch, capsys):
    write(stage, "import time; time.sleep(60)")
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    exit_on_sigterm()
    try:
        with pytest.raises(SystemExit) as stop:
            run(stage, "a", quickstart(), Record(tmp_path / "record.json"), os.open(tmp_path, os.O_RDONLY))
    finally:
        (process,) = Interrupted.made
        left = process.poll() is None
        process.kill()
    assert not left and stop.value.code == 143
    assert capsys.readouterr().err == "train was terminated; the same command goes on from here\n"


@pytest.mark.parametrize(("number", "code", "how"), [(signal.SIGINT, 130, "interrupted"),
                                                     (signal.SIGTERM, 143, "terminated")])
def test_a_signal_right_before_a_stage_is_started_ends_in_one_line(
    number, code, how, stage, tmp_path, monkeypatch, capsys
):
    """It arrives while ``held_back`` asks for the handlers, before the first is replaced."""
    exit_on_sigterm()
    ask = signal.getsignal

    def arriving(each):
        monkeypatch.setattr(signal, "getsignal", ask)
        signal.raise_signal(number)
        return ask(each)

    record = Record(tmp_path / "record.json")
    monkeypatch.setattr(signal, "getsignal", arriving)
    with pytest.raises(SystemExit) as stop:
        run(stage, "a", quickstart(), record, os.open(tmp_path, os.O_RDONLY))
    assert stop.value.code == code
    assert capsys.readouterr().err == f"train was {how}; the same command goes on from here\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


WAITING_STAGE = """
import pathlib, time
pathlib.Path({started!r}).touch()
time.sleep(60)
"""
PIPELINE_OF_ONE_STAGE = """
import sys
from pathlib import Path
from scripts.pipeline import Record, Stage, run
from specvocab_model.files import exclusive
from specvocab_model.signals import exit_on_sigterm
from tests.scripts.test_pipeline import quickstart

exit_on_sigterm()
folder = Path({folder!r})
stage = Stage(name="train", script={script!r}, settings={{}}, results=(folder / "result",))
config = quickstart()
sys.argv = sys.argv[:1]
with exclusive(folder / "lock", "busy") as lock:
    run(stage, "a", config, Record(folder / "record.json"), lock)
"""


def start_waiting_pipeline(stage: Stage, tmp_path: Path) -> subprocess.Popen[str]:
    started = tmp_path / "started"
    write(stage, WAITING_STAGE.format(started=str(started)))
    program = PIPELINE_OF_ONE_STAGE.format(folder=str(tmp_path), script=stage.script)
    process = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    while not started.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(("number", "to_group", "code", "message"), [
    (signal.SIGINT, True, 130, "train was interrupted; the same command goes on from here"),
    (signal.SIGTERM, False, 143, "train was terminated; the same command goes on from here"),
])
@pytest.mark.usefixtures("forked")
def test_signals_end_the_stage_too(number, to_group, code, message, stage, tmp_path):
    process = start_waiting_pipeline(stage, tmp_path)
    (os.killpg if to_group else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert err.splitlines()[-1] == message
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left


@pytest.mark.usefixtures("forked")
def test_a_killed_pipeline_leaves_no_second_run_beside_its_stage(stage, tmp_path):
    """SIGKILL to the pipeline alone: its stage lives on and holds the lock; seconds so far are kept."""
    process = start_waiting_pipeline(stage, tmp_path)
    time.sleep(2.5)  # one heartbeat
    process.kill()
    process.wait()
    assert 2 <= json.loads((tmp_path / "record.json").read_text())["train"]["seconds"] < 20
    waiter = subprocess.Popen(
        [sys.executable, "-c", f"from pathlib import Path; from specvocab_model.files import exclusive\nwith exclusive("
                               f"Path({str(tmp_path / 'lock')!r}), 'waiting', wait=True): print('held')"],
        cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
    )
    assert waiter.stdout.readline() == "waiting\n"
    assert waiter.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    assert waiter.communicate(timeout=20)[0] == "held\n"


def test_answers_too_short_for_a_draft_still_end_in_a_table(tmp_path):
    results = {"target": "t", "num_train_tokens": 1, "tau": dict.fromkeys(("untrained", "full", "speculative"), 1.0),
               "candidate_recall": {"target_top1": None, "draft_top1": 0.5}, "num_candidates": 4, "rank": 2,
               "lossless": True, "tokens_per_second": {"autoregressive": 1.0, "speculative": 1.0}, "seconds": {}}
    assert "first choice in – and the draft's in 50.0% of cases" in table(results, tmp_path)

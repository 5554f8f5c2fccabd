"""scripts/reproduce.sh starts the right commands, and those that have to run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from specvocab_model.config import CONFIG_DIR

REPOSITORY = Path(CONFIG_DIR).parent
# In the place of Python: notes every word, and writes what the commands would write.
PYTHON = """#!/usr/bin/env bash
{ flock 1; printf '%s\\n' "$@" ""; } >>commands # whole, of commands side by side
while [[ $# -gt 0 ]]; do
  case $1 in
    --json) mkdir -p "$(dirname "$2")" && touch "$2" ;;
    --output) mkdir -p "$2" ;;
    scripts/export.py) mkdir -p outputs/smollm2_135m/export ;;
    run_name=*) mkdir -p "outputs/${1#run_name=}/export" ;;
  esac
  shift
done
"""


class Copy:
    """A repository with what the script reads, in a folder with a space; prompts are in one with a comma."""

    def __init__(self, folder: Path) -> None:
        self.root, self.data = folder / "the repository", folder / "a, (b)=[c]"
        for path in ("scripts/reproduce.sh", "configs/target/smollm2_135m.yaml"):
            (self.root / path).parent.mkdir(parents=True)
            shutil.copy(REPOSITORY / path, self.root / path)
        self.data.mkdir()
        for name in ("prompts.jsonl", "questions.jsonl"):
            (self.data / name).touch()
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def run(self, *stages: str, prompts: str = "prompts.jsonl", **variables: str) -> tuple[int, str, list[list[str]]]:
        """From the folder of the prompts; returns exit code, what was complained about, and the commands."""
        (self.root / "commands").write_text("")
        process = subprocess.run(
            ["bash", self.root / "scripts/reproduce.sh", "smollm2_135m", prompts, "questions.jsonl", *stages],
            cwd=self.data, env=os.environ | variables | {"PYTHON": str(self.python)}, text=True, capture_output=True)
        commands = (self.root / "commands").read_text().split("\n\n")[:-1]
        return process.returncode, process.stderr, [command.split("\n") for command in commands]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_all_stages_run_without_ablations(copy: Copy):
    code, complaints, commands = copy.run()
    assert (code, complaints) == (0, "")
    assert commands[0] == ["scripts/fetch_target.py", "HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert commands[-1][0] == "scripts/results.py" and "--ablations" in commands[-1]
    assert not any("*" in word for command in commands for word in command)


def test_ablations_are_reported(copy: Copy):
    code, _, commands = copy.run("ablations", "report")
    assert code == 0
    assert "outputs/smollm2_135m_ablation_loss_tv" in commands[-1]


def test_relative_paths_are_those_of_the_caller_with_any_character(copy: Copy):
    (copy.data / "it's a target").mkdir()
    code, _, [[_, _, *overrides]] = copy.run("train", TARGET="it's a target")
    values = {each.key_or_group: each.value() for each in OverridesParser.create().parse_overrides(overrides)}
    assert code == 0 and values == {
        "target.model": str(copy.data / "it's a target"), "eval.prompts": str(copy.data / "questions.jsonl"),
        "generation.prompt_files": [str(copy.data / "prompts.jsonl")]}


def test_static_heads_have_the_sizes_that_are_asked_for(copy: Copy):
    code, complaints, commands = copy.run("train_static", "speed", STATIC_SIZES="900 16000")
    assert (code, complaints) == (0, "")
    assert [word for command in commands for word in command if "draft_vocab_size" in word] == [
        "head.draft_vocab_size=900", "head.draft_vocab_size=16000"]
    assert "outputs/smollm2_135m_static16000/export" in commands[-1]  # the largest
    code, complaints, commands = copy.run("train", STATIC_SIZES="32k")
    assert code == 2 and not commands and "STATIC_SIZES='32k' must be numbers of tokens" in complaints


def test_exports_run_side_by_side_and_one_that_fails_is_not_overlooked(copy: Copy):
    code, complaints, commands = copy.run("export")
    assert (code, complaints) == (0, "")
    assert sum(command[0] == "scripts/export.py" for command in commands) == 5
    assert {command[-1] for command in commands[5:]} == {
        "outputs/smollm2_135m_pruned16000", "outputs/smollm2_135m_pruned32000"}
    copy.python.write_text(PYTHON.replace("    run_name=", "    head.quantization=fp8) exit 1 ;;\n    run_name="))
    code, complaints, commands = copy.run("export")
    assert code == 2 and "one of the commands that ran side by side failed" in complaints
    assert not any(command[0] == "scripts/trim_vocab.py" for command in commands)


def test_what_is_wrong_is_said_before_anything_runs(copy: Copy):
    code, complaints, commands = copy.run("generate", prompts="none.jsonl")
    assert code == 2 and not commands and "there is no file none.jsonl (seen from " in complaints
    code, complaints, commands = copy.run("generate", "tua")
    assert code == 2 and not commands and complaints.startswith("error: there is no stage tua; stages are fetch ")


def test_what_is_finished_is_done_again_where_it_would_be_another(copy: Copy):
    draft = copy.root / "outputs/smollm2_135m/export/model.safetensors"
    draft.parent.mkdir(parents=True)
    draft.write_text("one")

    def number(*stages: str, **variables: str) -> int:
        code, complaints, commands = copy.run(*stages, **variables)
        assert (code, complaints) == (0, "")
        return len(commands)

    assert [number("speed", "tau") for _ in range(2)] == [2, 0]
    draft.write_text("two")
    assert [number("speed", "tau") for _ in range(2)] == [2, 0]
    assert number("speed", "tau", QUESTIONS_OF_SPEED="40") == 1
    (copy.data / "questions.jsonl").write_text("another")
    assert number("tau") == 1
    assert [number("ablations", ABLATION_STEPS=steps) for steps in ("500", "500", "100")] == [35, 0, 34]

"""The sweep for W&B's agents: what an agent would run composes, with a folder for every run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from specvocab_model.acceptance import AcceptanceSums, summarise
from specvocab_model.cli import compose
from specvocab_model.config import CONFIG_DIR, Config

SWEEP = yaml.safe_load(Path(CONFIG_DIR, "wandb_sweep.yaml").read_text())


def agent_command(run_id: str, values: dict[str, object], monkeypatch) -> list[str]:
    """The command line as wandb/wandb_agent.py makes it of the file and a run that the server proposes."""
    monkeypatch.setenv("WANDB_RUN_ID", run_id)
    arguments = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    known = {**arguments, "program": [SWEEP["program"]], "env": ["/usr/bin/env"]}
    command: list[str] = []
    for part in create_sweep_command(list(SWEEP["command"])):
        command += known.get(part[2:-1], []) if part.startswith("${") and part.endswith("}") else [part]
    return command


def configured(command: list[str]) -> Config:
    assert command[:4] == ["/usr/bin/env", "accelerate", "launch", "train/main.py"]
    return compose(command[4:])


def test_every_value_reaches_training_and_every_run_has_its_folder(monkeypatch):
    ranges = SWEEP["parameters"]
    ends = [
        {key: value["values"][index] if "values" in value else value[bound] for key, value in ranges.items()}
        for index, bound in ((0, "min"), (-1, "max"))
    ]
    first, second = (configured(agent_command(run_id, values, monkeypatch))
                     for run_id, values in zip(("ab12", "cd34"), ends, strict=True))
    assert (first.optim.lr, first.head.num_candidates) == (3e-5, 1024)
    assert (second.optim.lr, second.head.num_candidates) == (1e-3, 4096)
    assert first.run_name == "qwen3_8b-ab12" and first.output_dir == "outputs/qwen3_8b-ab12"
    assert second.output_dir == "outputs/qwen3_8b-cd34"
    assert first.tracking.backend == "wandb" and first.data == second.data


def test_the_metric_is_logged_and_bounds_are_numbers():
    logged = {f"validation/{name}" for name in summarise(AcceptanceSums.zeros(7))}
    assert SWEEP["metric"]["name"] in logged
    assert all(isinstance(value[bound], float) for value in SWEEP["parameters"].values()
               for bound in ("min", "max") if bound in value)


def test_a_parameter_that_training_does_not_know_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="lrr"):
        configured(agent_command("ab12", {"optim.lrr": 1.0}, monkeypatch))

"""The generation benchmark counts what the engine wrote."""

import json

import pytest
import torch

from data_gen.engines import ContinuousEngine, build_engine
from scripts import bench_generate
from scripts.bench_generate import main, measure, prompts_of, step_times
from specvocab_model.config import ConfigError
from specvocab_model.target import Target
from tests.data_gen.runs import NUM_PROMPTS, config_of, overrides, write_inputs


def test_counts_of_a_tiny_target(tmp_path):
    root = write_inputs(tmp_path)
    config = config_of(overrides(root, "bench", "generation.num_prompts=30", "generation.max_new_tokens=5",
                                 "generation.magpie_prompts=3600", "generation.samples_per_prompt=2"))
    prompts = prompts_of(config)
    assert len(prompts) == 30 and max(map(len, prompts)) <= config.generation.max_prompt_tokens
    result = measure(config, build_engine(config, torch.device("cpu")), prompts)
    assert result["generated_tokens"] == 150
    assert result["data_set_answers"] == 2 * (NUM_PROMPTS + 3600)
    hours = result["data_set_answers"] * 5 / result["tokens_per_second"] / 3600
    assert abs(result["data_set_hours_at_most"] - hours) < 1e-3 * hours + 1e-4  # both are rounded
    assert json.loads(json.dumps(result)) == result


def test_steps_are_timed_with_and_without_masks(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_generate, "NUM_SLOTS", (2, 5))
    config = config_of(overrides(write_inputs(tmp_path), "bench", "generation.max_new_tokens=30"))
    engine = ContinuousEngine(Target.load(config.target, device=torch.device("cpu")), batch_tokens=100)
    times = step_times(config, engine, repeats=1)
    assert list(times) == ["2", "5"]
    assert all(set(each) == {"own columns", "masks"} and min(each.values()) > 0 for each in times.values())


def test_prompts_are_read_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    root = write_inputs(tmp_path)
    (root / "prompts.jsonl").write_text("\n")
    monkeypatch.setattr("scripts.bench_generate.build_engine", lambda *_: pytest.fail("the engine is built"))
    monkeypatch.setattr("sys.argv", ["bench_generate.py", *overrides(root, "bench")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and capsys.readouterr().err == f"error: {root}/prompts.jsonl holds no prompts\n"


def test_prompts_are_put_whole_and_refusals_end_in_one_line(tmp_path):
    root = write_inputs(tmp_path)
    config = config_of(overrides(root, "bench", "generation.num_prompts=1"))
    template = root / "target" / "chat_template.jinja"
    written = template.read_text()
    (root / "prompts.jsonl").write_text(json.dumps({"prompt": "What time is it?", "tools": [{"name": "clock"}]}))
    (without,) = prompts_of(config)
    template.write_text("{{ tools[0].name }}" + written)
    (whole,) = prompts_of(config)
    assert whole[-len(without):] == without and len(whole) > len(without)
    template.write_text("{{ raise_exception('no tools, please') }}")
    with pytest.raises(ConfigError, match=r"cannot be put to .*no tools, please; leave it out"):
        prompts_of(config)

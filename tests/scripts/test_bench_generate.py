"""The generation benchmark counts what the engine wrote."""

import json

import torch

from data_gen.engines import build_engine
from scripts.bench_generate import measure, prompts_of
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

"""The generation benchmark counts what the engine wrote."""

import json

import torch

from data_gen.engines import build_engine
from scripts.bench_generate import measure, prompts_of
from tests.data_gen.runs import config_of, overrides, write_inputs


def test_counts_of_a_tiny_target(tmp_path):
    root = write_inputs(tmp_path)
    config = config_of(overrides(root, "bench", "generation.num_prompts=30", "generation.max_new_tokens=5",
                                 "generation.magpie_prompts=3600"))
    prompts = prompts_of(config)
    assert len(prompts) == 30 and max(map(len, prompts)) <= config.generation.max_prompt_tokens
    result = measure(config, build_engine(config, torch.device("cpu")), prompts)
    assert result["generated_tokens"] == 150
    assert result["tokens_per_second"] > 0 and result["eta_prompts"] == 3600
    assert json.loads(json.dumps(result)) == result

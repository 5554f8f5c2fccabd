"""Launcher and configuration may not contradict each other."""

from __future__ import annotations

import pytest
import torch

from specvocab_model.config import Config, ConfigError, DistributedConfig, TrainerConfig
from train.launch import check_launch, deepspeed_config, limit_cpu_threads

DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "2"}


def config(strategy: str) -> Config:
    return Config(run_name="run", distributed=DistributedConfig(strategy=strategy),
                  trainer=TrainerConfig(gradient_accumulation_steps=4))


@pytest.mark.parametrize(("strategy", "environ", "named"), [
    ("single", {"WORLD_SIZE": "2"}, ["2 processes", "distributed.strategy=single"]),
    ("ddp", {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, ["started one", "torchrun"]),
    ("single", {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, ["started one", "torchrun"]),
    ("ddp", DEEPSPEED, ["--use_deepspeed", "distributed.strategy=ddp"]),
    ("zero2", {"ACCELERATE_USE_FSDP": "true"}, ["--use_fsdp", "distributed.strategy=zero2"]),
    ("zero2", DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, ["--zero_stage 3", "distributed.strategy=zero2"]),
    ("zero2", DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, ["--zero_stage 1", "distributed.strategy=zero2"]),
    ("zero2", DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, ["--deepspeed_config_file ds.json"]),
    ("zero2", DEEPSPEED | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, ["--offload_param_device cpu"]),
    ("zero2", DEEPSPEED | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"},
     ["--gradient_accumulation_steps 1", "trainer.gradient_accumulation_steps=4"]),
    ("zero2", DEEPSPEED | {"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, ["--gradient_clipping 1.0",
                                                                    "optim.max_grad_norm=0.5"]),
    ("ddp", {"WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "fp16"}, ["--mixed_precision fp16",
                                                                        "trainer.mixed_precision=bf16"]),
    ("ddp", {"ACCELERATE_USE_MEGATRON_LM": "true"}, ["--use_megatron_lm", "distributed.strategy=ddp"]),
    ("ddp", {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, ["--use_parallelism_config", "distributed.strategy=ddp"]),
    ("single", {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, ["--dynamo_backend INDUCTOR", "distributed.strategy=single"]),
])
def test_a_contradiction_is_refused_naming_both(strategy, environ, named):
    with pytest.raises(ConfigError) as refused:
        check_launch(config(strategy), environ)
    assert all(name in str(refused.value) for name in named)


@pytest.mark.parametrize(("strategy", "environ"), [
    ("single", {}),
    ("single", {"WORLD_SIZE": "1", "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}),
    ("single", {"MASTER_ADDR": "node-0"}),  # plain python where a cluster sets it for everybody
    ("ddp", {"WORLD_SIZE": "8", "MASTER_ADDR": "node-0", "ACCELERATE_MIXED_PRECISION": "bf16"}),
    ("zero2", {"WORLD_SIZE": "8", "ACCELERATE_MIXED_PRECISION": "no"}),  # accelerate launch without --use_deepspeed
    ("zero3", DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
                           "ACCELERATE_GRADIENT_CLIPPING": "0.5", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"}),
])
def test_agreement_and_silence_are_accepted(strategy, environ):
    check_launch(config(strategy), environ)


def test_a_launcher_that_says_cpu_where_a_gpu_is_visible_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"--cpu .*distributed.cpu=false"):
        check_launch(config("ddp"), {"ACCELERATE_USE_CPU": "True"})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_launch(config("ddp"), {"ACCELERATE_USE_CPU": "True"})  # all there is


def test_zero3_on_a_cpu_partitions_small_matrices_too(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert deepspeed_config(config("zero3"))["zero_optimization"]["stage3_param_persistence_threshold"] == 0


def test_deepspeed_leaves_weighting_to_the_loop():
    settings = deepspeed_config(config("zero3"))
    assert settings["gradient_accumulation_steps"] == 1 and settings["gradient_clipping"] == 0.5
    assert settings["zero_optimization"]["stage"] == 3 and "bf16" not in settings  # fp32 parameters


def test_torch_has_one_thread_beside_a_gpu_and_all_of_them_without():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        limit_cpu_threads(torch.device("cpu"))
        assert torch.get_num_threads() == 3
        limit_cpu_threads(torch.device("cuda"))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)

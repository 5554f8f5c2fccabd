"""From ``distributed.strategy`` to an Accelerator. Hydra is the only place that says how the draft is distributed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor
from transformers.integrations import unset_hf_deepspeed_config

from specvocab_model.config import Config, ConfigError

ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
REDUCE_BUCKET_ELEMENTS = 50_000_000  # DeepSpeed's default, ten times as much, takes more memory than most drafts


def build_accelerator(config: Config) -> Accelerator:
    """Join the process group and set up the strategy.

    Works under ``accelerate launch`` with and without ``--use_deepspeed``, ``torchrun`` and plain ``python``.

    Raises:
        ConfigError: the launcher was told something else than Hydra, or the strategy cannot work on this machine.
    """
    check_launch(config, os.environ)
    if config.distributed.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed takes any GPU that it sees
    use_cpu = not torch.cuda.is_available()
    timeout = timedelta(seconds=config.distributed.timeout_s)
    if config.distributed.strategy not in ZERO_STAGES:
        buckets = DistributedDataParallelKwargs(gradient_as_bucket_view=True)  # else gradients exist twice
        return Accelerator(cpu=use_cpu, mixed_precision="no",  # autocast is set up in build.py
                           kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout), buckets])
    if use_cpu:
        without_compiled_communication()
    _single_process_defaults()
    # accelerate finds no backend on a CPU without cpu=True, and with it no DeepSpeed: each rank would train alone.
    handlers = [InitProcessGroupKwargs(backend="gloo" if use_cpu else "nccl", timeout=timeout)]
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(config), zero3_init_flag=False)
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="no", kwargs_handlers=handlers)
    # Else transformers would partition the frozen target with ZeRO-3 as it loads it.
    unset_hf_deepspeed_config()
    return accelerator


def limit_cpu_threads(device: torch.device) -> None:
    """With a GPU, one thread for torch's operators on the CPU. Loader workers have one each, from torch itself.

    All that this process computes on the CPU is small, and several threads make it no faster (a plan of the unroll: 5
    to 7 ms with one, more with two) but spin while they wait for work: three runs on a host, with the default of 16
    each, took 0.65 s a step instead of 0.17.
    """
    if device.type == "cuda":
        torch.set_num_threads(1)


def host_sum(accelerator: Accelerator, timeout_s: int) -> Callable[[Tensor], Tensor]:
    """A function that adds up a tensor on the CPU over all ranks. All of them call it, as they call this one.

    Through the GPUs the sum would be known only when they have finished what was launched before. So ranks on GPUs
    have a second process group for it, of gloo.
    """
    if accelerator.num_processes == 1:
        return lambda own: own
    group = dist.group.WORLD
    if accelerator.device.type == "cuda":
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def total(own: Tensor) -> Tensor:
        summed = own.clone()
        dist.all_reduce(summed, group=group)
        return summed

    return total


def without_compiled_communication() -> None:
    """Keep DeepSpeed on a CPU to gloo's collectives.

    It would compile its own for ranks that share memory: minutes where the machine is busy, a compiler and a path
    without spaces are needed, and a job killed meanwhile leaves a lock that all later ones wait for.
    """
    import deepspeed  # seconds, for the runs that need it

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def leave(accelerator: Accelerator) -> None:
    """End the process group, after the models: the caller has dropped every reference to what was prepared.

    DDP's reducer would otherwise be the group's last owner, and the one freed with the interpreter's lock held: it
    waits for gloo's thread, and that thread, with a collective's tensors to free, for the lock.
    """
    accelerator.free_memory()
    accelerator.end_training()


def deepspeed_config(config: Config) -> dict[str, Any]:
    """DeepSpeed's own configuration: fp32 parameters and gradients; bf16 is autocast inside the model's forward."""
    stage = ZERO_STAGES[config.distributed.strategy]
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": torch.cuda.is_available(),
                            "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # gathers in the parameters' own type: fp32
        if not torch.cuda.is_available():
            # A CPU run rehearses one on GPUs, on a smaller model: partition its matrices too, whatever their size.
            zero["stage3_param_persistence_threshold"] = 0
    return {
        "zero_optimization": zero,
        "gradient_accumulation_steps": 1,  # train/optim.py sets the boundary and weighs the micro-batches
        "train_micro_batch_size_per_gpu": config.trainer.micro_batch_size,
        "gradient_clipping": config.optim.max_grad_norm,
        "zero_allow_untested_optimizer": True,
    }


def check_launch(config: Config, environ: Mapping[str, str]) -> None:
    """Refuse a launch that contradicts the configuration.

    Args:
        environ: as ``accelerate launch`` or ``torchrun`` set it.

    Raises:
        ConfigError: naming both settings.
    """
    strategy = config.distributed.strategy
    world_size = int(environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and strategy == "single":
        raise ConfigError(
            f"the launcher started {world_size} processes but distributed.strategy=single; "
            "choose distributed=ddp or distributed=zero2, or start one process"
        )
    # Told to start several processes where it sees no GPU, accelerate prepares for them, and starts one.
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= environ.keys() and "WORLD_SIZE" not in environ:
        raise ConfigError("accelerate launch was told to start several processes but, seeing no GPU, started one; "
                          "start them with `torchrun --nproc_per_node=N train/main.py ...` (if it was told of "
                          "one only, unset MASTER_ADDR)")
    for variable, flag in (("ACCELERATE_USE_FSDP", "--use_fsdp"), ("ACCELERATE_USE_MEGATRON_LM", "--use_megatron_lm"),
                           ("ACCELERATE_USE_PARALLELISM_CONFIG", "--use_parallelism_config")):
        if environ.get(variable, "false") == "true":
            raise ConfigError(f"the launcher says {flag} (or its configuration file does) but distributed.strategy="
                              f"{strategy}; drop it")
    if environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true" and strategy not in ZERO_STAGES:
        raise ConfigError(
            f"the launcher says --use_deepspeed (or its configuration file does) but distributed.strategy={strategy}; "
            "choose distributed=zero1, zero2 or zero3, or drop it"
        )
    if environ.get("ACCELERATE_USE_CPU", "false").lower() == "true" and not config.distributed.cpu \
            and torch.cuda.is_available():
        raise ConfigError("the launcher says --cpu (or its configuration file does) but distributed.cpu=false, and a "
                          "GPU is visible; set distributed.cpu=true, or drop it")
    for variable, flag, key, value in (
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "--zero_stage", "distributed.strategy", strategy),
        ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "--deepspeed_config_file", "distributed.strategy", strategy),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "--offload_optimizer_device", "distributed.strategy",
         strategy),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "--offload_param_device", "distributed.strategy", strategy),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "--gradient_accumulation_steps",
         "trainer.gradient_accumulation_steps", str(config.trainer.gradient_accumulation_steps)),
        ("ACCELERATE_GRADIENT_CLIPPING", "--gradient_clipping", "optim.max_grad_norm", str(config.optim.max_grad_norm)),
        ("ACCELERATE_MIXED_PRECISION", "--mixed_precision", "trainer.mixed_precision", config.trainer.mixed_precision),
        ("ACCELERATE_DYNAMO_BACKEND", "--dynamo_backend", "distributed.strategy", strategy),  # nothing here compiles
    ):
        given = environ.get(variable, "none")
        unsaid = given.lower() in ("none", "no")  # what the launcher writes when the user gave no flag
        agrees = given == (str(ZERO_STAGES.get(strategy)) if flag == "--zero_stage" else value)
        if not (unsaid or agrees):
            raise ConfigError(f"the launcher says {flag} {given} (or its configuration file does) but {key}={value}; "
                              f"set {key} and drop it there")


def _single_process_defaults() -> None:
    """DeepSpeed wants a process group, of one process where no launcher made one."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

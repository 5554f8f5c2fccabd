"""AdamW, the learning-rate schedule, and the few calls in which plain, DDP and DeepSpeed training differ."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn

from specvocab_model.config import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices only, not on norms.

    Raises:
        ValueError: a trainable parameter is not fp32 (in bf16, norm weights never leave 1.0: updates round away).
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trainable.items():
        if parameter.dtype != torch.float32:
            raise ValueError(f"parameter {name} is {parameter.dtype}; trainable parameters must be fp32")
    groups = [
        {"params": [p for p in trainable.values() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(parameter.is_cuda for parameter in trainable.values())
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Learning rate of optimizer step ``step`` (1-based): linear warm-up, then cosine down to ``min_lr_ratio * lr``.

    A function of the step alone: nothing to save, and the same whatever the number of ranks or micro-batches.
    (accelerate's prepared schedulers advance ``num_processes`` times a step.)
    """
    warmup_steps = math.ceil(config.warmup_ratio * total_steps)
    if step <= warmup_steps:
        return config.lr * step / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


class Updater:
    """Backward and optimizer step of a model prepared by accelerate.

    The losses given to ``backward`` are parts of one sum: over micro-batches and over ranks. DDP and DeepSpeed average
    gradients over the ranks, so the loss is multiplied by their number first; DeepSpeed's own division by the
    accumulation steps is off, because its config says 1 and the boundary is set here. So the last group of an epoch
    may be of any size.
    """

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: AcceleratedOptimizer, max_grad_norm: float):
        """``model``: a module, or DeepSpeed's engine around one; it and ``optimizer`` come from ``prepare``."""
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED

    def micro_step(self, *, last: bool) -> AbstractContextManager:
        """Context of one forward and backward; gradients are exchanged in the ``last`` of a step."""
        if self.deepspeed:
            self.model.set_gradient_accumulation_boundary(last)
            return nullcontext()
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, a scalar of the local micro-batch."""
        loss = loss * self.accelerator.num_processes
        if self.deepspeed:
            self.model.backward(loss)
        else:
            loss.backward()

    def step(self, lr: float) -> float:
        """Clip, update, clear. Returns the global gradient norm before clipping; equal on all ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.deepspeed:  # clips by its own config, see launch.deepspeed_config
            self.model.step()
            return float(self.model.get_global_grad_norm())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

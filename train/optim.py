"""AdamW, the learning-rate schedule, and the few calls in which plain, DDP and DeepSpeed training differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn

from specvocab_model.config import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's own names for them


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


def _as_stored(weight: Tensor) -> Tensor:
    """fp32 on the CPU; token ids stay integers."""
    return weight.to("cpu", torch.float32 if weight.is_floating_point() else weight.dtype).contiguous()


class Updater:
    """Backward and optimizer step of a model prepared by accelerate.

    The losses given to ``backward`` are parts of one sum: over micro-batches and over ranks. DDP and DeepSpeed average
    gradients over the ranks, so the loss is multiplied by their number first; DeepSpeed's own division by the
    accumulation steps is off, because its config says 1 and the boundary is set here. So the last group of an epoch
    may be of any size.
    """

    def __init__(
        self, accelerator: Accelerator, model: Any, optimizer: AcceleratedOptimizer, max_grad_norm: float
    ) -> None:
        """
        Args:
            model: a module, or DeepSpeed's engine around one; it and ``optimizer`` come from ``prepare``.
        """
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        if self.deepspeed:  # left to its first step, ZeRO-1 and -2 find the moments of the first group alone
            self._create_state(num_updates=0)

    def micro_step(self, *, last: bool) -> AbstractContextManager:
        """Context of one forward and backward; gradients are exchanged in the ``last`` of a step."""
        if self.deepspeed:
            self.model.set_gradient_accumulation_boundary(last)
            return nullcontext()
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, a scalar of the local micro-batch.

        A loss that is not finite makes the gradient NaN, whatever its derivative: so the norm tells ``step`` of both.
        """
        loss = loss * torch.where(loss.detach().isfinite(), float(self.accelerator.num_processes), math.nan)
        if self.deepspeed:
            self.model.backward(loss)
        else:
            loss.backward()

    def step(self, lr: float) -> Tensor:
        """Clip, update, clear. Returns the global gradient norm before clipping, on the device; equal on all ranks.

        Where it is not finite, weights and moments stay as they were. The host does not wait for it (under DeepSpeed it
        does, inside).
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.deepspeed:  # clips by its own config, see launch.deepspeed_config, and skips what is not finite
            self.model.step()
            norm = self.model.get_global_grad_norm()
            return torch.as_tensor(norm, dtype=torch.float64, device=self.accelerator.device)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        if self.optimizer.defaults["fused"]:  # its kernel changes nothing, nor counts the step, where this is 1
            self.optimizer.optimizer.found_inf = (~norm.isfinite()).float()
            self.optimizer.step()
        elif norm.isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gather_weights(self) -> dict[str, Tensor]:
        """All weights by name, whole, on the CPU of rank 0; empty elsewhere. Called by all ranks."""
        weights = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return {}
        return {name: _as_stored(weight) for name, weight in weights.items()}

    def gather_moment(self, key: str) -> dict[str, Tensor]:
        """``key`` of ``MOMENTS`` by parameter name, as ``gather_weights``. At least one update must have been made."""
        moments = {}
        for name, parameter in self._named_parameters():
            moment = self._moment(parameter, key)
            if self.accelerator.is_main_process:
                moments[name] = moment.cpu()
        return moments

    def load_moments(self, read: Callable[[str, str], Tensor], num_updates: int) -> None:
        """Continue as if this optimizer had made ``num_updates`` updates; called by all ranks.

        Args:
            read: gives the whole tensor of a key of ``MOMENTS`` and a parameter's name.
        """
        self._create_state(num_updates)
        for name, parameter in self._named_parameters():
            for key in MOMENTS:
                self._set_moment(parameter, key, read(key, name).to(parameter.device))

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.accelerator.unwrap_model(self.model).named_parameters())

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        if self.deepspeed:
            from deepspeed.utils import safe_get_full_optimizer_state

            return safe_get_full_optimizer_state(parameter, key)
        return self.optimizer.state[parameter][key]

    def _set_moment(self, parameter: Any, key: str, value: Tensor) -> None:
        if not self.deepspeed:
            self.optimizer.state[parameter][key].copy_(value)
        elif self.model.zero_optimization_stage() < 3:
            from deepspeed.utils import safe_set_full_optimizer_state

            safe_set_full_optimizer_state(parameter, value, key)
        else:  # the function above refuses parameters that do not divide by the number of ranks
            from deepspeed.utils import safe_set_local_optimizer_state

            size = parameter.ds_tensor.numel()
            padded = nn.functional.pad(value.flatten(), (0, size * self.accelerator.num_processes - value.numel()))
            own = padded.narrow(0, size * self.accelerator.process_index, size)
            safe_set_local_optimizer_state(parameter, own, key)

    def _create_state(self, num_updates: int) -> None:
        """What AdamW creates in its first step, for the tensors that it updates: under ZeRO, flat partitions."""
        inner = self.optimizer.optimizer
        tensors = [parameter for group in inner.param_groups for parameter in group["params"]]
        if self.deepspeed:
            zero, inner = inner, inner.optimizer
            stage3 = self.model.zero_optimization_stage() == 3
            tensors = zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups
        fused = inner.defaults["fused"]
        for tensor in tensors:
            step = torch.tensor(float(num_updates), device=tensor.device if fused else "cpu")
            inner.state[tensor] = {"step": step} | {key: torch.zeros_like(tensor) for key in MOMENTS}
        if self.deepspeed and not stage3:
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()  # what it does itself after its first step

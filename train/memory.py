"""How much memory one rank will need, and how large an optimizer step is: printed before the first step.

With P trainable parameters, N ranks, and bytes b of a number under ``trainer.mixed_precision`` (2 for bf16, else 4):

    parameters    4 P, of ZeRO-3 4 P / N; plus b P for the casts that autocast keeps, gathered by ZeRO-3 too
    optimizer     8 P; under ZeRO 12 P / N (DeepSpeed keeps a copy of its part of the weights)
    gradients     4 P; of ZeRO-2 and -3 4 P / N; plus DeepSpeed's two buckets
    activations   b (8 d + 3 I + 2 (H + 2 H_kv) D) for every position and unroll step: norms and their inputs, SwiGLU's
                  products, attention before and after rotation; b (9 d + (H + 4 H_kv) D) for every position: features
                  3 d and the rest of what the target gives
    loss          trainer.loss_memory_mib; with head.tied (b + 4) r V, vocab_proj and its gradient
    target        its weights (sharded: a share of its layers, and two whole ones), b (6 d + 2 I) a position of a layer

The loss and the gradients are needed at different times, so the sum counts the larger. All positions are taken to be
supervised; where prompts are, it is less.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import nn

from specvocab_model.config import Config
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.speculator import TiedVocabProj
from specvocab_model.target import Target
from train.launch import REDUCE_BUCKET_ELEMENTS, ZERO_STAGES
from train.metrics import count_parameters
from train.sharded_target import own


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank."""

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    loss: float
    target: float

    @property
    def total(self) -> float:
        return self.parameters + self.optimizer + self.activations + self.target + max(self.gradients, self.loss)

    @classmethod
    def of(cls, config: Config, model: SpecVocabDraft, target_bytes: float, world_size: int) -> MemoryEstimate:
        """
        Args:
            model: before ZeRO-3 partitions it.
            target_bytes: of ``resident_bytes``, the most that the target's weights take at one time.
        """
        stage = ZERO_STAGES.get(config.distributed.strategy, 0)
        number = 2 if config.trainer.mixed_precision == "bf16" else 4
        count = count_parameters(model)
        casts = number * count if number == 2 else 0
        buckets = 2 * 4 * min(REDUCE_BUCKET_ELEMENTS, count) if stage else 0
        shape, tied = model.architecture, 0
        if model.speculator is not None and isinstance(model.speculator.vocab_proj, TiedVocabProj):
            tied = (number + 4) * model.speculator.rank * model.speculator.vocab_size  # the product and its gradient
        hidden, inner = shape.hidden_size, shape.intermediate_size
        queries, keys = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
        positions = config.trainer.micro_batch_size * config.data.seq_len
        per_step = 8 * hidden + 3 * inner + 2 * (queries + 2 * keys)
        per_position = 9 * hidden + queries + 4 * keys
        return cls(
            parameters=4 * count / (world_size if stage == 3 else 1) + casts + (4 * count if stage == 3 else 0),
            optimizer=12 * count / world_size if stage else 8 * count,
            gradients=4 * count / (world_size if stage >= 2 else 1) + buckets,
            activations=number * positions * (config.draft.num_unroll_steps * per_step + per_position),
            loss=config.trainer.loss_memory_mib * 2**20 + tied,
            target=target_bytes + number * positions * (6 * hidden + 2 * inner),
        )

    def describe(self, device: torch.device) -> str:
        """One line; on a GPU it says how much there is."""
        parts = ", ".join(f"{field.name} {getattr(self, field.name) / 2**30:.1f}" for field in fields(self))
        line = f"memory of a rank, estimated: {parts}; at most {self.total / 2**30:.1f} GiB at one time"
        if device.type != "cuda":
            return line
        there = torch.cuda.get_device_properties(device).total_memory
        advice = "; lower trainer.micro_batch_size or data.seq_len" if self.total > there else ""
        return f"{line}, of {there / 2**30:.1f}{advice}"


def resident_bytes(target: Target, config: Config) -> float:
    """The most that the target's weights take on one rank: all; or a share of the layers, two whole ones, the rest."""

    def size(module: nn.Module) -> int:
        return sum(own(parameter).numel() * parameter.element_size() for parameter in module.parameters())

    if not config.distributed.shard_target:
        return size(target.model)
    gathered = max(sum(p.numel() * p.element_size() for p in layer.parameters())
                   for layer in target.model.get_decoder().layers)
    return size(target.model) + 2 * gathered


MUCH_PADDING, MANY_STEPS = 0.1, 8  # packing leaves 1 to 3 % where few of many documents are longer than half of a row


def describe_step(config: Config, world_size: int, steps_per_epoch: int, total_steps: int, padding: float) -> str:
    """One line: what an optimizer step consists of; and another where much of it is padding, a share of its tokens."""
    trainer = config.trainer
    rows = world_size * trainer.gradient_accumulation_steps * trainer.micro_batch_size
    advice = _advice(config) if padding > MUCH_PADDING and steps_per_epoch >= MANY_STEPS else ""
    return (f"{config.distributed.strategy}: {world_size} ranks x {trainer.gradient_accumulation_steps} micro-batches "
            f"x {trainer.micro_batch_size} rows of {config.data.seq_len} tokens = {rows} rows, "
            f"{rows * config.data.seq_len} tokens a step, {padding:.1%} of them padding; {steps_per_epoch} steps an "
            f"epoch, {total_steps} in all{advice}")


def _advice(config: Config) -> str:
    """Rows of twice the length, as many slots where that can be."""
    longer, size = 2 * config.data.seq_len, config.trainer.micro_batch_size
    return ("\nwarning: so much padding comes of documents that are longer than half of a row; set "
            f"data.seq_len={longer} trainer.micro_batch_size={max(1, size // 2)}")

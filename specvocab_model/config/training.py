"""Training: its data, its steps, its ranks, and where its metrics go."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from specvocab_model.config.checks import ConfigError, at_least, fraction, not_empty, one_of

LOSSES = ("forward_kl", "reverse_kl", "jsd", "tv", "lk", "lk_hybrid")
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3")


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Training sequences on disk (see data_gen/shards.py) and how they are packed."""

    train_path: str = MISSING
    validation_path: str = MISSING
    features_path: str | None = None  # the target's outputs on disk, made with action=features; null: it runs itself
    seq_len: int = 2048  # tokens of one packed row
    num_workers: int = 2

    def __post_init__(self) -> None:
        at_least("data.seq_len", self.seq_len, 3)  # two tokens have no third to draft
        at_least("data.num_workers", self.num_workers, 0)
        not_empty("data.train_path", self.train_path)
        not_empty("data.validation_path", self.validation_path)
        if self.features_path is not None:
            not_empty("data.features_path", self.features_path)
        if self.train_path != MISSING and Path(self.validation_path).absolute() == Path(self.train_path).absolute():
            raise ConfigError(f"data.validation_path={self.validation_path!r} is also data.train_path; set another one")


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """Length of the run, what is optimised, and what is written when."""

    num_epochs: int = 1
    max_steps: int | None = None  # optimizer steps; wins over num_epochs
    micro_batch_size: int = 1  # packed rows per rank and forward pass
    gradient_accumulation_steps: int = 1
    cache_target: bool = False  # keep the target's outputs in memory, 4 hidden states a token: it runs one epoch only
    mixed_precision: str = "bf16"
    loss: str = "forward_kl"
    temperature: float = 1.0  # of teacher and student in the loss
    aux_weight: float = 0.1  # weight of the speculator's loss
    step_decay: float = 0.8  # weight of unroll step i is step_decay ** i
    loss_normalization: str = "valid"  # valid: mean over the step's valid positions; slot: over all token slots
    loss_memory_mib: int = 1024  # for logits; the loss works through the positions in chunks that fit
    log_every: int = 10  # optimizer steps
    validate_every: int = 500
    save_every: int = 500
    keep_checkpoints: int = 2
    keep_best: bool = True  # also the checkpoint with the best simulated tau on the validation data
    resume: bool = True
    skip_non_finite: int = 0  # optimizer steps of a run whose loss or gradient may be not finite; they change nothing

    def __post_init__(self) -> None:
        for name in ("num_epochs", "micro_batch_size", "gradient_accumulation_steps", "loss_memory_mib",
                     "log_every", "validate_every", "save_every", "keep_checkpoints"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        at_least("trainer.max_steps", self.max_steps, 1)
        at_least("trainer.skip_non_finite", self.skip_non_finite, 0)
        at_least("trainer.aux_weight", self.aux_weight, 0)
        if not 1e-2 <= self.temperature <= 1e3:
            raise ConfigError(f"trainer.temperature={self.temperature} must lie between 0.01 and 1000")
        fraction("trainer.step_decay", self.step_decay)
        one_of("trainer.loss", self.loss, LOSSES)
        one_of("trainer.mixed_precision", self.mixed_precision, ("no", "bf16"))
        one_of("trainer.loss_normalization", self.loss_normalization, ("valid", "slot"))


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay, counted in optimizer steps."""

    lr: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_ratio: float = 0.02
    min_lr_ratio: float = 0.1
    max_grad_norm: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"optim.lr={self.lr} must be positive{' and finite' if self.lr == math.inf else ''}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas={self.betas} must be two numbers in [0, 1)")
        if not self.eps > 0:
            raise ConfigError(f"optim.eps={self.eps} must be positive")
        fraction("optim.warmup_ratio", self.warmup_ratio)
        fraction("optim.min_lr_ratio", self.min_lr_ratio)
        at_least("optim.weight_decay", self.weight_decay, 0)
        if not self.max_grad_norm > 0:
            raise ConfigError(f"optim.max_grad_norm={self.max_grad_norm} must be positive")


@dataclass(kw_only=True, slots=True)
class DistributedConfig:
    """How the draft is trained over several ranks. The launcher starts the ranks; this says what they do."""

    strategy: str = "single"
    cpu: bool = False  # train on the CPU even where a GPU is visible
    shard_target: bool = False  # the ranks of a node share out the target's layers: for one that a card cannot hold
    timeout_s: int = 1800  # a rank that is waited for longer has hung, and the others stop

    def __post_init__(self) -> None:
        one_of("distributed.strategy", self.strategy, STRATEGIES)
        at_least("distributed.timeout_s", self.timeout_s, 1)
        if self.shard_target and self.strategy == "single":
            raise ConfigError("distributed.shard_target=true needs several ranks but distributed.strategy=single; "
                              "choose distributed=ddp or distributed=zero2")


@dataclass(kw_only=True, slots=True)
class TrackingConfig:
    """Where metrics go, beside the JSONL file that every run writes."""

    backend: str = "none"
    project: str = "specvocab"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    offline: bool = False  # W&B without its server; `wandb sync` uploads the run later
    log_artifact: bool = False  # give W&B the final weights as an artifact
    num_samples: int = 3  # validation documents whose drafted text is shown at every validation

    def __post_init__(self) -> None:
        one_of("tracking.backend", self.backend, ("none", "wandb", "tensorboard"))
        at_least("tracking.num_samples", self.num_samples, 0)
        if self.log_artifact and self.backend != "wandb":
            raise ConfigError(f"tracking.log_artifact=true needs tracking=wandb, but tracking.backend={self.backend}")

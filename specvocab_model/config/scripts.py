"""What the commands in scripts/ do with a trained draft: evaluate, export and compare it, or train many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from specvocab_model.config.checks import DTYPES, ConfigError, at_least, one_of, temperature

LAYOUTS = ("eagle3", "speculators")
RIVALS = ("full", "speculative", "static", "low_rank", "cluster", "in_context")


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Speculative decoding on held-out prompts."""

    prompts: str = MISSING  # jsonl: {"messages"}, {"prompt"} or Spec-Bench's {"question_id", "category", "turns"}
    num_prompts: int | None = None  # null: all
    max_new_tokens: int = 256
    num_draft_tokens: int = 7
    temperature: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        at_least("eval.num_prompts", self.num_prompts, 1)
        at_least("eval.max_new_tokens", self.max_new_tokens, 1)
        at_least("eval.num_draft_tokens", self.num_draft_tokens, 1)
        temperature("eval.temperature", self.temperature)
        one_of("eval.dtype", self.dtype, DTYPES)


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """What scripts/export.py makes of a run; no other command reads it."""

    layout: str = "eagle3"  # SafeAILab's and SpecForge's, in output_dir/export; speculators: in export-speculators
    own_lm_head: bool = False  # store a copy of the target's lm_head, for an engine that cannot share it
    output: str | None = None  # the folder; null: output_dir/export or output_dir/export-speculators
    weights: str = "final"  # best: of the checkpoint with the best simulated tau on the validation data

    def __post_init__(self) -> None:
        one_of("export.layout", self.layout, LAYOUTS)
        one_of("export.weights", self.weights, ("final", "best"))


@dataclass(kw_only=True, slots=True)
class CompareConfig:
    """The heads that scripts/compare_heads.py compares; no other command reads it. Sizes from V on are left out."""

    heads: list[str] = field(default_factory=lambda: list(RIVALS))  # full is always there: others are judged by it
    num_candidates: list[int] = field(default_factory=lambda: [1024, 4096])  # speculative, beside the exported number
    ranks: list[int] | None = None  # speculative and low_rank, beside the trained one; null: half of that, if not 8-bit
    static_sizes: list[int] = field(default_factory=lambda: [13000, 16000, 32000])  # of the target's head, pruned
    corpus: str | None = None  # text whose frequencies prune it as well (FR-Spec); data.train_path's do (VocabTrim)
    static_drafts: list[str] = field(default_factory=list)  # exported drafts that were trained with head=static
    train_static: list[int] = field(default_factory=list)  # sizes of static heads to train first
    shortlist_sizes: list[int] = field(default_factory=lambda: [2048])  # cluster and in_context
    num_clusters: int = 256
    num_states: int = 8192  # draft states of the training data that routers and lower ranks are fitted on
    context: int = 512  # cached tokens of the round that κ is measured on
    kappa: float | None = None  # κ of the target and engine that speed is predicted for; null: measured here

    def __post_init__(self) -> None:
        for kind in self.heads:
            one_of("compare.heads", kind, RIVALS)
        for name in ("num_candidates", "static_sizes", "train_static", "shortlist_sizes", "ranks"):
            for value in getattr(self, name) or []:
                at_least(f"compare.{name}", value, 1)
        for name in ("num_clusters", "num_states", "context"):
            at_least(f"compare.{name}", getattr(self, name), 1)
        at_least("compare.kappa", self.kappa, 0)


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """The points that scripts/sweep.py trains; no other command reads it. Keys are those of overrides (optim.lr)."""

    name: str = ""  # the sweep's folder in output_dir, and its group in W&B
    grid: dict[str, list[Any]] = field(default_factory=dict)  # every combination of these values
    search: dict[str, Any] = field(default_factory=dict)  # Optuna: a list of values, or {low, high[, log, step]}
    num_trials: int = 20  # of the search
    startup_trials: int = 5  # drawn at random, and never pruned, before TPE and pruning begin
    prune: bool = True  # stop a trial whose metric is below the median of the trials before it, at the same step
    prune_after: int = 0  # ... but not before this optimizer step
    metric: str = "validation/simulated_tau/candidates"  # to be large
    launcher: str = "here"
    parallel: int = 1  # points at one time
    accelerate: list[str] = field(default_factory=list)  # flags of `accelerate launch`
    submitit: dict[str, Any] = field(default_factory=dict)  # parameters of submitit.AutoExecutor

    def __post_init__(self) -> None:
        one_of("sweep.launcher", self.launcher, ("here", "submitit_local", "submitit_slurm"))
        for name in ("num_trials", "startup_trials", "parallel"):
            at_least(f"sweep.{name}", getattr(self, name), 1)
        at_least("sweep.prune_after", self.prune_after, 0)
        if self.grid and self.search:
            raise ConfigError("sweep.grid and sweep.search exclude each other; keep one, or make the grid's keys "
                              "lists of values in sweep.search")
        if empty := [key for key, values in self.grid.items() if not values]:
            raise ConfigError(f"sweep.grid: {', '.join(empty)} has no values; list some, or remove it")

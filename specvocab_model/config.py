"""The configuration of every command, checked before anything is loaded.

Hydra composes the YAML files of ``configs/``; the dataclasses here are their schema. ``parse_config`` turns the
composed ``DictConfig`` into these objects, so a misspelt key, a wrong type, a missing value or two fields that
contradict each other stop the command with one line. Nothing past ``parse_config`` sees a ``DictConfig``.

One file holds all nodes because one ``+experiment=...`` serves ``data_gen/main.py``, ``train/main.py`` and the
scripts, and neither of the first two may import the other.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

CONFIG_DIR = str(Path(__file__).resolve().parent.parent / "configs")

DTYPES = ("float32", "bfloat16", "float16")
HEADS = ("full", "speculative", "static")
SELECTIONS = ("tile", "exact")
QUANTIZATIONS = ("fp8", "int8")
LOSSES = ("forward_kl", "reverse_kl", "jsd", "tv", "lk", "lk_hybrid")
ENGINES = ("transformers", "vllm", "openai")
LAYOUTS = ("eagle3", "speculators")
RIVALS = ("full", "speculative", "static", "low_rank", "cluster", "in_context")
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3")

_SET_IT = "choose an experiment (+experiment=NAME) or set it (key=value)"


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the value, the rule and the fix."""


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not known; choose one of {', '.join(allowed)}")


def _at_least(name: str, value: float | None, minimum: float) -> None:
    if value is not None and not minimum <= value < math.inf:
        raise ConfigError(f"{name}={value} must be at least {minimum}{' and finite' if value == math.inf else ''}")


def _not_empty(name: str, value: str) -> None:
    if not value.strip():
        raise ConfigError(f"{name}={value!r} is empty; give it a value, or drop the override")


def _fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}={value} must lie between 0 and 1")


@dataclass(kw_only=True, slots=True)
class TargetConfig:
    """The frozen model whose output is reproduced."""

    model: str = MISSING  # hub id, or a folder in HF format, or a folder holding gguf_file
    gguf_file: str | None = None
    revision: str | None = None
    dtype: str = "bfloat16"
    attn_implementation: str = "sdpa"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables of the template: enable_thinking

    def __post_init__(self) -> None:
        _not_empty("target.model", self.model)
        _one_of("target.dtype", self.dtype, DTYPES)
        if reserved := sorted({"messages", "add_generation_prompt"} & self.chat_template_kwargs.keys()):
            raise ConfigError(f"target.chat_template_kwargs holds {', '.join(reserved)}, which is set for every "
                              "conversation; remove it")


@dataclass(kw_only=True, slots=True)
class DraftConfig:
    """The draft layer. Every null is taken from the target."""

    feature_layers: list[int] | None = None  # indices into HF hidden_states; null: [2, N//2, N-3]
    num_unroll_steps: int = 7
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_unroll_steps", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
                     "max_position_embeddings"):
            _at_least(f"draft.{name}", getattr(self, name), 1)
        if self.head_dim is not None and self.head_dim % 2:
            raise ConfigError(f"draft.head_dim={self.head_dim} must be even: rotary embedding turns pairs")
        if self.feature_layers is not None:
            if len(self.feature_layers) != 3 or sorted(set(self.feature_layers)) != self.feature_layers:
                raise ConfigError(f"draft.feature_layers={self.feature_layers} must be three ascending, distinct ones")
            _at_least("draft.feature_layers[0]", self.feature_layers[0], 1)


@dataclass(kw_only=True, slots=True)
class HeadConfig:
    """How the draft turns its hidden state into token logits. All below ``draft_vocab_size`` is the speculator's."""

    type: str = "speculative"
    draft_vocab_size: int = 32000  # of the static head: so many most frequent tokens of the training data
    rank: int | None = None  # null: hidden_size / 8
    selection: str = "tile"  # tile: the best `keep` ids of every `tile`, one kernel; exact: the best of all
    num_candidates: int | None = None  # tile: at least so many; null: 2048, or what tile and keep give
    tile: int | None = None  # ids of a tile, a power of two; null: chosen with keep by num_candidates
    keep: int | None = None
    quantization: str | None = None  # of the exported vocab_proj: fp8 or int8, one scale a row
    init: str = "calibration"
    calibration_tokens: int = 8192

    def __post_init__(self) -> None:
        _one_of("head.type", self.type, HEADS)
        _one_of("head.selection", self.selection, SELECTIONS)
        _one_of("head.init", self.init, ("calibration", "svd", "random"))
        if self.quantization is not None:
            _one_of("head.quantization", self.quantization, QUANTIZATIONS)
            if self.type != "speculative":
                raise ConfigError(f"head.quantization={self.quantization} rounds the speculator's vocab_proj, and "
                                  f"head.type={self.type!r} has none; drop it")
        for name in ("draft_vocab_size", "rank", "num_candidates", "tile", "keep", "calibration_tokens"):
            _at_least(f"head.{name}", getattr(self, name), 1)
        self._check_tiles()

    def _check_tiles(self) -> None:
        if self.tile is None and self.keep is None:
            return
        if self.tile is None or self.keep is None:
            raise ConfigError(f"head.tile={self.tile} and head.keep={self.keep} come together; set both, or neither "
                              "and head.num_candidates")
        if self.selection != "tile":
            raise ConfigError(f"head.selection={self.selection!r} has no tiles; drop head.tile={self.tile} and "
                              f"head.keep={self.keep}, or set head.selection=tile")
        if self.num_candidates is not None:
            raise ConfigError(f"head.tile={self.tile} and head.keep={self.keep} fix the number of candidates; drop "
                              f"head.num_candidates={self.num_candidates}, or drop them")
        if self.tile & (self.tile - 1):
            raise ConfigError(f"head.tile={self.tile} must be a power of two")
        if self.keep > self.tile:
            raise ConfigError(f"head.keep={self.keep} must be at most head.tile={self.tile}")


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Training sequences on disk (see data_gen/shards.py) and how they are packed."""

    train_path: str = MISSING
    validation_path: str = MISSING
    features_path: str | None = None  # the target's outputs on disk, made with action=features; null: it runs itself
    seq_len: int = 2048  # tokens of one packed row
    num_workers: int = 2

    def __post_init__(self) -> None:
        _at_least("data.seq_len", self.seq_len, 3)  # two tokens have no third to draft
        _at_least("data.num_workers", self.num_workers, 0)
        _not_empty("data.train_path", self.train_path)
        _not_empty("data.validation_path", self.validation_path)
        if self.features_path is not None:
            _not_empty("data.features_path", self.features_path)
        if self.train_path != MISSING and Path(self.validation_path).absolute() == Path(self.train_path).absolute():
            raise ConfigError(f"data.validation_path={self.validation_path!r} is also data.train_path; set another one")


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """Where prompts come from; the forms of a record are listed in data_gen/prompts.py."""

    path: str = MISSING  # a .jsonl, .json, .csv or .parquet file, or a data set's folder or hub id
    subset: str | None = None  # of a data set: its configuration's name
    split: str = "train"  # of a data set
    num_records: int | None = None  # read so many from its start; null: all
    weight: float | None = None  # its share of the mixture, relative to the others'; null: all of its prompts

    def __post_init__(self) -> None:
        _not_empty("generation.sources: path", self.path)
        _at_least(f"generation.sources: num_records of {self.path}", self.num_records, 1)
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ConfigError(f"generation.sources: weight={self.weight} of {self.path} must be positive and finite")


@dataclass(kw_only=True, slots=True)
class GenerationConfig:
    """Prompts and the target's own answers to them."""

    engine: str = "transformers"
    base_urls: list[str] = field(default_factory=list)  # of the openai engine: http://host:8000, one for each server
    served_model: str | None = None  # the servers' name for the target; null: target.model
    server_concurrency: int = 256  # requests under way at one time, for each server and process
    server_timeout: float = 900.0  # seconds of one request
    server_attempts: int = 6  # for each prompt; then it is rejected
    server_patience: float = 900.0  # seconds without any server, then the command ends
    server_api_key_env: str | None = None  # the environment variable that holds the servers' API key
    prompt_files: list[str] = field(default_factory=list)  # short for sources that are just a path
    sources: list[SourceConfig] = field(default_factory=list)
    responses: str = "regenerate"  # the target writes every answer anew; keep: those of the sources, masked exactly
    samples_per_prompt: int = 1
    thinking_share: float | None = None  # prompts with enable_thinking=true, the others false; null: as the template
    magpie_prompts: int = 0  # user turns the target invents from its own chat template
    magpie_temperature: float = 1.0
    magpie_max_new_tokens: int = 96
    num_prompts: int | None = None  # null: all
    validation_fraction: float = 0.02
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 1024
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    batch_tokens: int | None = None  # (prompt + max_new_tokens) * rows of one generation batch; null: what fits
    rows_per_shard: int = 2048  # at most; few prompts are spread over more shards, so that every rank has some
    near_duplicate_threshold: float | None = None  # Jaccard similarity of two questions' word 5-grams; null: off
    min_response_tokens: int = 1
    max_repetition: float | None = None  # share of 8-grams, of a question or an answer, that repeat; null: no limit
    max_rejected_share: float = 0.05  # of the prompts; more that are malformed or get no answer stop the run

    def __post_init__(self) -> None:
        _one_of("generation.engine", self.engine, ENGINES)
        self._check_servers()
        self._check_prompts()
        self._check_answers()
        _fraction("generation.validation_fraction", self.validation_fraction)
        _fraction("generation.top_p", self.top_p)
        for name in ("magpie_prompts", "temperature", "top_k", "magpie_temperature"):
            _at_least(f"generation.{name}", getattr(self, name), 0)
        for name in ("magpie_max_new_tokens", "max_prompt_tokens", "max_new_tokens", "batch_tokens", "rows_per_shard"):
            _at_least(f"generation.{name}", getattr(self, name), 1)
        _at_least("generation.num_prompts", self.num_prompts, 1)
        if self.top_p == 0:
            raise ConfigError("generation.top_p=0 leaves no token; for greedy answers set temperature=0")
        if self.magpie_prompts and self.magpie_temperature == 0:
            raise ConfigError("generation.magpie_temperature=0 would invent the same prompt every time; set it to 1.0")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise ConfigError(f"generation.temperature=0 is greedy and cannot be combined with "
                              f"top_p={self.top_p}, top_k={self.top_k}; set a temperature or drop them")

    def _check_prompts(self) -> None:
        if len({source.weight is None for source in self.sources}) > 1 or (
                self.prompt_files and any(source.weight for source in self.sources)):
            raise ConfigError("generation.sources: give a weight to every source, or to none; name files that are to "
                              "be mixed under sources, not under prompt_files")
        if self.near_duplicate_threshold == 0:
            raise ConfigError("generation.near_duplicate_threshold=0 calls all prompts alike; set about 0.8, or null")

    def _check_answers(self) -> None:
        _one_of("generation.responses", self.responses, ("regenerate", "keep"))
        for name in ("max_rejected_share", "max_repetition", "near_duplicate_threshold", "thinking_share"):
            if getattr(self, name) is not None:
                _fraction(f"generation.{name}", getattr(self, name))
        for name in ("samples_per_prompt", "min_response_tokens"):
            _at_least(f"generation.{name}", getattr(self, name), 1)
        if self.samples_per_prompt > 1 and (self.temperature == 0 or self.responses == "keep"):
            raise ConfigError(f"generation.samples_per_prompt={self.samples_per_prompt} would give the same answer so "
                              "many times; set a temperature and responses=regenerate, or samples_per_prompt=1")
        if self.responses == "keep" and self.magpie_prompts:
            raise ConfigError(f"generation.magpie_prompts={self.magpie_prompts} have no answers that "
                              "generation.responses=keep could keep; set it to 0")

    def _check_servers(self) -> None:
        if (self.engine == "openai") != bool(self.base_urls):
            raise ConfigError(f"generation.engine={self.engine!r} with generation.base_urls={self.base_urls}: the "
                              "openai engine needs the URLs of its servers, and no other engine has any")
        if wrong := [url for url in self.base_urls if not re.match(r"https?://[^/\s]", url)]:
            raise ConfigError(f"generation.base_urls holds {wrong[0]!r}; give URLs such as http://localhost:8000")
        if len(set(self.base_urls)) < len(self.base_urls):
            raise ConfigError(f"generation.base_urls={self.base_urls} names a server twice; "
                              "raise server_concurrency to send it more requests")
        for name in ("server_concurrency", "server_attempts"):
            _at_least(f"generation.{name}", getattr(self, name), 1)
        for name in ("server_timeout", "server_patience"):
            _at_least(f"generation.{name}", getattr(self, name), 0.1)
        if self.server_api_key_env and self.server_api_key_env not in os.environ:
            raise ConfigError(f"generation.server_api_key_env={self.server_api_key_env!r} is no environment variable; "
                              "export it, or drop the override")


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
            _at_least(f"trainer.{name}", getattr(self, name), 1)
        _at_least("trainer.max_steps", self.max_steps, 1)
        _at_least("trainer.skip_non_finite", self.skip_non_finite, 0)
        _at_least("trainer.aux_weight", self.aux_weight, 0)
        if not 1e-2 <= self.temperature <= 1e3:
            raise ConfigError(f"trainer.temperature={self.temperature} must lie between 0.01 and 1000")
        _fraction("trainer.step_decay", self.step_decay)
        _one_of("trainer.loss", self.loss, LOSSES)
        _one_of("trainer.mixed_precision", self.mixed_precision, ("no", "bf16"))
        _one_of("trainer.loss_normalization", self.loss_normalization, ("valid", "slot"))


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
        _fraction("optim.warmup_ratio", self.warmup_ratio)
        _fraction("optim.min_lr_ratio", self.min_lr_ratio)
        _at_least("optim.weight_decay", self.weight_decay, 0)
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
        _one_of("distributed.strategy", self.strategy, STRATEGIES)
        _at_least("distributed.timeout_s", self.timeout_s, 1)
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
        _one_of("tracking.backend", self.backend, ("none", "wandb", "tensorboard"))
        _at_least("tracking.num_samples", self.num_samples, 0)
        if self.log_artifact and self.backend != "wandb":
            raise ConfigError(f"tracking.log_artifact=true needs tracking=wandb, but tracking.backend={self.backend}")


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
        _at_least("eval.num_prompts", self.num_prompts, 1)
        _at_least("eval.max_new_tokens", self.max_new_tokens, 1)
        _at_least("eval.num_draft_tokens", self.num_draft_tokens, 1)
        _at_least("eval.temperature", self.temperature, 0)
        _one_of("eval.dtype", self.dtype, DTYPES)


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """What scripts/export.py makes of a run; no other command reads it."""

    layout: str = "eagle3"  # SafeAILab's and SpecForge's, in output_dir/export; speculators: in export-speculators
    own_lm_head: bool = False  # store a copy of the target's lm_head, for an engine that cannot share it
    weights: str = "final"  # best: of the checkpoint with the best simulated tau on the validation data

    def __post_init__(self) -> None:
        _one_of("export.layout", self.layout, LAYOUTS)
        _one_of("export.weights", self.weights, ("final", "best"))


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
            _one_of("compare.heads", kind, RIVALS)
        for name in ("num_candidates", "static_sizes", "train_static", "shortlist_sizes", "ranks"):
            for value in getattr(self, name) or []:
                _at_least(f"compare.{name}", value, 1)
        for name in ("num_clusters", "num_states", "context"):
            _at_least(f"compare.{name}", getattr(self, name), 1)
        _at_least("compare.kappa", self.kappa, 0)


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
        _one_of("sweep.launcher", self.launcher, ("here", "submitit_local", "submitit_slurm"))
        for name in ("num_trials", "startup_trials", "parallel"):
            _at_least(f"sweep.{name}", getattr(self, name), 1)
        _at_least("sweep.prune_after", self.prune_after, 0)
        if self.grid and self.search:
            raise ConfigError("sweep.grid and sweep.search exclude each other; keep one, or make the grid's keys "
                              "lists of values in sweep.search")
        if empty := [key for key, values in self.grid.items() if not values]:
            raise ConfigError(f"sweep.grid: {', '.join(empty)} has no values; list some, or remove it")


@dataclass(kw_only=True, slots=True)
class Config:
    """Everything one experiment says."""

    run_name: str = MISSING
    output_dir: str = "outputs/${run_name}"
    action: str = "generate"  # of data_gen/main.py: generate; features of what is there; or inspect, verify, stats
    inspect: list[str] = field(default_factory=lambda: ["0"])  # rows to print, by number or id
    seed: int = 0
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        _not_empty("run_name", self.run_name)
        _not_empty("output_dir", self.output_dir)
        _one_of("action", self.action, ("generate", "features", "inspect", "verify", "stats"))
        if self.generation.thinking_share is not None and "enable_thinking" in self.target.chat_template_kwargs:
            raise ConfigError(f"generation.thinking_share={self.generation.thinking_share} and "
                              "target.chat_template_kwargs.enable_thinking contradict each other; drop one")
        if self.data.features_path is not None and self.trainer.cache_target:
            raise ConfigError(f"trainer.cache_target=true remembers what the target says, but with data.features_path="
                              f"{self.data.features_path!r} it is not asked; set trainer.cache_target=false")
        if self.data.features_path is not None and self.distributed.shard_target:
            raise ConfigError(f"distributed.shard_target=true shares out a target's layers, but with "
                              f"data.features_path={self.data.features_path!r} none are loaded; switch it off")
        if self.trainer.cache_target and self.distributed.shard_target:
            raise ConfigError("trainer.cache_target=true runs the target on each rank when it is needed there, but "
                              "distributed.shard_target=true needs all ranks to run it together; switch one off")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed} must lie between 0 and 2**32 - 1, as numpy's does")


NODES: dict[str, type] = {
    "target": TargetConfig, "draft": DraftConfig, "head": HeadConfig, "data": DataConfig,
    "generation": GenerationConfig, "trainer": TrainerConfig, "optim": OptimConfig,
    "distributed": DistributedConfig, "tracking": TrackingConfig, "eval": EvalConfig,
    "export": ExportConfig, "compare": CompareConfig, "sweep": SweepConfig,
}


def has_fast_bf16() -> bool:
    """Whether this machine multiplies bf16 as fast as fp32: a GPU, or a CPU with AVX-512.

    Without it torch has no fast bf16 product on a CPU: on an EPYC with AVX2, 0.9 GFLOP/s a core against 70 in fp32.
    """
    import torch  # seconds, for the commands that ask

    return torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@cache
def register_schemas() -> None:
    """Put every schema into Hydra's ConfigStore, once, as ``<group>/schema`` (and the root as ``schema``).

    YAML files may say ``${if_fast_bf16:yes,no}``, which becomes one of the two words on this machine.
    """
    OmegaConf.register_new_resolver("if_fast_bf16", lambda yes, no: yes if has_fast_bf16() else no, replace=True)
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, node in NODES.items():
        store.store(group=group, name="schema", node=node)


def parse_config(composed: DictConfig) -> Config:
    """Turn Hydra's composed config into checked dataclasses.

    Raises:
        ConfigError: a value is missing, of the wrong type, or contradicts another.
    """
    try:  # plain values into a fresh schema, because Hydra opens the composed one for "+key=value"
        checked = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(composed, resolve=True))
        missing = OmegaConf.missing_keys(checked)
        if missing:
            raise ConfigError(f"no value for {', '.join(sorted(missing))}: {_SET_IT}")
        config = OmegaConf.to_object(checked)
    except OmegaConfBaseException as error:
        raise ConfigError(describe(error)) from error
    assert isinstance(config, Config)
    return config


def describe(error: OmegaConfBaseException) -> str:
    """One line for an OmegaConf error: what is wrong, where, and the key that was probably meant."""
    first = str(error).splitlines()[0]
    if isinstance(error, InterpolationToMissingValueError):
        return f"no value for {first.rpartition(': ')[2]}: {_SET_IT}"
    where = f" (at {error.full_key})" if error.full_key else ""
    known = [f.name for f in fields(error.object_type)] if is_dataclass(error.object_type) else []
    close = [name for name in get_close_matches(str(error.key), known) if name != error.key]
    return first + where + (f"; did you mean {close[0]}?" if close else "")

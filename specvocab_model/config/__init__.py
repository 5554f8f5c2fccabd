"""The configuration of every command, checked before anything is loaded.

Hydra composes the YAML files of ``configs/``; the dataclasses here are their schema. ``parse_config`` turns the
composed ``DictConfig`` into these objects, so a misspelt key, a wrong type, a missing value or two fields that
contradict each other stop the command with one line. Nothing past ``parse_config`` sees a ``DictConfig``.

One package holds all nodes because one ``+experiment=...`` serves ``data_gen/main.py``, ``train/main.py`` and the
scripts, and neither of the first two may import the other. Each module has those of a stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from specvocab_model.config.checks import DTYPES, ConfigError, not_empty, one_of
from specvocab_model.config.generation import ENGINES, GenerationConfig, SourceConfig
from specvocab_model.config.model import HEADS, QUANTIZATIONS, SELECTIONS, DraftConfig, HeadConfig, TargetConfig
from specvocab_model.config.scripts import LAYOUTS, RIVALS, CompareConfig, EvalConfig, ExportConfig, SweepConfig
from specvocab_model.config.training import (
    LOSSES,
    STRATEGIES,
    DataConfig,
    DistributedConfig,
    OptimConfig,
    TrackingConfig,
    TrainerConfig,
)

__all__ = [
    "CONFIG_DIR", "DTYPES", "ENGINES", "HEADS", "LAYOUTS", "LOSSES", "NODES", "QUANTIZATIONS", "RIVALS",
    "SELECTIONS", "STRATEGIES", "CompareConfig", "Config", "ConfigError", "DataConfig", "DistributedConfig",
    "DraftConfig", "EvalConfig", "ExportConfig", "GenerationConfig", "HeadConfig", "OptimConfig", "SourceConfig",
    "SweepConfig", "TargetConfig", "TrackingConfig", "TrainerConfig", "describe", "has_fast_bf16", "parse_config",
    "register_schemas",
]

CONFIG_DIR = str(Path(__file__).resolve().parents[2] / "configs")

_SET_IT = "choose an experiment (+experiment=NAME) or set it (key=value)"


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
        not_empty("run_name", self.run_name)
        not_empty("output_dir", self.output_dir)
        one_of("action", self.action, ("generate", "features", "inspect", "verify", "stats"))
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

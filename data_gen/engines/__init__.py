"""The engines that write responses, by the names of ``generation.engine``."""

from __future__ import annotations

import torch

from data_gen.engines.base import Completion, Engine, Rejected, SamplingParams
from data_gen.engines.transformers_engine import TransformersEngine
from specvocab_model.config import Config
from specvocab_model.target import Target

__all__ = ["Completion", "Engine", "Rejected", "SamplingParams", "TransformersEngine", "build_engine"]


def build_engine(config: Config, device: torch.device) -> Engine:
    """Load the target and the engine that ``generation.engine`` names.

    Raises:
        ConfigError: the target is missing or not supported.
    """
    return ENGINES[config.generation.engine](config, device)


def _transformers(config: Config, device: torch.device) -> TransformersEngine:
    target = Target.load(config.target, device=device)
    return TransformersEngine(target, batch_tokens=config.generation.batch_tokens)


ENGINES = {"transformers": _transformers}

"""The engines that write responses, by the names of ``generation.engine``."""

from __future__ import annotations

import os

import torch

from data_gen.engines.base import Completion, Engine, Rejected, SamplingParams
from data_gen.engines.openai_engine import OpenAIEngine, Reach
from data_gen.engines.transformers_engine import TransformersEngine
from specvocab_model.config import Config
from specvocab_model.target import Target
from specvocab_model.target_spec import load_spec_and_tokenizer

__all__ = ["Completion", "Engine", "OpenAIEngine", "Reach", "Rejected", "SamplingParams", "TransformersEngine",
           "build_engine"]


def build_engine(config: Config, device: torch.device) -> Engine:
    """Load the target and the engine that ``generation.engine`` names.

    Raises:
        ConfigError: the target is missing or not supported, or the engine cannot be had.
    """
    return ENGINES[config.generation.engine](config, device)


def _transformers(config: Config, device: torch.device) -> Engine:
    target = Target.load(config.target, device=device)
    return TransformersEngine(target, batch_tokens=config.generation.batch_tokens)


def _openai(config: Config, device: torch.device) -> Engine:
    generation = config.generation
    spec, tokenizer = load_spec_and_tokenizer(config.target)
    key = os.environ[generation.server_api_key_env] if generation.server_api_key_env else None
    return OpenAIEngine(
        generation.base_urls,
        model=generation.served_model or config.target.model,
        spec=spec,
        tokenizer=tokenizer,
        min_context=generation.max_prompt_tokens + generation.max_new_tokens,
        reach=Reach(
            concurrency=generation.server_concurrency,
            timeout_s=generation.server_timeout,
            attempts=generation.server_attempts,
            patience_s=generation.server_patience,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        ),
    )


ENGINES = {"transformers": _transformers, "openai": _openai}

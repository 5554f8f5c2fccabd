"""The engines that write responses, by the names of ``generation.engine``."""

from __future__ import annotations

import os

import torch

from data_gen.engines.base import Batch, Completion, Engine, Rejected, SamplingParams
from data_gen.engines.continuous_engine import ContinuousEngine
from data_gen.engines.openai_engine import OpenAIEngine, Reach
from data_gen.engines.transformers_engine import TransformersEngine
from data_gen.engines.vllm_engine import VllmEngine
from specvocab_model.config import Config, ConfigError
from specvocab_model.target import Target
from specvocab_model.target_spec import load_spec_and_tokenizer

__all__ = ["Batch", "Completion", "ContinuousEngine", "Engine", "OpenAIEngine", "Reach", "Rejected", "SamplingParams",
           "TransformersEngine", "VllmEngine", "build_engine"]

CPU_BATCH_TOKENS = 65536
CACHE_SHARE = 0.4  # the rest is for prompts being read, logits, and whoever else is on the card


def build_engine(config: Config, device: torch.device) -> Engine:
    """Load the target and the engine that ``generation.engine`` names.

    Raises:
        ConfigError: the target is missing or not supported, or the engine cannot be had.
    """
    return ENGINES[config.generation.engine](config, device)


def _transformers(config: Config, device: torch.device) -> Engine:
    target = Target.load(config.target, device=device)
    batch_tokens = config.generation.batch_tokens
    if device.type != "cuda":
        return TransformersEngine(target, batch_tokens=batch_tokens or CPU_BATCH_TOKENS)
    return ContinuousEngine(target, batch_tokens=batch_tokens or _tokens_that_fit(target))


def _tokens_that_fit(target: Target) -> int:
    """Tokens whose keys and values take ``CACHE_SHARE`` of the GPU memory that the weights have left."""
    spec = target.spec
    num_values = 2 * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim
    free_bytes, _ = torch.cuda.mem_get_info(target.device)
    return int(CACHE_SHARE * free_bytes) // (num_values * target.lm_head_weight.element_size())


def _openai(config: Config, device: torch.device) -> Engine:
    generation = config.generation
    spec, tokenizer = load_spec_and_tokenizer(config.target)
    key = os.environ[generation.server_api_key_env] if generation.server_api_key_env else ""
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"the key in ${generation.server_api_key_env} holds a line break or what no header may hold; "
                          "export it again")
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


def _vllm(config: Config, device: torch.device) -> Engine:
    if device.type == "cuda":  # of several processes on a host, each has one GPU; vLLM starts a process of its own
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device.index or 0]
    spec, _ = load_spec_and_tokenizer(config.target)
    max_context = config.generation.max_prompt_tokens + config.generation.max_new_tokens
    return VllmEngine(config.target, vocab_size=spec.vocab_size, max_context=max_context)


ENGINES = {"transformers": _transformers, "vllm": _vllm, "openai": _openai}

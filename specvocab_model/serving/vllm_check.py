"""A checkpoint in the installed vLLM, for ``scripts/serve_check.py``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_distributed_init_method, get_open_port
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

from specvocab_model.serving.check import ROWS, Served


class VllmDraft:
    """See ``check.ServedDraft``.

    Args:
        folder: the checkpoint.
        target: folder or hub id of its target.
        dtype: as vLLM's ``--dtype``.
        num_draft_tokens: length of a chain.
        max_model_len: as vLLM's ``--max-model-len``.
        speculative: further keys of vLLM's ``--speculative-config``.
        **engine: further arguments of vLLM's engine.
    """

    name = f"vLLM {vllm.__version__}"

    def __init__(self, folder: Path, target: str, *, dtype: str, num_draft_tokens: int, max_model_len: int,
                 speculative: Mapping[str, Any] | None = None, **engine: Any) -> None:
        self._arguments: dict[str, Any] = engine | {
            "model": target,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "enforce_eager": True,
            "speculative_config": {"method": "eagle3", "model": str(folder), "num_speculative_tokens": num_draft_tokens,
                                   "use_local_argmax_reduction": True} | dict(speculative or {}),
        }
        if current_platform.is_cpu():  # GiB of cache; left to itself, it asks for nearly all of the memory
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        self._config = EngineArgs(**self._arguments).create_engine_config()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return get_eagle3_aux_layers_from_config(self._config.speculative_config) or ()

    def logits(self, features: Tensor, next_ids: Tensor) -> Tensor:
        with set_current_vllm_config(self._config), torch.inference_mode():
            init_distributed_environment(
                world_size=1, rank=0, local_rank=0, backend=current_platform.dist_backend,
                distributed_init_method=get_distributed_init_method("127.0.0.1", get_open_port()),
            )
            ensure_model_parallel_initialized(1, 1)
            try:
                return self._logits(features, next_ids)
            finally:
                cleanup_dist_env_and_memory()

    def _logits(self, features: Tensor, next_ids: Tensor) -> Tensor:
        if current_platform.is_cpu():
            _set_torch_accelerator_to_noop()  # as vLLM's own runner does: its loaders empty the cache of a GPU
        target = get_model(vllm_config=self._config)
        draft: Any = load_eagle_model(target, self._config)
        for layer in draft.model.layers:
            attention = layer.self_attn
            attention.attn = _CausalAttention(attention.num_heads, attention.num_kv_heads, attention.head_dim)
        weight = draft.lm_head.weight
        positions = torch.arange(len(next_ids), device=weight.device)
        hidden = draft.combine_hidden_states(features.to(weight))
        output, _ = draft(next_ids.to(weight.device), positions, hidden)
        return torch.cat([draft.compute_logits(rows) for rows in output.split(ROWS)]).float().to(features.device)

    def serve(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Served:
        llm = LLM(disable_log_stats=False, **self._arguments)
        parameters = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], parameters, use_tqdm=False)
        counts = {metric.name: metric for metric in llm.get_metrics()}
        return Served(
            answers=[list(output.outputs[0].token_ids) for output in outputs],
            num_rounds=counts["vllm:spec_decode_num_drafts"].value,
            accepted_per_position=list(counts["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
        )


class _CausalAttention(nn.Module):
    """In the place of vLLM's attention, which needs a scheduler and its paged cache; over one text from its start."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[T, heads * head_dim] each -> [T, num_heads * head_dim]"""
        q = query.view(-1, self.num_heads, self.head_dim).transpose(0, 1)
        k, v = (x.view(-1, self.num_kv_heads, self.head_dim).transpose(0, 1) for x in (key, value))
        # A batch of one: without it, grouped queries are not supported by every implementation.
        output = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        return output[0].transpose(0, 1).flatten(1)

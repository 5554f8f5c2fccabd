"""SGLang's EAGLE-3 Llama draft with the vocabulary speculator that lies in the checkpoint's folder.

Everything but the output head is SGLang's own. Its logits processor asks ``lm_head.quant_method`` for the logits of
this rank's rows; ours gives −inf outside the candidates, and SGLang gathers the ranks' rows as it does for any draft. A
checkpoint without ``vocabulary_speculator/`` is served as by SGLang's class.

SGLang's worker takes the drafted tokens from ``[N, V]`` logits: what that costs is in docs/SERVING.md.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.runtime_context import get_parallel, get_server_args, get_spec
from sglang.srt.utils import cpu_has_amx_support
from torch import Tensor
from transformers import LlamaConfig

from specvocab_model.config import ConfigError
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.serving.checkpoint import checkpoint_folder, read_draft
from specvocab_model.serving.sharded_head import ShardedHead
from specvocab_model.target import TargetShape

logger = logging.getLogger(__name__)


class SpecVocabLlamaForCausalLMEagle3(LlamaForCausalLMEagle3):
    """The draft; see the module."""

    def __init__(self, config: LlamaConfig, quant_config: Any = None, prefix: str = "") -> None:
        assert config.name_or_path is not None  # SGLang has read it from there
        folder = checkpoint_folder(config.name_or_path, get_spec().speculative_draft_model_revision)
        checkpoint = None if folder is None else _read(folder)
        super().__init__(config, quant_config, prefix)
        if checkpoint is None:
            return
        if checkpoint.architecture.norm_before_residual:
            raise ConfigError(f"{folder} has norm_before_residual=true, which SGLang's draft does not know and would "
                              "leave out without a word; serve it with vLLM")
        if checkpoint.speculator is None:
            return
        if self.lm_head.weight.device.type == "cpu" and cpu_has_amx_support():
            raise ConfigError("SGLang repacks lm_head for AMX on this processor, which a speculated vocabulary cannot "
                              "read; serve without the plugin (SGLANG_PLUGINS=none)")
        head = ShardedHead(
            checkpoint.speculator,
            self.lm_head.shard_indices.org_vocab_start_index,
            lm_head_rows(self.lm_head),
            logit_scale=config.logit_scale,
            logit_softcap=self.logits_processor.final_logit_softcapping,
        )
        self.lm_head.quant_method = SpeculatedVocabulary(head)
        self.logits_processor.final_logit_softcapping = None  # done by the head: it would make a finite number of −inf
        logger.info("Drafts of %s speculate on the vocabulary: %s, rank %d", folder, head.selection,
                    checkpoint.speculator.rank)


def _read(folder: Path) -> SpecVocabDraft | None:
    config = ModelConfig.from_server_args(get_server_args())
    target = TargetShape(
        name=config.model_path, hidden_size=config.hidden_size, vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers, max_position_embeddings=config.context_len)
    with torch.device("cpu"):  # SGLang builds models under the device that they are for
        return read_draft(folder, target, get_parallel().tp_size)


class SpeculatedVocabulary(QuantizeMethodBase):
    """What an ``lm_head`` does to hidden states, in SGLang's terms: candidates instead of a product with all rows."""

    def __init__(self, head: ShardedHead) -> None:
        self.head = head

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` ``[N, d]`` -> fp32 logits of this rank's rows with SGLang's padding, −inf outside the candidates."""
        return self.head.dense_logits(x, lm_head_rows(layer), layer.num_embeddings_per_partition, torch.float32)


def lm_head_rows(lm_head: Any) -> Tensor:
    """This rank's rows without SGLang's padding; of the target's ``lm_head`` once it is shared."""
    return lm_head.weight[: lm_head.num_org_embeddings_per_partition]

"""vLLM's EAGLE-3 Llama draft with the vocabulary speculator that lies in the checkpoint's folder.

Everything up to the final norm is vLLM's own; only what becomes of its output differs. A checkpoint without
``vocabulary_speculator/`` is served by vLLM's class, unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from vllm import __version__

from specvocab_model.draft import SpecVocabDraft
from specvocab_model.serving.checkpoint import checkpoint_folder, read_draft
from specvocab_model.serving.sharded_head import ShardedHead
from specvocab_model.speculator_files import SPECULATOR_FOLDER
from specvocab_model.target import TargetShape

try:
    from vllm.config import VllmConfig
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
    from vllm.logger import init_logger
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
except ImportError as error:
    raise ImportError(f"specvocab does not know this vLLM, {__version__} ({error}): install a version that "
                      "docs/SERVING.md names, or serve without the vocabulary speculator (VLLM_PLUGINS='')") from error

logger = init_logger("vllm.specvocab")  # below the name whose messages vLLM shows


class SpecVocabLlamaForCausalLMEagle3(Eagle3LlamaForCausalLM):
    """``get_top_tokens`` gives target ids without any tensor of vocabulary width, ``compute_logits`` gives −inf outside
    the candidates. vLLM asks for the former with ``use_local_argmax_reduction`` in the speculative configuration.
    """

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> Self | Eagle3LlamaForCausalLM:
        folder = _folder(vllm_config)
        if folder is not None and (folder / SPECULATOR_FOLDER).is_dir():
            return super().__new__(cls)
        if folder is not None:
            _read(folder, vllm_config)  # only to refuse what vLLM would serve wrongly without a word
        # Of another class than this one, so Python does not call __init__ a second time.
        return Eagle3LlamaForCausalLM(vllm_config=vllm_config, prefix=prefix)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        folder = _folder(vllm_config)
        assert folder is not None
        draft = _read(folder, vllm_config)  # first, as vLLM's own errors on a damaged one say less
        assert draft is not None and draft.speculator is not None
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        speculator = draft.speculator
        rows = self.lm_head.shard_indices
        self.speculative_head = ShardedHead(
            speculator,
            rows.org_vocab_start_index,
            self._lm_head_rows(),
            logit_scale=self.logits_processor.scale,
            logit_softcap=self.config.to_dict().get("final_logit_softcapping"),  # vLLM's drafts have none
        )
        logger.info("Drafts of %s speculate on the vocabulary: %s, rank %d", folder, self.speculative_head.selection,
                    speculator.rank)

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """The best candidate of every row of ``[N, d]``, int64 ``[N]``, as target ids."""
        return self.speculative_head.greedy_tokens(hidden_states, self._lm_head_rows(), self._all_gather())

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """``[N, V]`` in the type of vLLM's own logits, −inf outside the candidates."""
        width = self.lm_head.num_embeddings_per_partition
        dense = self.speculative_head.dense_logits(hidden_states, self._lm_head_rows(), width,
                                                   self.logits_processor.head_dtype)
        all_gather = self._all_gather()
        return (dense if all_gather is None else all_gather(dense))[:, : self.config.vocab_size]

    def _lm_head_rows(self) -> Tensor:
        """This rank's rows without vLLM's padding; of the target's ``lm_head`` once it is shared."""
        return self.lm_head.weight[: self.lm_head.shard_indices.num_org_elements]

    def _all_gather(self) -> Any:
        return tensor_model_parallel_all_gather if self.lm_head.tp_size > 1 else None


def _folder(vllm_config: VllmConfig) -> Path | None:
    assert vllm_config.speculative_config is not None  # vLLM builds an EAGLE-3 class for nothing else
    config = vllm_config.speculative_config.draft_model_config
    return checkpoint_folder(config.model, config.revision, vllm_config.load_config.download_dir)


def _read(folder: Path, vllm_config: VllmConfig) -> SpecVocabDraft | None:
    config = vllm_config.model_config
    target = TargetShape(
        name=config.model, hidden_size=config.get_hidden_size(), vocab_size=config.get_vocab_size(),
        num_hidden_layers=config.hf_text_config.num_hidden_layers, max_position_embeddings=config.max_model_len)
    with torch.device("cpu"):  # vLLM builds models under the device that they are for
        return read_draft(folder, target, get_tensor_model_parallel_world_size())

"""An engine of our own, in the place of vLLM and SGLang."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from specvocab_model.attention import DraftCache
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads import build_head
from specvocab_model.serving.check import Served, decode
from specvocab_model.target import Target


class OurEngine:
    """The trainer's draft and heads behind the signature of ``ServedDraft``."""

    name = "ours 1.0"

    def __init__(self, target: Target, model: SpecVocabDraft, head: str) -> None:
        self.target, self.model, self.head = target, copy.deepcopy(model), head
        self.feature_layers: tuple[int, ...] = model.architecture.feature_layers

    def logits(self, features: Tensor, next_ids: Tensor) -> Tensor:
        draft = self.model.draft
        positions = torch.arange(len(next_ids))[None]
        hidden = draft.forward_cached(draft.fuse(features)[None], self.target.embed(next_ids)[None], positions,
                                      DraftCache())
        return build_head(self.head, self.target, self.model)(draft.norm(hidden[0])).dense_logits(
            self.target.spec.vocab_size)

    def serve(self, prompts, max_new_tokens: int) -> Served:
        return decode(self.target, self.model, self.head, prompts, max_new_tokens=max_new_tokens, num_draft_tokens=3)

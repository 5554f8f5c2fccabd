"""What heads cost on the present device, and what they would where reading weights is all that takes time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads import Head, InContextHead
from specvocab_model.target import Target
from specvocab_model.tuning.flops import draft_bytes
from specvocab_model.tuning.latency import rest_of_round_seconds, seconds_of

SEEN = 64  # tokens of the text that a head with a memory is timed on


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost:
    """A round of decoding without its draft heads, batch 1: the target over all drafts, and the draft's layer."""

    seconds: float
    num_bytes: int  # read

    def kappa(self, full_seconds: float, num_draft_tokens: int) -> float:
        """κ of ``tuning.search.predicted_speed`` on this device."""
        return num_draft_tokens * full_seconds / self.seconds

    def kappa_of_bytes(self, full_bytes: int, num_draft_tokens: int) -> float:
        """κ where bytes are time."""
        return num_draft_tokens * full_bytes / self.num_bytes


def measure_round(target: Target, model: SpecVocabDraft, *, num_draft_tokens: int, context: int) -> RoundCost:
    """See ``latency.rest_of_round_seconds``; bytes are those of the weights and of the draft's cache."""
    embedding, lm_head = target.model.get_input_embeddings().weight, target.lm_head_weight
    weights = {parameter.data_ptr(): parameter for parameter in target.model.parameters()}
    if embedding is not lm_head:  # of which a forward reads some rows only
        del weights[embedding.data_ptr()]
    layer = draft_bytes(model.architecture, 0, itemsize=lm_head.element_size(), context=context)
    return RoundCost(
        seconds=rest_of_round_seconds(target, model, num_draft_tokens=num_draft_tokens, context=context),
        num_bytes=sum(one.numel() * one.element_size() for one in weights.values()) + num_draft_tokens * layer,
    )


@torch.inference_mode()
def head_seconds(head: Head, target: Target, *, num_draft_tokens: int) -> float:
    """One greedy draft token of one row; a head that chooses once a round has that cost shared out over its drafts."""
    lm_head = target.lm_head_weight
    generator = torch.Generator(lm_head.device).manual_seed(0)

    def random(size: int) -> torch.Tensor:
        return torch.randn(1, size, generator=generator, dtype=lm_head.dtype, device=lm_head.device)

    ids = torch.arange(SEEN, device=lm_head.device) % len(lm_head)
    hidden, target_logits = random(lm_head.shape[1]), random(len(lm_head)).float()
    head.begin(ids)
    seconds = seconds_of(lambda: head(hidden).greedy_tokens(), lm_head.device)
    if isinstance(head, InContextHead):
        seconds += seconds_of(lambda: head.verified(ids[:1], target_logits), lm_head.device) / num_draft_tokens
    return seconds

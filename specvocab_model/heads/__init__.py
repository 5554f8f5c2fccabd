"""Heads: from the draft's normalised output to logits over some of the target's tokens.

To add one, write a subclass of ``Head`` and give it a line in ``HEADS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from specvocab_model.config import ConfigError
from specvocab_model.heads.base import Head, HeadOutput
from specvocab_model.heads.cluster import ClusterHead, ClusterRouter
from specvocab_model.heads.full import FullHead
from specvocab_model.heads.in_context import InContextHead
from specvocab_model.heads.low_rank import LowRankHead
from specvocab_model.heads.speculative import SpeculativeHead
from specvocab_model.heads.static import StaticHead
from specvocab_model.vocab import VocabMap, special_ids

if TYPE_CHECKING:
    from specvocab_model.draft import SpecVocabDraft
    from specvocab_model.speculator import VocabSpeculator
    from specvocab_model.target import Target

__all__ = ["HEADS", "ClusterHead", "ClusterRouter", "FullHead", "Head", "HeadOutput", "InContextHead", "LowRankHead",
           "SpeculativeHead", "StaticHead", "build_head"]


def _full(target: Target, model: SpecVocabDraft) -> Head:
    return FullHead(target, model.lm_head_weight(target))


def _speculative(target: Target, model: SpecVocabDraft, impl: str = "auto") -> Head:
    return SpeculativeHead(target, _speculator(model, "speculative"), model.lm_head_weight(target), impl)


def _low_rank(target: Target, model: SpecVocabDraft) -> Head:
    return LowRankHead(target, _speculator(model, "low_rank"))


def _speculator(model: SpecVocabDraft, kind: str) -> VocabSpeculator:
    if model.speculator is None:
        raise ConfigError(f"the draft has no vocabulary speculator, which head {kind!r} needs; use head 'full', or add "
                          "one with scripts/convert.py")
    return model.speculator


def _static(target: Target, model: SpecVocabDraft, vocab: VocabMap | None = None) -> Head:
    """``vocab``: prune the full head to it; None: the reduced head that the draft was trained with or pruned to."""
    if vocab is not None:
        lm_head = model.lm_head_weight(target)
        return StaticHead(target, vocab, lm_head[vocab.ids.to(lm_head.device)])
    if model.own_head is None:
        raise ConfigError("the draft has no static head of its own; train one with head=static, or say to which "
                          "vocabulary the target's is to be pruned")
    return StaticHead(target, model.own_head.vocab, model.own_head.weight)


def _cluster(target: Target, model: SpecVocabDraft, router: ClusterRouter, size: int) -> Head:
    return ClusterHead(target, router, size, model.lm_head_weight(target))


def _in_context(
    target: Target, model: SpecVocabDraft, size: int, always_keep: Iterable[int] | None = None
) -> Head:
    """``always_keep`` None: the target's special tokens."""
    spec = target.spec
    kept = special_ids(target.tokenizer, spec.eos_token_ids, spec.vocab_size) if always_keep is None else always_keep
    return InContextHead(target, size, kept, lm_head=model.lm_head_weight(target))


HEADS: dict[str, Callable[..., Head]] = {
    "full": _full,
    "speculative": _speculative,
    "static": _static,
    "low_rank": _low_rank,
    "cluster": _cluster,
    "in_context": _in_context,
}


def build_head(kind: str, target: Target, model: SpecVocabDraft, **options: Any) -> Head:
    """Make the head called ``kind`` for a draft and its target.

    Args:
        options: what this kind needs beside them: the keywords of its line in ``HEADS``.

    Raises:
        ConfigError: the kind is not in ``HEADS``, or the draft lacks what it needs.
    """
    if kind not in HEADS:
        raise ConfigError(f"head {kind!r} is not known; choose one of {', '.join(HEADS)}")
    return HEADS[kind](target, model, **options)

"""Heads: from the draft's normalised output to logits over some of the target's tokens.

To add one, write a class with the signature of ``Head`` and give it a line in ``HEADS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specvocab_model.config import ConfigError
from specvocab_model.heads.base import Head, HeadOutput
from specvocab_model.heads.full import FullHead
from specvocab_model.heads.speculative import SpeculativeHead

if TYPE_CHECKING:
    from specvocab_model.draft import SpecVocabDraft
    from specvocab_model.target import Target

__all__ = ["HEADS", "FullHead", "Head", "HeadOutput", "SpeculativeHead", "build_head"]


def _full(target: Target, model: SpecVocabDraft) -> Head:
    return FullHead(target)


def _speculative(target: Target, model: SpecVocabDraft) -> Head:
    if model.speculator is None:
        raise ConfigError("the draft has no vocabulary speculator; use head 'full', or add one with scripts/convert.py")
    return SpeculativeHead(target, model.speculator)


HEADS: dict[str, Callable[[Target, SpecVocabDraft], Head]] = {"full": _full, "speculative": _speculative}


def build_head(kind: str, target: Target, model: SpecVocabDraft) -> Head:
    """Make the head called ``kind`` for a draft and its target.

    Raises:
        ConfigError: the kind is not in ``HEADS``, or the draft lacks what it needs.
    """
    if kind not in HEADS:
        raise ConfigError(f"head {kind!r} is not known; choose one of {', '.join(HEADS)}")
    return HEADS[kind](target, model)

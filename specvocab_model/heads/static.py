"""A fixed subset of the vocabulary, the same at every step.

``OwnHead`` is EAGLE-3's: an output embedding of the draft's own over the most frequent tokens of its training data,
trained with it against the target's distribution renormalised over the subset. Rows of the target's ``lm_head`` may
take its place after a training with the full vocabulary, chosen by the frequencies of a general corpus (FR-Spec) or of
the target's own answers (VocabTrim): see ``prune``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from specvocab_model.config import ConfigError, HeadConfig
from specvocab_model.heads.base import Head, HeadOutput
from specvocab_model.vocab import VocabMap

if TYPE_CHECKING:
    from specvocab_model.draft import SpecVocabDraft
    from specvocab_model.target import Target


class OwnHead(nn.Module):
    """Output embedding ``weight`` ``[D, d]`` over the target's tokens ``ids``, int64 ``[D]``, ascending."""

    ids: Tensor

    def __init__(self, hidden_size: int, vocab: VocabMap) -> None:
        super().__init__()
        self.vocab_size = vocab.vocab_size
        self.weight = nn.Parameter(torch.zeros(len(vocab), hidden_size))
        self.register_buffer("ids", vocab.ids.clone())  # a buffer: it belongs to the weights, in every checkpoint

    @classmethod
    def of_size(cls, hidden_size: int, size: int, vocab_size: int) -> OwnHead:
        """Of the first ``size`` tokens: a place for others that are chosen or loaded later."""
        return cls(hidden_size, VocabMap(torch.arange(min(size, vocab_size)), vocab_size))  # also on the device meta

    @property
    def is_full(self) -> bool:
        """Whether it covers the whole vocabulary, in the place of the target's ``lm_head``."""
        return len(self.ids) == self.vocab_size

    @property
    def vocab(self) -> VocabMap:
        return VocabMap(self.ids.cpu(), self.vocab_size)

    @torch.no_grad()
    def initialise(self, vocab: VocabMap, lm_head_weight: Tensor) -> None:
        """Take the tokens of ``vocab`` and start from their rows of the target's ``lm_head`` [V, d].

        Raises:
            ValueError: the vocabulary has another size than this head.
        """
        if len(vocab) != len(self.ids) or vocab.vocab_size != self.vocab_size:
            raise ValueError(f"a head over {len(self.ids)} of {self.vocab_size} tokens cannot take a vocabulary of "
                             f"{len(vocab)} of {vocab.vocab_size}")
        self.ids.copy_(vocab.ids)
        self.weight.copy_(lm_head_weight[self.ids.to(lm_head_weight.device)])


class StaticHead(Head):
    """Logits of a fixed subset.

    Args:
        target: owner of the scale and the soft-cap.
        vocab: the subset.
        weight: ``[D, d]``, one row for each of its tokens; by default those of the target's ``lm_head``.

    Raises:
        ConfigError: the subset is of a vocabulary of another size.
    """

    def __init__(self, target: Target, vocab: VocabMap, weight: Tensor | None = None) -> None:
        if vocab.vocab_size != target.spec.vocab_size:
            raise ConfigError(
                f"the draft vocabulary is part of {vocab.vocab_size} tokens, but {target.spec.name} has "
                f"{target.spec.vocab_size}; use the target that the draft was made for"
            )
        self.target, self.vocab = target, vocab
        lm_head = target.lm_head_weight
        ids = vocab.ids.to(lm_head.device)
        self.weight = (lm_head[ids] if weight is None else weight.to(lm_head)).detach()
        self.ids = ids.int()[None]

    def __call__(self, hidden: Tensor) -> HeadOutput:
        """Logits ``[N, D]`` of normalised hidden states ``[N, d]``."""
        logits = linear(hidden.to(self.weight.dtype), self.weight).float()
        return HeadOutput(self.ids.expand(len(hidden), -1), self.target.scale_and_cap(logits))


def prune(model: SpecVocabDraft, lm_head_weight: Tensor, vocab: VocabMap) -> None:
    """Give a draft that was trained with the full vocabulary a static head in place, of rows of ``lm_head`` [V, d].

    Which tokens is the caller's choice, made by ``vocab.most_frequent`` of counts: those of a general corpus give
    FR-Spec, those of the target's own answers VocabTrim. A speculator, which does not fit a reduced head, is dropped.
    """
    model.own_head = OwnHead(lm_head_weight.shape[1], vocab).to(lm_head_weight)
    model.own_head.initialise(vocab, lm_head_weight)
    model.speculator = None
    model.head_config = HeadConfig(type="static", draft_vocab_size=len(vocab))


def write_token_map(path: str | Path, vocab: VocabMap) -> None:
    """FR-Spec's token map as SGLang reads it (``--speculative-token-map``): a list of ids, saved with torch.

    SGLang takes rows of the target's head by it for an EAGLE draft; an EAGLE-3 draft brings ``d2t`` in its checkpoint.
    """
    torch.save(vocab.ids.tolist(), path)

"""A reduced draft vocabulary: which of the target's tokens a static head may name, and how that is written down.

EAGLE-3 (Li et al. 2025, https://arxiv.org/abs/2503.01840) trains a head over the most frequent tokens of its training
data, FR-Spec (Zhao et al. 2025, https://arxiv.org/abs/2502.14856) and VocabTrim (Goel et al. 2025,
https://arxiv.org/abs/2506.22694) keep rows of a finished one, chosen by the frequencies of a general corpus or of the
target's own answers. All of them need the same three things: counts, a choice, and the map between the two numberings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specvocab_model.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, eq=False)
class VocabMap:
    """Row ``i`` of a reduced head stands for the target's token ``ids[i]``.

    Make one with ``from_ids``, ``from_tensors`` or ``most_frequent``, which check what this class relies on.
    """

    ids: Tensor  # int64 [D], ascending, each once, on the CPU
    vocab_size: int  # V, rows of the target's lm_head

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def from_ids(cls, ids: Iterable[int] | Tensor, vocab_size: int) -> VocabMap:
        """Any order; an id given twice is kept once.

        Raises:
            ConfigError: there is none, or one lies outside the vocabulary.
        """
        kept = (ids if isinstance(ids, Tensor) else torch.tensor(list(ids), dtype=torch.int64)).cpu().long().unique()
        if not len(kept):
            raise ConfigError("a draft vocabulary of no token can draft nothing; keep at least one id")
        for extreme in (int(kept[0]), int(kept[-1])):
            if not 0 <= extreme < vocab_size:
                raise ConfigError(f"token id {extreme} of the draft vocabulary lies outside the target's vocabulary of "
                                  f"{vocab_size}; take ids of this target's tokenizer")
        return cls(kept, vocab_size)

    @classmethod
    def from_tensors(cls, d2t: Tensor, t2d: Tensor, where: str = "the checkpoint") -> VocabMap:
        """The inverse of ``d2t`` and ``t2d``.

        Raises:
            ConfigError: they are of other types, contradict each other, or describe no ascending subset.
        """
        fix = "a reduced head cannot be placed without them: export or convert the draft again"
        if d2t.dtype != torch.int64 or t2d.dtype != torch.bool or d2t.ndim != 1 or t2d.ndim != 1 or not len(d2t):
            raise ConfigError(f"{where}: d2t must be int64 [D] and t2d bool [V], not {d2t.dtype} {list(d2t.shape)} and "
                              f"{t2d.dtype} {list(t2d.shape)}; {fix}")
        d2t, t2d = d2t.cpu(), t2d.cpu()
        kept = t2d.nonzero()[:, 0]
        ids = torch.arange(len(d2t)) + d2t
        if not torch.equal(ids, kept):
            raise ConfigError(f"{where}: d2t (offsets: target id = i + d2t[i]) names {len(ids)} tokens from id "
                              f"{int(ids.min())} to {int(ids.max())}, which are not the {len(kept)} that t2d marks, in "
                              f"ascending order; {fix}")
        return cls(kept, len(t2d))

    @property
    def d2t(self) -> Tensor:
        """Offsets, int64 [D]: the target's id of row ``i`` is ``i + d2t[i]``."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> Tensor:
        """Whether each of the target's tokens is kept, bool [V]."""
        kept = torch.zeros(self.vocab_size, dtype=torch.bool)
        kept[self.ids] = True
        return kept

    @property
    def rows(self) -> Tensor:
        """The row of each of the target's tokens, int64 [V]; −1 where it is not kept."""
        rows = torch.full((self.vocab_size,), -1)
        rows[self.ids] = torch.arange(len(self.ids))
        return rows


def most_frequent(counts: Tensor, size: int, always_keep: Iterable[int]) -> VocabMap:
    """The tokens to keep: ``always_keep``, then the most frequent, of equally frequent ones the smallest ids.

    Args:
        counts: int64 [V], how often each token occurs; those that never do come last.
        size: ``D``, with ``always_keep`` among them; from ``V`` on everything is kept.
        always_keep: ids, usually of ``special_ids``.

    Raises:
        ConfigError: nothing was counted, ``size`` has no room for ``always_keep``, or one of these is no token.
    """
    vocab_size = len(counts)
    if not int(counts.sum()):
        raise ConfigError("no token was counted, so none is frequent; give data with supervised tokens")
    if size >= vocab_size:
        return VocabMap.from_ids(torch.arange(vocab_size), vocab_size)
    special = sorted(set(always_keep))
    if size < max(len(special), 1):
        raise ConfigError(f"a draft vocabulary of {size} has no room for the {len(special)} special tokens, which are "
                          f"always kept; raise it to at least {max(len(special), 1)}")
    first = VocabMap.from_ids(special, vocab_size).ids if special else torch.empty(0, dtype=torch.int64)
    ranked = torch.argsort(counts.cpu(), descending=True, stable=True)
    others = ranked[~torch.isin(ranked, first)]
    return VocabMap.from_ids(torch.cat([first, others[: size - len(first)]]), vocab_size)


def special_ids(
    tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int], vocab_size: int
) -> list[int]:
    """Tokens that no head may lose: special and end tokens, and the added ones that the chat template writes.

    A head without an end token drafts past the end of every answer, and the tokens of a template (``<think>``,
    ``<tool_call>``) are rare, fully predictable, and not always marked as special. Added tokens that are neither
    (Gemma has thousands of unused ones) are left to their frequency.

    Returns:
        Ascending ids below ``vocab_size``: a tokenizer may name some that ``lm_head`` has no row for.
    """
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else "".join((template or {}).values())
    added = tokenizer.added_tokens_decoder.items()
    marked = [token_id for token_id, token in added if token.special or token.content in text]
    return sorted(i for i in {*marked, *tokenizer.all_special_ids, *eos_token_ids} if i < vocab_size)


def count_ids(chunks: Iterable[np.ndarray], vocab_size: int) -> Tensor:
    """How often each token occurs, int64 [V]; only one chunk of ids is held at a time.

    Raises:
        ConfigError: an id lies outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for ids in chunks:
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ConfigError(f"token ids from {ids.min()} to {ids.max()} do not fit the target's vocabulary of "
                              f"{vocab_size}; count text of this target's tokenizer")
        counts += np.bincount(ids, minlength=vocab_size)
    return torch.from_numpy(counts)

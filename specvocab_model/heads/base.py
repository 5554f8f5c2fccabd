"""What a head returns and what it must look like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Draft logits of ``N`` positions over the support of the head.

    ``ids`` is int32 ``[N, k]``, the target's token id of every column, distinct within a row; ``None`` when the columns
    are the whole vocabulary in order. ``logits`` is fp32 ``[N, k]``; every token outside the support has probability 0.
    """

    ids: Tensor | None
    logits: Tensor

    def greedy_tokens(self) -> Tensor:
        """The most probable token of every position, int64 ``[N]``, as target ids."""
        columns = self.logits.argmax(-1, keepdim=True)
        return (columns if self.ids is None else self.ids.gather(-1, columns).long()).squeeze(-1)

    def dense_logits(self, vocab_size: int) -> Tensor:
        """Logits ``[N, V]`` over the whole vocabulary, −inf outside the support."""
        if self.ids is None:
            return self.logits
        dense = self.logits.new_full((self.logits.shape[0], vocab_size), -torch.inf)
        return dense.scatter_(-1, self.ids.long(), self.logits)


class Head(ABC):
    """Turns normalised draft output ``[N, d]`` into logits over some of the target's tokens.

    Decoding also tells a head what it is used for. Most heads look at the hidden state alone and need not listen.
    """

    @abstractmethod
    def __call__(self, hidden: Tensor) -> HeadOutput: ...

    def top_n(self, hidden: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The ``n`` likeliest tokens of hidden states ``[N, d]``, best first: ids and log-probabilities, ``[N, n]``."""
        output = self(hidden)
        log_probs, columns = output.logits.log_softmax(-1).topk(n)
        return (columns if output.ids is None else output.ids.gather(-1, columns)), log_probs

    def begin(self, input_ids: Tensor) -> None:  # noqa: B027
        """A sequence begins.

        Args:
            input_ids: int64 ``[T]``, its prompt.
        """

    def verified(self, token_ids: Tensor, target_logits: Tensor) -> None:  # noqa: B027
        """The text grew by ``token_ids``: accepted drafts and the target's own token after them, or those up to an EOS.

        Args:
            token_ids: int64 ``[m]``.
            target_logits: ``[m, V]``, the target's at the position that each was judged or drawn from.
        """

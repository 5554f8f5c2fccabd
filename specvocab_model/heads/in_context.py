"""The tokens of the text at hand, without any training (in the manner of MicroSpec and NanoSpec).

What comes next has mostly been seen before: in the context, among the target's likeliest tokens of the last positions,
or among the draft's own. The head keeps the ``size`` tokens that were seen last.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from specvocab_model.config import ConfigError
from specvocab_model.heads.base import Head, HeadOutput

if TYPE_CHECKING:
    from specvocab_model.target import Target

NUM_TOP = 16  # likeliest tokens of a position that count as seen
ALWAYS = 2**62  # later than any time


class InContextHead(Head):
    """Exact logits for the tokens seen last; filled up with the smallest ids, which are the frequent ones of a BPE.

    Seen are the tokens of the text, and at every verified position the ``num_top`` likeliest of the target and of the
    draft (of those that it could name). The choice changes once a round, when tokens have been verified.

    Args:
        size: tokens at every position, those that are always kept among them; from ``V`` on it is all.
        always_keep: ids, usually of ``vocab.special_ids``.
        lm_head: the draft's own output embedding ``[V, d]``; by default the target's.

    Raises:
        ConfigError: ``size`` has no room for ``always_keep``.
    """

    def __init__(
        self,
        target: Target,
        size: int,
        always_keep: Iterable[int],
        num_top: int = NUM_TOP,
        lm_head: Tensor | None = None,
    ) -> None:
        device, vocab_size = target.device, target.spec.vocab_size
        self.target = target
        self.lm_head = (target.lm_head_weight if lm_head is None else lm_head).detach()
        self.size, self.num_top = min(size, vocab_size), min(num_top, vocab_size)
        self.always_keep = torch.tensor(sorted(set(always_keep)), dtype=torch.int64, device=device)
        if self.size <= len(self.always_keep):
            raise ConfigError(f"size={size} must be above the {len(self.always_keep)} tokens that are always kept")
        self.unseen = -1 - torch.arange(vocab_size, device=device)  # all before time 0; of these the smallest id last
        self.unseen[self.always_keep] = ALWAYS
        self.begin(self.always_keep[:0])

    @torch.no_grad()
    def begin(self, input_ids: Tensor) -> None:
        self.seen_at, self.now = self.unseen, 0  # [V]
        self._see(input_ids)
        self._choose()

    @torch.no_grad()
    def verified(self, token_ids: Tensor, target_logits: Tensor) -> None:
        likeliest = target_logits.topk(self.num_top).indices.flip(-1)  # the likeliest last, and then the token itself
        self._see(torch.cat([likeliest, token_ids[:, None]], -1).flatten())
        self._choose()

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> HeadOutput:
        """Logits ``[N, size]`` of normalised hidden states ``[N, d]``."""
        logits = self.target.scale_and_cap(linear(hidden.to(self.weight.dtype), self.weight).float())
        self._see(self.ids[logits.topk(min(self.num_top, self.size)).indices.flip(-1)].flatten())
        return HeadOutput(self.ids.int().expand(len(hidden), -1), logits)

    def _see(self, token_ids: Tensor) -> None:
        """Note ``token_ids`` [m], the last of them as the latest."""
        times = self.now + torch.arange(len(token_ids), device=self.seen_at.device)
        self.seen_at = self.seen_at.scatter_reduce(0, token_ids, times, "amax")
        self.now += len(token_ids)

    def _choose(self) -> None:
        self.ids = self.seen_at.topk(self.size).indices.sort().values
        self.weight = self.lm_head[self.ids]

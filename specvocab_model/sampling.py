"""Choosing tokens: from logits, and from drafts without changing the target's distribution.

Speculative sampling (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023,
https://arxiv.org/abs/2302.01318): a draft ``x ~ q`` is accepted with probability ``min(1, p(x) / q(x))``; after the
first rejection the token is drawn from ``max(p - q, 0)``, normalised. What comes out is distributed as ``p`` for any
``q``, so ``q`` may be zero outside the candidates of a head. Probabilities are fp64: the rule subtracts and divides
numbers that are nearly equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specvocab_model.config.checks import temperature as check_temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; the filters apply in the order of transformers: temperature, top-k, top-p.

    ``temperature`` 0 is greedy, ``top_k`` 0 and ``top_p`` 1 are off. Tokens of equal logits are kept or dropped
    together, so that no order among them decides.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_temperature("temperature", self.temperature)
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (off) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that is sampled from.

        Args:
            logits: [N, V]; −inf is probability 0.

        Returns:
            fp64 [N, V].

        Raises:
            ValueError: sampling is greedy, which is no distribution.
        """
        if self.greedy:
            raise ValueError("temperature=0 has no distribution; take the argmax")
        if 0 < self.top_k < logits.shape[-1]:
            smallest_kept = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
        if self.top_p < 1:
            logits = logits.masked_fill(logits < self._smallest_of_nucleus(logits), -torch.inf)
        return self._softmax(logits)

    def _smallest_of_nucleus(self, logits: Tensor) -> Tensor:
        """The smallest logit that top-p keeps [N, 1]: in front of it there is less mass than ``top_p``.

        The logits are sorted as they come: on a GPU, the radix sort of fp32 takes half the passes of their fp64
        probabilities'.
        """
        ordered = logits.sort(descending=True).values
        cumulative = self._softmax(ordered).cumsum(-1)
        last = torch.searchsorted(cumulative, torch.full_like(cumulative[..., :1], self.top_p))
        return ordered.gather(-1, last.clamp_max(logits.shape[-1] - 1))  # rounding may leave all below top_p

    def _softmax(self, logits: Tensor) -> Tensor:
        return (logits.double() / self.temperature).softmax(-1)


def verify_greedy(target_logits: Tensor, draft_ids: Tensor) -> tuple[int, Tensor]:
    """Accept drafts up to the first that is not the target's argmax.

    Args:
        target_logits: [n + 1, V], after the last verified token and after each draft.
        draft_ids: int64 [n].

    Returns:
        The number of accepted drafts and the target's own next token after them, int64 [1].
    """
    choices = target_logits.argmax(-1)
    num_accepted = int((choices[:-1] == draft_ids).cumprod(0).sum())
    return num_accepted, choices[num_accepted : num_accepted + 1]


def verify_sampled(
    target_probs: Tensor, draft_probs: Tensor, draft_ids: Tensor, generator: torch.Generator | None = None
) -> tuple[int, Tensor]:
    """Accept or replace drafts so that the emitted tokens are distributed as the target's.

    Args:
        target_probs: fp64 [n + 1, V], after the last verified token and after each draft.
        draft_probs: fp64 [n, V], what each draft was drawn from.
        draft_ids: int64 [n].
        generator: on the device of the probabilities.

    Returns:
        The number of accepted drafts and the token that follows them, int64 [1].
    """
    uniforms = torch.rand(len(draft_ids), dtype=torch.float64, device=draft_ids.device, generator=generator)
    num_accepted = count_accepted(target_probs, draft_probs, draft_ids, uniforms)
    following = next_distribution(target_probs, draft_probs, num_accepted)
    return num_accepted, torch.multinomial(following, 1, generator=generator)


def count_accepted(target_probs: Tensor, draft_probs: Tensor, draft_ids: Tensor, uniforms: Tensor) -> int:
    """Length of the accepted prefix for given ``uniforms`` [n] in [0, 1); the others as in ``verify_sampled``."""
    columns = draft_ids[:, None]
    target, draft = target_probs[:-1].gather(-1, columns)[:, 0], draft_probs.gather(-1, columns)[:, 0]
    return int((uniforms * draft < target).cumprod(0).sum())


def next_distribution(target_probs: Tensor, draft_probs: Tensor, num_accepted: int) -> Tensor:
    """Distribution [V] of the token after ``num_accepted`` drafts: the residual, or the target's own after all."""
    target = target_probs[num_accepted]
    if num_accepted == len(draft_probs):
        return target
    residual = (target - draft_probs[num_accepted]).clamp_min(0)
    mass = residual.sum()
    # p = q up to rounding leaves no residual; a rejection then has probability of the order of the rounding itself.
    return torch.where(mass > 0, residual / mass, target)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index for each row: where the cumulative weights pass the share ``uniforms`` of their sum.

    Takes no generator, so that a captured graph can draw, and a third of multinomial's time, which draws V numbers.

    Args:
        weights: fp64 [.., V], not negative and not all 0; need not sum to 1.
        uniforms: fp64 [..] in [0, 1).

    Returns:
        int64 [..]; never an index of weight 0.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[..., -1:]
    # Rounding up to the whole sum would point behind the last index of positive weight.
    wanted = torch.minimum(uniforms[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted, right=True)[..., 0]

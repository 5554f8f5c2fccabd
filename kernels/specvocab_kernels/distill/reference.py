"""The distillation objective in plain, differentiable torch: the definition that every faster path is tested against.

Everything is materialised, ``[S, N, V]`` included, so this is for tests and for reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

LK_HYBRID_DECAY = 3.0
LOG_FLOOR = -1e4  # log-probability given to ids that the teacher rules out, so that reverse KL stays finite


@dataclass(frozen=True, slots=True)
class DistillStats:
    """Per-position measurements. All are [S, N] and without gradient; ids are compared by value, never sampled."""

    loss: Tensor  # the named loss of the student
    aux_loss: Tensor  # the same of the speculator; 0 without one
    correct: Tensor  # bool: the student's argmax is the teacher's
    target_rank: Tensor  # int: ids that the speculator scores strictly above the teacher's argmax; 0 without one
    draft_rank: Tensor  # int: ... above the student's argmax
    acceptance: Tensor  # sum over the vocabulary of min(teacher, student) probability
    entropy: Tensor  # of the teacher, nats

    @classmethod
    def empty(cls, shape: tuple[int, int], device: torch.device) -> DistillStats:
        """Outputs pre-filled so that a position nobody writes shows (NaN, -1)."""
        integer = {"target_rank", "draft_rank"}

        def blank(name: str) -> Tensor:
            if name == "correct":
                return torch.zeros(shape, dtype=torch.bool, device=device)
            if name in integer:
                return torch.full(shape, -1, dtype=torch.int64, device=device)
            return torch.full(shape, float("nan"), dtype=torch.float32, device=device)

        return cls(**{entry.name: blank(entry.name) for entry in fields(cls)})


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q): the cross-entropy of the student under the teacher, less the teacher's entropy."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p)."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Jensen-Shannon divergence: the mean KL of p and of q to their mixture."""
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, dtype=log_p.dtype))
    return 0.5 * (forward_kl(log_p, log_m) + forward_kl(log_q, log_m))


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Probability that speculative sampling keeps a token drawn from q (Leviathan et al. 2023): sum of min(p, q)."""
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation distance, which is 1 - acceptance."""
    return 1.0 - acceptance(log_p, log_q)


def lk(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log acceptance: maximises the acceptance probability itself, with KL-sized gradients while it is small."""
    return -acceptance(log_p, log_q).clamp_min(torch.finfo(log_p.dtype).tiny).log()


def lk_hybrid(log_p: Tensor, log_q: Tensor) -> Tensor:
    """w KL(p || q) + (1 - w) TV with w = exp(-3 acceptance), per position: KL far from the teacher, TV close to it."""
    weight = (-LK_HYBRID_DECAY * acceptance(log_p, log_q)).exp().detach()
    return weight * forward_kl(log_p, log_q) + (1.0 - weight) * tv(log_p, log_q)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}


def cap_logits(raw: Tensor, scale: float, softcap: float | None) -> Tensor:
    """A model's final logits from the bare product: scaled, then soft-capped as in Gemma 2 (``c * tanh(x / c)``)."""
    scaled = raw if scale == 1.0 else raw * scale
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)


def distill_reference(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    lm_head: Tensor,
    down_proj: Tensor | None,
    vocab_proj: Tensor | None,
    weight: Tensor,
    *,
    student_head: Tensor | None = None,
    loss: str = "forward_kl",
    aux_weight: float = 0.1,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    temperature: float = 1.0,
    num_tiles: int = 1,
) -> tuple[Tensor, DistillStats]:
    """See ``distill``. Computes in the dtype of its inputs (pass float64 for truth)."""

    def log_probs(raw: Tensor) -> Tensor:
        return torch.log_softmax(cap_logits(raw, logit_scale, logit_softcap) / temperature, -1).clamp_min(LOG_FLOOR)

    log_p = log_probs(teacher_hidden @ lm_head.mT).detach()  # [N, V]
    log_q = log_probs(student_hidden @ (lm_head if student_head is None else student_head).mT)  # [S, N, V]
    losses = LOSSES[loss](log_p, log_q)
    teacher_top, student_top = log_p.argmax(-1), log_q.argmax(-1)
    aux_losses, target_rank, draft_rank = torch.zeros_like(losses), torch.zeros_like(student_top), None
    if down_proj is not None and vocab_proj is not None:
        approximate = student_hidden @ down_proj.mT @ vocab_proj.mT
        aux_losses = LOSSES[loss](log_p, log_probs(approximate))

        def rank(ids: Tensor) -> Tensor:
            of_tile = torch.arange(lm_head.shape[0], device=ids.device) % num_tiles == ids[..., None] % num_tiles
            return (of_tile & (approximate > approximate.gather(-1, ids[..., None]))).sum(-1)

        target_rank, draft_rank = rank(teacher_top.expand_as(student_top)), rank(student_top)
    stats = DistillStats(
        loss=losses.detach(),
        aux_loss=aux_losses.detach(),
        correct=student_top == teacher_top,
        target_rank=target_rank,
        draft_rank=torch.zeros_like(student_top) if draft_rank is None else draft_rank,
        acceptance=acceptance(log_p, log_q).detach(),
        entropy=-(log_p.exp() * log_p).sum(-1).expand_as(losses),
    )
    used = weight > 0  # a position of weight 0 contributes nothing, whatever its logits
    return (weight * torch.where(used, losses + aux_weight * aux_losses, 0.0)).sum(), stats

"""Each named loss with its gradient in the logits, written out by hand and in place where it can be.

``reference.LOSSES`` defines the losses; here ``q = softmax(z)`` and every gradient is taken in ``z``. The chunked
path spends its time in these elementwise passes, so ``forward_kl``, the default, makes as few of them as possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specvocab_kernels.distill.reference import LK_HYBRID_DECAY, LOG_FLOOR


@dataclass(frozen=True, slots=True)
class Teacher:
    """The teacher's distribution for one chunk of rows, computed once and shared by all unroll steps."""

    p: Tensor  # [C, V] fp32
    log_p: Tensor | None  # [C, V]; None for losses that do not read it
    entropy: Tensor  # [C]
    top: Tensor  # [C] argmax

    @classmethod
    def from_logits(cls, logits: Tensor, needs_log: bool) -> Teacher:
        """``logits`` [C, V] fp32, final (scaled and capped); overwritten."""
        p = torch.softmax(logits, -1)
        top = logits.argmax(-1)
        # log p = z - lse. Measured from the maximum, lse = -log p_top, and large logits lose nothing to rounding.
        logits.sub_(logits.gather(-1, top[:, None])).clamp_min_(torch.finfo(logits.dtype).min)
        lse = -p.gather(-1, top[:, None]).log()
        entropy = lse[:, 0] - _dot(p, logits)
        return cls(p, logits.sub_(lse).clamp_min_(LOG_FLOOR) if needs_log else None, entropy, top)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise dot product [C, V], [C, V] -> [C] without a [C, V] temporary."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]


def forward_kl(teacher: Teacher, z: Tensor) -> tuple[Tensor, Tensor]:
    """dz = q - p."""
    q = torch.softmax(z, -1)
    lse = z.amax(-1) - q.amax(-1).log()
    return lse - _dot(teacher.p, z) - teacher.entropy, q.sub_(teacher.p)


def reverse_kl(teacher: Teacher, z: Tensor) -> tuple[Tensor, Tensor]:
    """dz = q (log q - log p - KL)."""
    assert teacher.log_p is not None
    log_q = torch.log_softmax(z, -1).clamp_min_(LOG_FLOOR)
    q, ratio = log_q.exp(), log_q.sub_(teacher.log_p)
    value = _dot(q, ratio)
    return value, ratio.sub_(value[:, None]).mul_(q)


def jsd(teacher: Teacher, z: Tensor) -> tuple[Tensor, Tensor]:
    """dz = q (log(q / m) - KL(q || m)) / 2 with m = (p + q) / 2."""
    log_q = torch.log_softmax(z, -1).clamp_min_(LOG_FLOOR)
    assert teacher.log_p is not None
    log_m = torch.logaddexp(teacher.log_p, log_q).sub_(torch.log(torch.tensor(2.0)).item())
    q = log_q.exp()
    from_p, ratio = _dot(teacher.p, teacher.log_p - log_m), log_q.sub_(log_m)
    from_q = _dot(q, ratio)
    return 0.5 * (from_p + from_q), ratio.sub_(from_q[:, None]).mul_(q).mul_(0.5)


def _acceptance(teacher: Teacher, q: Tensor) -> tuple[Tensor, Tensor]:
    """a = sum min(p, q), and da/dz = q (1[q < p] - sum of q where q < p)."""
    below = q < teacher.p
    kept = q * below
    mass = kept.sum(-1)
    accept = mass + torch.where(below, 0.0, teacher.p).sum(-1)
    return accept, kept.sub_(q * mass[:, None])


def tv(teacher: Teacher, z: Tensor) -> tuple[Tensor, Tensor]:
    """dz = -da/dz."""
    accept, slope = _acceptance(teacher, torch.softmax(z, -1))
    return 1.0 - accept, slope.neg_()


def lk(teacher: Teacher, z: Tensor) -> tuple[Tensor, Tensor]:
    """dz = -(da/dz) / a."""
    accept, slope = _acceptance(teacher, torch.softmax(z, -1))
    accept = accept.clamp_min(torch.finfo(z.dtype).tiny)
    return -accept.log(), slope.div_(-accept[:, None])


def lk_hybrid(teacher: Teacher, z: Tensor) -> tuple[Tensor, Tensor]:
    """The weight w = exp(-3 a) is a constant to the gradient."""
    kl, kl_slope = forward_kl(teacher, z)
    accept, slope = _acceptance(teacher, kl_slope + teacher.p)
    weight = (-LK_HYBRID_DECAY * accept).exp()
    value = weight * kl + (1.0 - weight) * (1.0 - accept)
    return value, kl_slope.mul_(weight[:, None]).sub_(slope.mul_(1.0 - weight[:, None]))


GRADIENTS: dict[str, Callable[[Teacher, Tensor], tuple[Tensor, Tensor]]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}
NEEDS_LOG = frozenset({"reverse_kl", "jsd"})

"""The candidate ids of a speculated vocabulary: the largest approximate logits of each row."""

from torch import Tensor

from specvocab_kernels._impl import choose_impl
from specvocab_kernels.select_candidates.reference import select_candidates_torch

__all__ = ["select_candidates"]


def select_candidates(scores: Tensor, k: int, impl: str = "auto") -> Tensor:
    """Return the ids of the ``k`` largest scores of each row, a set: their order means nothing.

    Ids are unique within a row and in range whatever the scores are. Among equal scores at the boundary torch chooses;
    the choice is repeatable but may differ between devices. NaN counts as larger than every number, so a NaN is
    selected and shows in the exact logits instead of passing unseen; −inf is selected only when nothing else is left.

    Args:
        scores: ``[B, V]`` floating, approximate logits; ``B = 0`` is allowed.
        k: candidates per row; more than ``V`` means all of them.
        impl: ``"auto"`` or ``"torch"``; there is no Triton kernel for this operation.

    Returns:
        ``[B, min(k, V)]`` int64.

    Raises:
        ValueError: ``scores`` is not a floating ``[B, V]`` with ``V >= 1``, ``k < 1``, or ``impl`` cannot run here.
    """
    if scores.dim() != 2 or scores.shape[1] < 1 or not scores.is_floating_point():
        raise ValueError(f"select_candidates: needs floating scores [B, V], got {scores.dtype} {list(scores.shape)}")
    if k < 1:
        raise ValueError(f"select_candidates: k={k} must be at least 1")
    choose_impl("select_candidates", impl, scores.device, has_kernel=False)
    return select_candidates_torch(scores, k)

"""The candidate ids of a speculated vocabulary: the largest approximate logits of each row."""

import torch
from torch import Tensor

from specvocab_kernels._impl import choose_impl
from specvocab_kernels.select_candidates.reference import select_candidates_torch

__all__ = ["select_candidates"]

MAX_TRITON_ROWS = 256  # made for decoding; a training batch of scores is left to torch
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def select_candidates(scores: Tensor, k: int, impl: str = "auto") -> Tensor:
    """Return the ids of the ``k`` largest scores of each row, a set: their order means nothing.

    Ids are unique within a row and in range whatever the scores are. Among equal scores at the boundary the Triton
    kernel takes the lowest ids, and torch chooses: repeatably, but perhaps differently on another device. NaN counts
    as larger than every number, so a NaN is selected and shows in the exact logits instead of passing unseen; −inf is
    selected only when nothing else is left.

    Args:
        scores: ``[B, V]`` floating, approximate logits; ``B = 0`` is allowed.
        k: candidates per row; more than ``V`` means all of them.
        impl: ``"auto"``, ``"triton"`` (float32, bfloat16 or float16) or ``"torch"``, see ``choose_impl``; ``"auto"``
            leaves more than 256 rows to torch.

    Returns:
        ``[B, min(k, V)]`` int64.

    Raises:
        ValueError: ``scores`` is not a floating ``[B, V]`` with ``V >= 1``, ``k < 1``, or ``impl`` cannot run here.
    """
    if scores.dim() != 2 or scores.shape[1] < 1 or not scores.is_floating_point():
        raise ValueError(f"select_candidates: needs floating scores [B, V], got {scores.dtype} {list(scores.shape)}")
    if k < 1:
        raise ValueError(f"select_candidates: k={k} must be at least 1")
    if impl == "triton" and scores.dtype not in DTYPES:
        raise ValueError(f"select_candidates: impl='triton' needs float32, bfloat16 or float16, got {scores.dtype}")
    if impl == "auto" and (scores.shape[0] > MAX_TRITON_ROWS or scores.dtype not in DTYPES):
        impl = "torch"
    if choose_impl("select_candidates", impl, scores.device) == "torch":
        return select_candidates_torch(scores, k)
    from specvocab_kernels.select_candidates.kernel import select_candidates_triton

    return select_candidates_triton(scores if scores.stride(1) == 1 else scores.contiguous(), k).long()

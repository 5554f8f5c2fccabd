"""The inference head of a speculated vocabulary: candidates and their exact logits, in one operation.

Approximate logits ``s = vocab_proj(down_proj(h))`` choose the candidates, and ``lm_head[ids] · h`` are their exact
logits. With a ``TileSelection`` one kernel does both, tile by tile, and no ``[B, V]`` tensor exists.

    weights = HeadWeights.build(lm_head, down_proj, vocab_proj, TileSelection(vocab_size, tile=256, keep=1), "fp8")
    ids, logits = vocab_head(hidden, weights)                    # [B, k], [B, k]
    ids, log_probs = vocab_head_top_n(hidden, weights, n=10)     # [B, 10], [B, 10], best first
"""

from __future__ import annotations

import torch
from torch import Tensor

from specvocab_kernels._impl import HAS_TRITON, choose_impl
from specvocab_kernels.gather_dot import gather_dot
from specvocab_kernels.vocab_head.dispatch import full_head_is_faster
from specvocab_kernels.vocab_head.reference import (
    approximate_logits,
    best_of_rows,
    top_n_torch,
    vocab_head_torch,
)
from specvocab_kernels.vocab_head.selection import ExactSelection, Selection, TileSelection
from specvocab_kernels.vocab_head.weights import FLOATS, HeadWeights, dequantize_vocab_proj, quantize_vocab_proj

__all__ = [
    "ExactSelection",
    "HeadWeights",
    "Selection",
    "TileSelection",
    "approximate_logits",
    "dequantize_vocab_proj",
    "quantize_vocab_proj",
    "vocab_head",
    "vocab_head_top_n",
]

MAX_TOP_N = 64
IMPLS = ("auto", "candidates", "triton", "torch", "full")


def vocab_head(
    hidden: Tensor,
    weights: HeadWeights,
    *,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    shared: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Candidate ids and their exact logits ``softcap · tanh(scale · (lm_head[id] · h) / softcap)``.

    The ids of a row are distinct and in ``[0, V)`` whatever ``hidden`` holds; a hidden state that is not finite gives
    logits that are not finite. Ties between approximate logits go to the lowest id. The order of the candidates is
    fixed: ascending ids with an ``ExactSelection``; tile after tile, the best first, with a ``TileSelection``.

    Args:
        hidden: ``[B, d]`` float32, bfloat16 or float16; ``B = 0`` is allowed.
        weights: see ``HeadWeights``.
        logit_scale, logit_softcap: of the target; None means no cap.
        shared: all rows get the same candidates, chosen by each id's largest approximate logit over the rows. For the
            nodes of one tree: the candidate rows of ``lm_head`` are read once for all nodes.
        impl: ``"triton"``, ``"torch"`` (float32), ``"full"`` (every id, one product with all of ``lm_head``), or
            ``"auto"``: on a GPU ``"triton"``, or ``"full"`` where it was measured to be faster (see ``dispatch``);
            elsewhere ``"torch"``. ``"candidates"`` is the same without ``"full"``: for whoever measures what candidates
            accept. What is taken depends on shapes and dtypes alone.

    Returns:
        ids ``[B, k]`` int32 and logits ``[B, k]`` float32, ``k = weights.selection.num_candidates``, or ``V`` where
        the full head was taken: then ids is one row ``0 … V-1`` expanded to ``B``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or ``impl`` cannot run here.
    """
    _check(hidden, weights, logit_softcap)
    impl = _choose(impl, hidden, weights)
    if impl == "full":
        ids = torch.arange(weights.vocab_size, dtype=torch.int32, device=hidden.device).expand(hidden.shape[0], -1)
        return ids, _scale_and_cap(_full_logits(hidden, weights.lm_head), logit_scale, logit_softcap)
    if impl == "torch":
        ids, logits = vocab_head_torch(hidden, weights, shared)
        return ids.int(), _scale_and_cap(logits, logit_scale, logit_softcap)
    with torch.cuda.device_of(hidden):  # Triton launches on the current device, not on the tensors'
        return _triton(hidden.contiguous(), weights, logit_scale, logit_softcap, shared)


def vocab_head_top_n(
    hidden: Tensor,
    weights: HeadWeights,
    n: int,
    *,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    shared: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The ``n`` best candidates and their log-probabilities over the candidates, best first; see ``vocab_head``.

    Among equal logits the candidate that ``vocab_head`` lists first wins.

    Args:
        n: 1 to 64, and at most the number of candidates.

    Returns:
        ids ``[B, n]`` int32 and log-probabilities ``[B, n]`` float32.

    Raises:
        ValueError: as ``vocab_head``, or ``n`` is out of range.
    """
    if not 1 <= n <= min(MAX_TOP_N, weights.selection.num_candidates):
        raise ValueError(
            f"vocab_head_top_n: n={n} must lie between 1 and {min(MAX_TOP_N, weights.selection.num_candidates)}"
        )
    ids, logits = vocab_head(
        hidden, weights, logit_scale=logit_scale, logit_softcap=logit_softcap, shared=shared, impl=impl
    )
    in_triton = impl == "triton" or (impl != "torch" and HAS_TRITON and hidden.device.type == "cuda")
    if not in_triton or hidden.shape[0] == 0:
        return top_n_torch(ids, logits, n)
    from specvocab_kernels.vocab_head.kernel import top_n_triton

    with torch.cuda.device_of(hidden):
        return top_n_triton(ids, logits.contiguous(), n)


def _triton(
    hidden: Tensor, weights: HeadWeights, logit_scale: float, logit_softcap: float | None, shared: bool
) -> tuple[Tensor, Tensor]:
    from specvocab_kernels.select_candidates.kernel import select_candidates_triton
    from specvocab_kernels.vocab_head import kernel

    batch, selection = hidden.shape[0], weights.selection
    if isinstance(selection, TileSelection):
        ids = torch.empty(batch, selection.num_candidates, dtype=torch.int32, device=hidden.device)
        logits = torch.empty(ids.shape, dtype=torch.float32, device=hidden.device)
        if batch:
            kernel.tile_head(hidden, weights, ids, logits, logit_scale, logit_softcap, shared and batch > 1)
        return ids, logits
    if batch == 0:
        return hidden.new_empty(0, selection.num_candidates, dtype=torch.int32), hidden.new_empty(
            0, selection.num_candidates, dtype=torch.float32
        )
    scores = kernel.approximate_scores(hidden, weights)
    if shared:
        scores = best_of_rows(scores)
    ids = select_candidates_triton(scores, selection.num_candidates)
    if shared:
        ids = ids.repeat(batch, 1)
    return ids, _scale_and_cap(gather_dot(hidden, weights.lm_head, ids, impl="triton"), logit_scale, logit_softcap)


def _choose(impl: str, hidden: Tensor, weights: HeadWeights) -> str:
    if impl not in IMPLS:
        raise ValueError(f"vocab_head: impl={impl!r} is not known; choose one of {', '.join(map(repr, IMPLS))}")
    if impl == "full" or (impl == "auto" and hidden.device.type == "cuda" and full_head_is_faster(weights, hidden)):
        return "full"
    return choose_impl("vocab_head", "auto" if impl == "candidates" else impl, hidden.device)


def _full_logits(hidden: Tensor, lm_head: Tensor) -> Tensor:
    """``[B, V]`` float32; in half precision on a GPU the product is written in float32, not rounded to half."""
    if hidden.dtype == lm_head.dtype != torch.float32 and hidden.device.type == "cuda":
        return torch.mm(hidden, lm_head.t(), out_dtype=torch.float32)
    return hidden.float() @ lm_head.float().t()


def _scale_and_cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _check(hidden: Tensor, weights: HeadWeights, softcap: float | None) -> None:
    if hidden.dim() != 2 or hidden.shape[1] != weights.hidden_size:
        raise ValueError(f"vocab_head: needs hidden [B, {weights.hidden_size}], got {list(hidden.shape)}")
    if hidden.dtype not in FLOATS:
        raise ValueError(f"vocab_head: hidden is {hidden.dtype}; needs float32, bfloat16 or float16")
    if hidden.device != weights.lm_head.device:
        raise ValueError(f"vocab_head: hidden is on {hidden.device}, the weights on {weights.lm_head.device}")
    if hidden.requires_grad and torch.is_grad_enabled():
        raise ValueError("vocab_head: hidden requires grad and there is no backward; call under torch.no_grad()")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"vocab_head: logit_softcap={softcap} must be positive, or None")

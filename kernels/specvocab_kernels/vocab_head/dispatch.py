"""Where all of ``lm_head`` at once is the faster head."""

from __future__ import annotations

import math

from torch import Tensor

from specvocab_kernels.vocab_head.weights import HeadWeights

# Measured on an H200, bfloat16 lm_head, kernels/benchmarks/bench_head.py (docs/PERFORMANCE.md): the largest number of
# rows measured at which candidates beat the full head, for each shape (V, d). The columns: tiles with one candidate
# for 64 ids (rank d/8), for 128 and for 256 (rank d/16), and an exact selection.
MOST_ROWS = {
    (151936, 4096): (64, 64, 128, 10),
    (151936, 2560): (64, 64, 128, 10),
    (100352, 4096): (64, 64, 128, 10),
    (262144, 640): (16, 64, 64, 0),
    (49152, 576): (10, 10, 16, 0),
}


def full_head_is_faster(weights: HeadWeights, hidden: Tensor) -> bool:
    """Looked up for the nearest shape measured, from shapes alone: a captured graph keeps its choice."""
    nearest = min(MOST_ROWS, key=lambda shape: _distance(shape, (weights.vocab_size, weights.hidden_size)))
    dense, medium, sparse, exact = MOST_ROWS[nearest]
    ids_per_candidate = weights.vocab_size / weights.selection.num_candidates
    if not weights.tiled:
        most = exact
    else:
        most = dense if ids_per_candidate < 96 else medium if ids_per_candidate < 192 else sparse
    return hidden.shape[0] > most


def _distance(a: tuple[int, int], b: tuple[int, int]) -> float:
    return sum(abs(math.log(x / y)) for x, y in zip(a, b, strict=True))

"""The inference head against the full head, a fixed 32k head and the published pipeline, in one run.

``full`` multiplies every row of ``lm_head``, ``static`` 32 000 fixed ones; ``low_rank`` is the approximate logits
alone; ``pipeline`` is low-rank product, ``torch.topk``, gather and batched product, all bfloat16 library calls;
``exact``, ``tile`` and ``shared`` are ``vocab_head`` with impl="triton"; ``top10`` is ``vocab_head_top_n`` (n = 10) on
the tile candidates. All include ``down_proj``. ``auto`` names what impl="auto" takes.

    python kernels/benchmarks/bench_head.py --json head.json
    python kernels/benchmarks/bench_head.py --tiny          # seconds, any machine: shows that it runs

On a GPU each figure is the median over replays of one CUDA graph that makes the call with several sets of weights and
hidden states in turn, more of them than fit in the L2 cache: the head comes after the target's and the draft's weights
have passed through it. The floor is the bytes that must move (``down_proj``, ``vocab_proj``, each distinct candidate
row once) at the rate at which a large sum reads in the same run. 10 rows are the nodes of one tree: a common part and
noise, mixed so that their candidates overlap as those of a real tree do (--common, see docs/PERFORMANCE.md); any other
number of rows is independent.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from specvocab_kernels._impl import HAS_TRITON
from specvocab_kernels.timing import median_ms
from specvocab_kernels.vocab_head import ExactSelection, HeadWeights, TileSelection, vocab_head, vocab_head_top_n
from specvocab_kernels.vocab_head.dispatch import full_head_is_faster

# V, d: Qwen3-8B, Qwen3-4B, OLMo-2-7B, Gemma 3 270M, SmolLM2-135M
SHAPES = ((151936, 4096), (151936, 2560), (100352, 4096), (262144, 640), (49152, 576))
TINY_SHAPES = ((1003, 48),)
# d / r, ids of a tile, candidates of a tile
HEADS = ((8, 64, 1), (16, 128, 1), (16, 256, 1))
STATIC_ROWS = 32000
COLD_BYTES = 256_000_000  # several times the L2 cache
TREE_NODES = 10
VARIANTS = ("full", "static", "low_rank", "pipeline", "exact", "tile", "shared", "top10")
COLUMNS = ("vocab", "d", "B", "r", "k", "bits", "full", "static", "low_rank", "pipeline", "exact", "tile", "shared")
COLUMNS += ("top10", "floor", "auto")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Benchmark of the inference head.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, TREE_NODES, 64], help="hidden states B in one call")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8", "int8"], choices=["bf16", "fp8", "int8"])
    parser.add_argument("--shapes", type=int, nargs="+", default=None, help="take only the shapes of these places")
    parser.add_argument("--common", type=float, default=0.85, help="share of variance common to the nodes of a tree")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS, help="time only these")
    parser.add_argument("--repeats", type=int, default=20, help="timed replays; the median counts")
    parser.add_argument("--tiny", action="store_true", help="one small shape, few repetitions")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(argv)
    shapes = TINY_SHAPES if args.tiny else SHAPES
    if args.shapes:
        shapes = tuple(shapes[i] for i in args.shapes)
    repeats = 2 if args.tiny else args.repeats
    device = torch.device(args.device)
    cold_bytes = 1 if args.tiny else COLD_BYTES

    bandwidth = read_bandwidth(1 << (16 if args.tiny else 30 if device.type == "cuda" else 26), device, repeats)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, reads {bandwidth / 1e9:.0f} GB/s; milliseconds")
    print(" ".join(f"{column:>8}" for column in COLUMNS))
    results = []
    for vocab_size, hidden_size in shapes:
        lm_heads = [
            torch.randn(vocab_size, hidden_size, device=device, dtype=torch.bfloat16)
            for _ in range(copies(2 * vocab_size * hidden_size, cold_bytes))
        ]
        plain = {rows: time_plain(lm_heads, rows, args.variants, repeats) for rows in args.rows}
        for divisor, tile, keep in HEADS:
            for precision in args.precisions:
                sets = make_sets(lm_heads, max(1, hidden_size // divisor), tile, keep, precision, cold_bytes)
                for rows in args.rows:
                    result = (
                        measure(sets, rows, args.common, precision, args.variants, bandwidth, repeats) | plain[rows]
                    )
                    results.append({column: result.get(column) for column in COLUMNS} | result)
                    print(" ".join(f"{cell(results[-1][column]):>8}" for column in COLUMNS), flush=True)
        del lm_heads, sets
    if args.json:
        report = dict(device=name, torch=torch.__version__, bytes_per_second=bandwidth, common=args.common)
        args.json.write_text(json.dumps(report | dict(results=results), indent=2) + "\n")


def copies(size: int, cold_bytes: int) -> int:
    return max(1, min(32, -(-cold_bytes // size)))


def make_sets(
    lm_heads: list[torch.Tensor], rank: int, tile: int, keep: int, precision: str, cold_bytes: int
) -> list[tuple[HeadWeights, HeadWeights]]:
    """Pairs of weights with a tile and an exact selection of equally many candidates, enough of them to miss L2."""
    vocab_size, hidden_size = lm_heads[0].shape
    selection = TileSelection(vocab_size, tile, keep)
    exact = ExactSelection(vocab_size, selection.num_candidates)
    count = max(len(lm_heads), copies(vocab_size * rank * (2 if precision == "bf16" else 1), cold_bytes))
    sets = []
    for i in range(count):
        lm_head = lm_heads[i % len(lm_heads)]
        down_proj = torch.randn(rank, hidden_size, device=lm_head.device, dtype=lm_head.dtype) * hidden_size**-0.5
        vocab_proj = torch.randn(vocab_size, rank, device=lm_head.device, dtype=lm_head.dtype)
        quantized = None if precision == "bf16" else precision
        sets.append(
            (
                HeadWeights.build(lm_head, down_proj, vocab_proj, selection, quantized),
                HeadWeights.build(lm_head, down_proj, vocab_proj, exact, quantized),
            )
        )
    return sets


def hidden_states(weights: torch.Tensor, rows: int, common: float) -> torch.Tensor:
    """Nodes of a tree share ``common`` of their variance; other numbers of rows are independent."""
    hidden = torch.randn(rows, weights.shape[1], device=weights.device)
    if rows == TREE_NODES:
        hidden = common**0.5 * torch.randn_like(hidden[:1]) + (1 - common) ** 0.5 * hidden
    return hidden.to(weights.dtype)


def time_plain(lm_heads: list[torch.Tensor], rows: int, variants: list[str], repeats: int) -> dict[str, float]:
    """Full and fixed head, which do not depend on the speculator."""
    hidden = hidden_states(lm_heads[0], rows, 0.0)
    vocab_size = lm_heads[0].shape[0]
    starts = range(0, max(1, vocab_size - STATIC_ROWS), STATIC_ROWS)
    static = [lm_head[start : start + STATIC_ROWS] for lm_head in lm_heads for start in starts]
    full = lm_heads * (4 if len(lm_heads) == 1 else 1)
    products = {
        name: [lambda u=u: torch.nn.functional.linear(hidden, u) for u in weights]
        for name, weights in (("full", full), ("static", static))
        if name in variants
    }
    return {name: time_calls(calls, repeats) for name, calls in products.items()}


def measure(
    sets: list[tuple[HeadWeights, HeadWeights]],
    rows: int,
    common: float,
    precision: str,
    variants: list[str],
    bandwidth: float,
    repeats: int,
) -> dict[str, object]:
    """Time one head in milliseconds; None where a variant does not exist."""
    tiled = sets[0][0]
    k = tiled.selection.num_candidates
    hidden = [hidden_states(weights.lm_head, rows, common) for weights, _ in sets]
    timed: dict[str, object] = {}

    def add(name: str, call: Callable[[HeadWeights, HeadWeights, torch.Tensor], object]) -> None:
        if name in variants:
            calls = [lambda w=w, e=e, h=h: call(w, e, h) for (w, e), h in zip(sets, hidden, strict=True)]
            timed[name] = time_calls(calls, repeats)

    if precision == "bf16":
        add("low_rank", lambda w, e, h: low_rank(e, h))
        add("pipeline", lambda w, e, h: pipeline(e, h, k))
    if HAS_TRITON and hidden[0].device.type == "cuda":
        add("exact", lambda w, e, h: vocab_head(h, e, impl="triton"))
        add("tile", lambda w, e, h: vocab_head(h, w, impl="triton"))
        add("top10", lambda w, e, h: vocab_head_top_n(h, w, min(10, k), impl="triton"))
        if rows == TREE_NODES:
            add("shared", lambda w, e, h: vocab_head(h, w, shared=True, impl="triton"))
        ids = [vocab_head(h, w, impl="triton")[0] for (w, _), h in zip(sets[:4], hidden, strict=False)]
    else:
        ids = [vocab_head(h, w, impl="torch")[0] for (w, _), h in zip(sets[:4], hidden, strict=False)]
    distinct = statistics.mean(chosen.unique().numel() for chosen in ids)
    moved = sum(x.numel() * x.element_size() for x in (tiled.down_proj, tiled.vocab_proj, hidden[0]))
    moved += distinct * tiled.hidden_size * tiled.lm_head.element_size()
    shape = dict(vocab=tiled.vocab_size, d=tiled.hidden_size, B=rows, r=tiled.rank, k=k, bits=precision)
    auto = "full" if full_head_is_faster(tiled, hidden[0]) else "tile"
    return {**shape, **timed, "floor": moved / bandwidth * 1e3, "distinct": distinct, "auto": auto}


def low_rank(weights: HeadWeights, hidden: torch.Tensor) -> torch.Tensor:
    return (hidden @ weights.down_proj.t()) @ weights.vocab_proj.t()


def pipeline(weights: HeadWeights, hidden: torch.Tensor, k: int) -> torch.Tensor:
    ids = low_rank(weights, hidden).topk(k, dim=1, sorted=False).indices
    return torch.bmm(weights.lm_head[ids], hidden.unsqueeze(2))


def time_calls(calls: list[Callable[[], object]], repeats: int) -> float:
    """Milliseconds of one call: on a GPU the median replay of a graph of all of them, by their number."""
    if not torch.cuda.is_available():
        return median_ms(calls[0], repeats, on_gpu=False)

    def run() -> None:
        for call in calls:
            call()

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_ms(graph.replay, repeats, on_gpu=True) / len(calls)


def read_bandwidth(elements: int, device: torch.device, repeats: int) -> float:
    """Bytes per second at which a sum over ``elements`` float32 reads."""
    source = torch.ones(elements, device=device)
    return 4 * elements / median_ms(lambda: source.sum(), repeats, on_gpu=device.type == "cuda") * 1e3


def cell(value: object) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

"""Candidate logits: full head, torch gather and Triton kernel, against the time the bytes alone must take.

``full`` is the product with every row, ``bmm`` torch's gather and batched product in bfloat16, ``torch`` and
``triton`` the implementations of ``gather_dot`` (the first is the float32 reference, made to be right, not fast).

    python kernels/benchmarks/bench_gather_dot.py --json gather_dot.json
    python kernels/benchmarks/bench_gather_dot.py --tiny          # seconds, any machine: shows that it runs

On a GPU each figure is the median over replays of one CUDA graph that makes the call with several sets of ids in
turn, so that the rows come from memory, not from the cache. The floor is the bytes that must move (each distinct
candidate row once) at the rate that a large copy reaches in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from specvocab_kernels import gather_dot
from specvocab_kernels._impl import HAS_TRITON
from specvocab_kernels.timing import median_ms

SHAPES = ((151936, 4096), (151936, 2560), (262144, 640), (49152, 576))  # V, d: Qwen3-8B, Qwen3-4B, Gemma 3, SmolLM2
TINY_SHAPES = ((1003, 48),)
COLUMNS = ("vocab_size", "hidden_size", "rows", "k", "full_ms", "bmm_ms", "torch_ms", "triton_ms", "floor_ms")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Benchmark of gather_dot.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 10, 64], help="hidden states B in one call")
    parser.add_argument("--k", type=int, nargs="+", default=[256, 2048], help="candidates per row")
    parser.add_argument("--repeats", type=int, default=30, help="timed repetitions; the median counts")
    parser.add_argument("--tiny", action="store_true", help="one small shape, few repetitions")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(argv)
    shapes = TINY_SHAPES if args.tiny else SHAPES
    repeats = 3 if args.tiny else args.repeats

    device = torch.device(args.device)
    dtype = torch.bfloat16
    copy_elements = 1 << (16 if args.tiny else 30 if device.type == "cuda" else 26)
    bandwidth = copy_bandwidth(copy_elements, device, repeats)
    print(f"{device_name(device)}, {dtype}, copy {bandwidth / 1e9:.1f} GB/s read and written")
    print(" ".join(f"{column:>11}" for column in COLUMNS))
    results = []
    for vocab_size, hidden_size in shapes:
        weight = torch.randn(vocab_size, hidden_size, device=device, dtype=dtype)
        for rows in args.rows:
            for k in args.k:
                results.append(measure(weight, rows, k, bandwidth, repeats))
                print(" ".join(f"{cell(results[-1][column]):>11}" for column in COLUMNS), flush=True)
    if args.json:
        report = dict(device=device_name(device), dtype=str(dtype), bytes_per_second=bandwidth, results=results)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(weight: torch.Tensor, rows: int, k: int, bandwidth: float, repeats: int) -> dict[str, float | None]:
    """Time one shape in milliseconds; ``triton_ms`` is None where the kernel cannot run."""
    vocab_size, hidden_size = weight.shape
    k = min(k, vocab_size)
    hidden = torch.randn(rows, hidden_size, device=weight.device, dtype=weight.dtype)
    num_sets = max(1, min(32, 256_000_000 // (rows * k * hidden_size * weight.element_size())))
    id_sets = [torch.randint(vocab_size, (rows, k), device=weight.device) for _ in range(num_sets)]
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "full_ms": lambda ids: torch.nn.functional.linear(hidden, weight),
        "bmm_ms": lambda ids: torch.bmm(weight[ids], hidden.unsqueeze(2)),
        "torch_ms": lambda ids: gather_dot(hidden, weight, ids, impl="torch"),
    }
    if HAS_TRITON and weight.device.type == "cuda":
        calls["triton_ms"] = lambda ids: gather_dot(hidden, weight, ids, impl="triton")
        torch.testing.assert_close(calls["triton_ms"](id_sets[0]), calls["torch_ms"](id_sets[0]), atol=1e-2, rtol=1e-3)
    times = {name: time_over_sets(call, id_sets, repeats) for name, call in calls.items()}
    distinct = statistics.mean(ids.unique().numel() for ids in id_sets)
    moved = (distinct * hidden_size + hidden.numel()) * weight.element_size() + rows * k * (8 + 4)  # ids in, logits out
    shape = dict(vocab_size=vocab_size, hidden_size=hidden_size, rows=rows, k=k)
    return {**shape, "triton_ms": None, **times, "floor_ms": moved / bandwidth * 1e3}


def time_over_sets(call: Callable[[torch.Tensor], object], id_sets: list[torch.Tensor], repeats: int) -> float:
    """Median milliseconds of one call, the sets of ids taken in turn."""

    def all_sets() -> None:
        for ids in id_sets:
            call(ids)

    all_sets()  # compiles, before a capture
    if id_sets[0].device.type == "cpu":
        return median_ms(all_sets, repeats, on_gpu=False) / len(id_sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_sets()
    return median_ms(graph.replay, repeats, on_gpu=True) / len(id_sets)


def copy_bandwidth(elements: int, device: torch.device, repeats: int) -> float:
    """Bytes per second of a copy of ``elements`` float32, read and written."""
    source, target = torch.ones(elements, device=device), torch.empty(elements, device=device)
    return 2 * 4 * elements / median_ms(lambda: target.copy_(source), repeats, on_gpu=device.type == "cuda") * 1e3


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

"""Distillation forward and backward: time and memory against the matrix products alone, timed in the same run.

``ours`` is ``specvocab_kernels.distill``; ``eager`` materialises logits and log-probabilities and leaves the gradient
to autograd, ``compiled`` is the same under torch.compile. ``liger`` is Liger's fused linear JSD at forward KL, once a
step and without the speculator, so its floor is lower. ``floor`` is every matrix product of the definition, once, in
pieces of the size that a step has.

    python kernels/benchmarks/bench_distill.py --json distill.json
    python kernels/benchmarks/bench_distill.py --tiny          # seconds, any machine: shows that it runs
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from specvocab_kernels.distill import distill
from specvocab_kernels.timing import median_ms
from torch import Tensor

AUX_WEIGHT = 0.1
VARIANTS = ("ours", "eager", "compiled", "liger")
COLUMNS = ("rows", "steps", "variant", "ms", "floor_ms", "ratio", "beyond_mib", "peak_mib")
Problem = dict[str, Tensor]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Benchmark of distill.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192], help="valid positions N")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 7], help="unroll steps S")
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=512, help="of the speculator; 0 for none")
    parser.add_argument("--loss", default="forward_kl", help="of ours; the others always take forward_kl")
    parser.add_argument("--collect", action="store_true", help="ours also measures")
    parser.add_argument("--max-mib", type=int, default=1024, help="memory for logits")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions; the median counts")
    parser.add_argument("--tiny", action="store_true", help="one small shape, few repetitions")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(argv)
    if args.tiny:
        args.rows, args.steps, args.vocab_size, args.hidden_size, args.rank, args.repeats = [24], [2], 1003, 48, 8, 2
    if "liger" in args.variants and (find_spec("liger_kernel") is None or args.device == "cpu"):
        print("liger: left out (needs a GPU and the package liger-kernel)")
        args.variants.remove("liger")

    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, V={args.vocab_size}, d={args.hidden_size}, r={args.rank}, bf16")
    print(" ".join(f"{column:>10}" for column in COLUMNS))
    results = []
    for rows in args.rows:
        for steps in args.steps:
            problem = make_problem(rows, steps, args.vocab_size, args.hidden_size, args.rank, device)
            floor = median_ms(lambda problem=problem: all_products(problem), args.repeats, on_gpu=device.type == "cuda")
            for variant in args.variants:
                results.append({"rows": rows, "steps": steps, "variant": variant, "floor_ms": floor,
                                **measure(build(variant, args), problem, args.repeats, device)})
                if results[-1]["ms"] is not None:
                    results[-1]["ratio"] = results[-1]["ms"] / floor
                print(" ".join(f"{cell(results[-1].get(column)):>10}" for column in COLUMNS), flush=True)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        report = {"device": name, "torch": torch.__version__, "settings": settings, "results": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def make_problem(rows: int, steps: int, vocab_size: int, hidden_size: int, rank: int, device: torch.device) -> Problem:
    """Inputs of ``distill``: U and hidden states in bf16, the speculator in fp32, logits of standard deviation 3."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        values = torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator)
        return values.mul_(scale)

    teacher = normal(rows, hidden_size, scale=1.0)
    problem = {
        "student_hidden": (normal(steps, rows, hidden_size, scale=1.0) + teacher).requires_grad_(),
        "teacher_hidden": teacher,
        "lm_head": normal(vocab_size, hidden_size, scale=3.0 * hidden_size**-0.5),
        "weight": torch.rand(steps, rows, device=device, generator=generator) / rows,
    }
    if rank:
        down = normal(rank, hidden_size, scale=hidden_size**-0.5, dtype=torch.float32)
        vocab = normal(vocab_size, rank, scale=3.0 * rank**-0.5, dtype=torch.float32)
        problem |= {"down_proj": down.requires_grad_(), "vocab_proj": vocab.requires_grad_()}
    return problem


def all_products(problem: Problem) -> None:
    """Teacher forward; per step student forward and backward, the speculator's two products and their gradients."""
    lm_head, teacher = problem["lm_head"], problem["teacher_hidden"]
    with torch.no_grad():
        logits = teacher @ lm_head.mT
        for hidden in problem["student_hidden"]:
            torch.mm(hidden, lm_head.mT, out=logits)
            torch.mm(logits, lm_head)
        if "down_proj" in problem:
            down, vocab = problem["down_proj"].to(lm_head.dtype), problem["vocab_proj"].to(lm_head.dtype)
            for hidden in problem["student_hidden"]:
                low_rank = hidden @ down.mT
                torch.mm(low_rank, vocab.mT, out=logits)
                logits.mT @ low_rank
                grad_low_rank = logits @ vocab
                grad_low_rank.mT @ hidden
                grad_low_rank @ down


def build(variant: str, args: argparse.Namespace) -> Callable[[Problem], Tensor]:
    """The variant as a function from inputs to the loss."""
    if variant == "ours":

        def ours(problem: Problem) -> Tensor:
            speculator = {name: problem.get(name) for name in ("down_proj", "vocab_proj")}
            return distill(
                **{**problem, **speculator}, loss=args.loss, aux_weight=AUX_WEIGHT, max_bytes=args.max_mib * 2**20,
                collect=args.collect,
            )[0]  # fmt: skip

        return ours
    if variant == "liger":
        return liger
    return eager if variant == "eager" else lambda problem: eager(problem, torch.compile(step_loss))


def step_loss(hidden: Tensor, log_p: Tensor, matrices: tuple[Tensor, ...], weight: Tensor) -> Tensor:
    """Forward KL of one step, logits by one or two matrices, everything of size [N, V] in memory."""
    logits = hidden
    for matrix in matrices:
        logits = logits @ matrix.mT
    log_q = torch.log_softmax(logits.float(), -1)
    return (weight * (log_p.exp() * (log_p - log_q)).sum(-1)).sum()


def eager(problem: Problem, step: Callable[..., Tensor] = step_loss) -> Tensor:
    lm_head = problem["lm_head"]
    log_p = torch.log_softmax((problem["teacher_hidden"] @ lm_head.mT).float(), -1)
    total = torch.zeros((), device=lm_head.device)
    for hidden, weight in zip(problem["student_hidden"], problem["weight"], strict=True):
        total = total + step(hidden, log_p, (lm_head,), weight)
        if "down_proj" in problem:
            speculator = problem["down_proj"].to(lm_head.dtype), problem["vocab_proj"].to(lm_head.dtype)
            total = total + AUX_WEIGHT * step(hidden, log_p, speculator, weight)
    return total


def liger(problem: Problem) -> Tensor:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    lm_head, forward_kl = problem["lm_head"], LigerFusedLinearJSD(jsd_beta=0.0)
    teacher = problem["teacher_hidden"]
    losses = [forward_kl(hidden, lm_head, teacher, lm_head, None) for hidden in problem["student_hidden"]]
    return torch.stack(losses).sum()


def measure(loss: Callable[[Problem], Tensor], problem: Problem, repeats: int, device: torch.device) -> dict:
    """Milliseconds of forward and backward, and memory in MiB: the peak, and beyond inputs and gradients."""
    leaves = [tensor for tensor in problem.values() if tensor.requires_grad]

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss(problem).backward()

    try:
        run()
        for leaf in leaves:
            leaf.grad = None
        before = reset_peak(device)
        run()
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        outputs = sum(leaf.grad.numel() * leaf.grad.element_size() for leaf in leaves if leaf.grad is not None)
        ms = median_ms(run, repeats, on_gpu=device.type == "cuda")
    except torch.OutOfMemoryError:
        return {"ms": None, "beyond_mib": None, "peak_mib": None}
    if device.type == "cpu":
        return {"ms": ms, "beyond_mib": None, "peak_mib": None}
    return {"ms": ms, "beyond_mib": (peak - before - outputs) / 2**20, "peak_mib": (peak - before) / 2**20}


def reset_peak(device: torch.device) -> int:
    """Start measuring the peak anew; bytes that are allocated already."""
    if device.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def cell(value: float | int | str | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

"""Time and memory of the training step: random data, random weights, any shape; Qwen3-8B's by default.

    python scripts/bench_train.py --json train.json
    python scripts/bench_train.py --target both --seq-len 4096     # also with the target's forward
    python scripts/bench_train.py --target all --seq-len 4096      # and with all ways to run it, see VARIANTS
    python scripts/bench_train.py --tiny                           # seconds, any machine: shows that it runs

With TORCHINDUCTOR_COMPILE_THREADS=1, or the compiler's processes take the host's time from the first rows.
A step is what train/loop.py does on one card: (target forward,) draft forward, backward, clip, AdamW, from a plan that
the loader's workers would have made; it is waited for when the next one is launched. Every row is packed with
``--documents`` documents whose last ``--valid`` share is supervised. ``target_ms`` is the target's forward alone. MFU
counts the products the step needs (train/metrics.py) over the card's data-sheet peak.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from data_gen.files import make_folder, write_json
from specvocab_model import packed_attention
from specvocab_model.config import HeadConfig, OptimConfig
from specvocab_model.draft import DraftArchitecture, SpecVocabDraft
from specvocab_model.losses import Objective, step_weights, valid_counts
from specvocab_model.options import not_negative, positive, run_command, share
from specvocab_model.target import Target, TargetOutput, TargetSpec, default_feature_layers
from specvocab_model.target_graph import TargetGraph
from specvocab_model.transfers import Readback, send
from specvocab_model.unroll import UnrollPlan, plan_unroll
from train.launch import limit_cpu_threads
from train.metrics import FlopsModel, count_parameters, peak_flops
from train.optim import Updater, build_optimizer

COLUMNS = ("seq_len", "steps", "target", "target_ms", "ms", "tokens_per_second", "mfu", "peak_gib")
# Documents by a mask that transformers makes, by offsets, or by offsets in a CUDA graph.
VARIANTS = ["mask", "offsets", "graph", "compiled mask", "compiled offsets", "compiled graph"]
TARGETS = {"without": ["no"], "with": ["offsets"], "both": ["no", "offsets"], "all": ["no", *VARIANTS]}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e6}


def main(argv: list[str] | None = None) -> None:
    run_command(build_parser(), bench, argv)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Benchmark of the training step.")
    parser.add_argument("--seq-len", type=positive, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--unroll-steps", type=positive, nargs="+", default=[3, 7])
    parser.add_argument("--batch", type=positive, default=1, help="packed rows in a step")
    parser.add_argument("--documents", type=positive, default=1, help="documents in a packed row")
    parser.add_argument("--valid", type=share, default=0.8, help="supervised share of a document")
    parser.add_argument("--target", choices=sorted(TARGETS), default="without", help="target's forward")
    parser.add_argument("--vocab-size", type=positive, default=151936)
    parser.add_argument("--hidden-size", type=positive, default=4096)
    parser.add_argument("--intermediate-size", type=positive, default=12288)
    parser.add_argument("--heads", type=positive, nargs=2, default=[32, 8], help="attention heads, key-value heads")
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--layers", type=positive, default=36, help="of the target")
    parser.add_argument("--rank", type=not_negative, default=512, help="of the speculator; 0 for none")
    parser.add_argument("--max-mib", type=positive, default=1024, help="memory for logits")
    parser.add_argument("--repeats", type=positive, default=5, help="timed steps; the median counts")
    parser.add_argument("--tiny", action="store_true", help="a small shape, few repetitions")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def bench(args: argparse.Namespace) -> None:
    """Prints a row for every shape, and writes them all.

    Raises:
        ConfigError: the folder of ``--json`` cannot be made.
    """
    if args.json:
        make_folder(args.json.parent)  # said before minutes of measuring
    if args.tiny:
        vars(args).update(seq_len=[64], unroll_steps=[2], vocab_size=211, hidden_size=48, intermediate_size=64,
                          heads=[4, 2], head_dim=16, layers=7, rank=6, repeats=2)

    device = Accelerator().device
    limit_cpu_threads(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {args.valid:.0%} valid, batch {args.batch}, bf16 over fp32 parameters")
    print(" ".join(f"{column:>17}" for column in COLUMNS))
    results = []
    for kind in TARGETS[args.target]:
        target = None if kind == "no" else build_target(args, device, kind)
        for num_steps in args.unroll_steps:
            for seq_len in args.seq_len:
                results.append(measure(args, seq_len, num_steps, target, kind, device))
                print(" ".join(f"{cell(results[-1][column]):>17}" for column in COLUMNS), flush=True)
        del target
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        report = {"device": name, "torch": torch.__version__, "settings": settings, "results": results}
        write_json(args.json, report)


def build_target(args: argparse.Namespace, device: torch.device, kind: str) -> Target:
    """A Qwen3 of the given shape with random bf16 weights, that runs as ``kind`` of ``VARIANTS`` says."""
    config = Qwen3Config(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads[0],
        num_key_value_heads=args.heads[1],
        head_dim=args.head_dim,
        max_position_embeddings=65536,
        rope_parameters=DEFAULT_ROPE,
    )
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    if not kind.endswith("mask"):
        model.set_attn_implementation(packed_attention.NAME)
    spec = TargetSpec(
        name="random", model_type="qwen3", hidden_size=args.hidden_size, vocab_size=args.vocab_size,
        num_hidden_layers=args.layers, max_position_embeddings=65536, num_attention_heads=args.heads[0],
        num_key_value_heads=args.heads[1], head_dim=args.head_dim, intermediate_size=args.intermediate_size,
        rms_norm_eps=1e-6, rope_parameters=DEFAULT_ROPE, eos_token_ids=(0,), pad_token_id=0, logit_softcap=None,
        logit_scale=1.0, fingerprint="",
    )  # fmt: skip
    tokenizer: Any = None
    target = Target(spec, model, tokenizer)
    return target.with_compiled_layers() if kind.startswith("compiled") else target


def build_draft(args: argparse.Namespace, num_steps: int, device: torch.device) -> SpecVocabDraft:
    architecture = DraftArchitecture(
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_attention_heads=args.heads[0],
        num_key_value_heads=args.heads[1],
        head_dim=args.head_dim,
        vocab_size=args.vocab_size,
        feature_layers=default_feature_layers(args.layers),
        rms_norm_eps=1e-6,
        rope_parameters=DEFAULT_ROPE,
        max_position_embeddings=65536,
        num_unroll_steps=num_steps,
    )
    head = HeadConfig(type="speculative", rank=args.rank) if args.rank else HeadConfig(type="full")
    with torch.device(device):
        return SpecVocabDraft(architecture, head).for_training()


def make_batch(args: argparse.Namespace, seq_len: int, device: torch.device) -> dict[str, Tensor]:
    """Masks on the CPU, as the loader has them; ids, hidden states and embeddings on the device."""
    length = -(-seq_len // args.documents)
    at = torch.arange(seq_len).expand(args.batch, -1)
    hidden = torch.randn(args.batch, seq_len, args.hidden_size, device=device).bfloat16()
    return {
        "input_ids": torch.randint(args.vocab_size, (args.batch, seq_len), device=device),
        "position_ids": at % length,
        "document_ids": at // length,
        "loss_mask": (at % length >= length - round(args.valid * length)).long(),
        "features": torch.cat([hidden, hidden * 0.7, hidden + 0.1], dim=-1),
        "final_hidden": hidden,
    }


def forward_of(target: Target, kind: str, shape: torch.Size) -> Callable[[Tensor, Tensor, Tensor], TargetOutput]:
    """A function of ids, positions and documents' offsets, as train/target_outputs.py calls it."""
    if kind.endswith("graph"):
        return TargetGraph(target, (shape[0], shape[1])).forward
    if kind.endswith("mask"):
        return lambda ids, positions, offsets: target.forward(ids, position_ids=positions)
    return lambda ids, positions, offsets: target.forward(
        ids, position_ids=positions, attention_mask=packed_attention.as_mask(offsets))


def measure(
    args: argparse.Namespace, seq_len: int, num_steps: int, target: Target | None, kind: str, device: torch.device
) -> dict[str, Any]:
    """One row of the table."""
    torch.manual_seed(0)
    model, batch = build_draft(args, num_steps, device), make_batch(args, seq_len, device)
    embedding: Tensor
    if target is None:
        embedding = torch.randn(args.vocab_size, args.hidden_size, device=device, dtype=torch.bfloat16)
        lm_head = embedding.mul_(args.hidden_size**-0.5)
    else:
        embedding, lm_head = target.model.get_input_embeddings().weight, target.lm_head_weight
    objective = Objective(loss="forward_kl", aux_weight=0.1, step_decay=0.8,
                          max_bytes=args.max_mib * 2**20)
    accelerator = Accelerator()
    updater = Updater(accelerator, model, accelerator.prepare(build_optimizer(model, OptimConfig())), max_grad_norm=0.5)
    counts = valid_counts(batch["loss_mask"], batch["document_ids"], num_steps)
    made = plan_unroll(batch["loss_mask"], batch["document_ids"], num_steps)
    if device.type == "cuda":
        made = made.map(Tensor.pin_memory)  # by the loader's thread
    run_target = None if target is None else forward_of(target, kind, batch["input_ids"].shape)

    def step() -> Readback:
        plan = made.to(device)
        masks = {name: send(batch[name], device) for name in ("position_ids", "document_ids", "loss_mask")}
        hidden = batch
        if run_target is not None:
            output = run_target(batch["input_ids"], masks["position_ids"], plan.unrolled.spans.key_offsets)
            hidden = {"features": output.features, "final_hidden": output.final_hidden}
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(
                features=hidden["features"],
                final_hidden=hidden["final_hidden"],
                token_embeds=torch.nn.functional.embedding(batch["input_ids"], embedding),
                lm_head_weight=lm_head,
                step_weights=send(step_weights(objective, counts), device),
                objective=objective,
                plan=plan,
                **masks,
            ).loss
        updater.backward(loss)
        norm = Readback(updater.step(lr=1e-4)[None])
        norm.start()
        return norm

    for _ in range(2):
        step().wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times, launched = [], step()
    for _ in range(args.repeats):
        started = time.perf_counter()
        before, launched = launched, step()
        before.wait()
        times.append(time.perf_counter() - started)
    launched.wait()
    seconds = statistics.median(times)
    peak = peak_flops(device)
    num_tokens = args.batch * seq_len
    target_body = 0 if target is None else count_parameters(target.model.get_decoder().layers)
    flops = FlopsModel.of_draft(model, lm_head, target_body).step(num_tokens, len(made.unrolled.index), counts)
    return {
        "seq_len": seq_len,
        "steps": num_steps,
        "target": kind,
        "target_ms": None if run_target is None else time_target(run_target, batch, made, args.repeats, device) * 1e3,
        "ms": seconds * 1e3,
        "tokens_per_second": num_tokens / seconds,
        "mfu": None if peak is None else flops / seconds / peak,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
    }


def time_target(
    run_target: Callable[[Tensor, Tensor, Tensor], TargetOutput], batch: dict[str, Tensor], plan: UnrollPlan,
    repeats: int, device: torch.device,
) -> float:
    """Median seconds of the target's forward alone, from its launch to its end."""
    positions, offsets = send(batch["position_ids"], device), send(plan.unrolled.spans.key_offsets, device)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        end = Readback(run_target(batch["input_ids"], positions, offsets).final_hidden[0, 0])
        end.start()
        end.wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def cell(value: float | int | str | None) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

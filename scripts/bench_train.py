"""Time and memory of the training step: random data, random weights, any shape; Qwen3-8B's by default.

    python scripts/bench_train.py --json train.json
    python scripts/bench_train.py --target both --seq-len 4096     # also with the target's forward
    python scripts/bench_train.py --target all --seq-len 4096      # and with its layers not compiled, too
    python scripts/bench_train.py --tiny                           # seconds, any machine: shows that it runs

With TORCHINDUCTOR_COMPILE_THREADS=1, or the compiler's processes take the host's time from the first rows.
A step is what train/loop.py does on one card: plan, (target forward,) draft forward, backward, clip, AdamW. Every row
is packed with ``--documents`` documents whose last ``--valid`` share is supervised. MFU counts the products the step
needs (train/metrics.py) over the card's data-sheet peak.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from data_gen.files import make_folder, write_json
from specvocab_model.compiled_layers import can_compile, compiled_layers
from specvocab_model.config import HeadConfig, OptimConfig
from specvocab_model.draft import DraftArchitecture, SpecVocabDraft
from specvocab_model.losses import Objective, step_weights, valid_counts
from specvocab_model.options import not_negative, positive, run_command, share
from specvocab_model.target import default_feature_layers
from specvocab_model.unroll import plan_unroll
from train.launch import limit_cpu_threads
from train.metrics import FlopsModel, count_parameters, peak_flops
from train.optim import Updater, build_optimizer

COLUMNS = ("seq_len", "steps", "target", "ms", "tokens_per_second", "mfu", "peak_gib")
TARGETS = {"without": ["no"], "with": ["yes"], "both": ["no", "yes"], "all": ["no", "yes", "plain layers"]}
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
        target = None if kind == "no" else build_target(args, device)
        for num_steps in args.unroll_steps:
            for seq_len in args.seq_len:
                results.append(measure(args, seq_len, num_steps, target, kind, device))
                print(" ".join(f"{cell(results[-1][column]):>17}" for column in COLUMNS), flush=True)
        del target
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        report = {"device": name, "torch": torch.__version__, "settings": settings, "results": results}
        write_json(args.json, report)


def build_target(args: argparse.Namespace, device: torch.device) -> Qwen3ForCausalLM:
    """A Qwen3 of the given shape with random bf16 weights."""
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
    return model.eval().requires_grad_(False)


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
        return SpecVocabDraft(architecture, head)


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


def target_forward(target: Qwen3ForCausalLM, batch: dict[str, Tensor], *, plain_layers: bool) -> dict[str, Tensor]:
    """Features and final hidden state, as ``Target.forward`` gives them."""
    compiled = nullcontext() if plain_layers or not can_compile(target.device, None) else compiled_layers(
        target.model, target.device, None, "")
    captured: list[Tensor] = []
    layers = [target.model.layers[index] for index in default_feature_layers(target.config.num_hidden_layers)]
    hooks = [layer.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0])) for layer in layers]
    with torch.no_grad(), compiled:
        position_ids = batch["position_ids"].to(target.device)
        final = target.model(input_ids=batch["input_ids"], position_ids=position_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {"features": torch.cat(captured, dim=-1), "final_hidden": final.last_hidden_state}


def measure(
    args: argparse.Namespace, seq_len: int, num_steps: int, target: Qwen3ForCausalLM | None, kind: str,
    device: torch.device,
) -> dict[str, Any]:
    """One row of the table."""
    torch.manual_seed(0)
    model, batch = build_draft(args, num_steps, device), make_batch(args, seq_len, device)
    embedding: Tensor
    if target is None:
        embedding = torch.randn(args.vocab_size, args.hidden_size, device=device, dtype=torch.bfloat16)
        lm_head = embedding.mul_(args.hidden_size**-0.5)
    else:
        embedding, lm_head = target.model.embed_tokens.weight, target.lm_head.weight
    objective = Objective(loss="forward_kl", aux_weight=0.1, step_decay=0.8,
                          max_bytes=args.max_mib * 2**20)
    updater = Updater(Accelerator(), model, build_optimizer(model, OptimConfig()), max_grad_norm=0.5)
    counts = valid_counts(batch["loss_mask"], batch["document_ids"], num_steps)
    num_unrolled = len(plan_unroll(batch["loss_mask"], batch["document_ids"], num_steps).unrolled.index)

    def step() -> None:
        plan = plan_unroll(batch["loss_mask"], batch["document_ids"], num_steps).to(device)
        hidden = batch if target is None else target_forward(
            target, batch, plain_layers=kind == "plain layers")
        masks = {name: batch[name].to(device) for name in ("position_ids", "document_ids", "loss_mask")}
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(
                features=hidden["features"],
                final_hidden=hidden["final_hidden"],
                token_embeds=torch.nn.functional.embedding(batch["input_ids"], embedding),
                lm_head_weight=lm_head,
                step_weights=step_weights(objective, counts).to(device),
                objective=objective,
                plan=plan,
                **masks,
            ).loss
        updater.backward(loss)
        updater.step(lr=1e-4)  # waits for the device: it returns the gradient's norm

    for _ in range(2):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(args.repeats):
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    peak = peak_flops(device)
    num_tokens = args.batch * seq_len
    target_body = 0 if target is None else count_parameters(target.model.layers)
    flops = FlopsModel.of_draft(model, lm_head, target_body).step(num_tokens, num_unrolled, counts)
    return {
        "seq_len": seq_len,
        "steps": num_steps,
        "target": kind,
        "ms": seconds * 1e3,
        "tokens_per_second": num_tokens / seconds,
        "mfu": None if peak is None else flops / seconds / peak,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
    }


def cell(value: float | int | str | None) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

"""Training on one and several cards: Qwen3-8B's draft under every strategy, started through `accelerate launch`.

    python scripts/bench_distributed.py --json distributed.json
    python scripts/bench_distributed.py --cards 1 2 4 8 --accumulation 8
    python scripts/bench_distributed.py --tiny --strategies single ddp      # CPU, seconds: shows that it runs

Every rank trains on a row of its own, ``--seq-len`` tokens of which ``--valid`` are supervised, first with random
features and then with a random-weight target in the loop; a step is what train/loop.py does, with the same collectives.
A table at the end compares each run with the one-card run of the same strategy. Communication is what NCCL's kernels
take in the profiler, and "exposed" the part of it during which no other kernel runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.autograd import DeviceType
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from data_gen.files import make_folder, write_json
from specvocab_model.config import (
    Config,
    ConfigError,
    DataConfig,
    DistributedConfig,
    DraftConfig,
    HeadConfig,
    TrainerConfig,
)
from specvocab_model.draft import DraftArchitecture, SpecVocabDraft
from specvocab_model.losses import Objective, step_weights
from specvocab_model.options import positive, run_command, share
from specvocab_model.target import default_feature_layers
from specvocab_model.transfers import send
from specvocab_model.unroll import plan_unroll
from train.launch import build_accelerator, host_sum, leave, limit_cpu_threads
from train.memory import MemoryEstimate
from train.optim import Updater, build_optimizer

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3")
SHAPE: dict[str, Any] = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
                         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 36}
TINY_SHAPE: dict[str, Any] = {"vocab_size": 211, "hidden_size": 48, "intermediate_size": 64,
                              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                              "num_hidden_layers": 7}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
COLUMNS = ("strategy", "cards", "target", "ms", "tokens_per_second", "efficiency", "peak_gib", "estimated_gib",
           "communication", "exposed")


def main(argv: list[str] | None = None) -> None:
    run_command(build_parser(), bench, argv)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Benchmark of training on several cards.")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--cards", type=positive, nargs="+", default=None, help="default: 1 and all there are")
    parser.add_argument("--seq-len", type=positive, default=4096, help="tokens of a rank's micro-batch")
    parser.add_argument("--unroll-steps", type=positive, default=7)
    parser.add_argument("--accumulation", type=positive, default=1, help="micro-batches of an optimizer step")
    parser.add_argument("--valid", type=share, default=0.8, help="supervised share of a row")
    parser.add_argument("--rank", type=positive, default=512, help="of the speculator")
    parser.add_argument("--repeats", type=positive, default=8, help="timed steps; the median counts")
    parser.add_argument("--targets", nargs="+", choices=("without", "with"), default=["without", "with"])
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU")
    parser.add_argument("--json", type=Path, default=Path("distributed.json"), help="where the figures go")
    parser.add_argument("--strategy", choices=STRATEGIES, help=argparse.SUPPRESS)  # of one rank that main started
    return parser


def bench(args: argparse.Namespace) -> None:
    """What is asked for, or, in a rank that this has started, its part of it.

    Raises:
        ConfigError: there are too few GPUs, or the folder of ``--json`` cannot be made.
    """
    if not args.tiny and not torch.cuda.is_available():
        raise ConfigError("there is no GPU; --tiny runs a small shape on the CPU")
    if args.cards and not args.tiny and max(args.cards) > torch.cuda.device_count():
        raise ConfigError(f"--cards {max(args.cards)} is more than the {torch.cuda.device_count()} GPUs that there are")
    make_folder(args.json.parent)
    if args.tiny:
        vars(args).update(seq_len=64, unroll_steps=2, rank=6, repeats=2)
    if args.strategy is not None:
        measure_strategy(args)
        return
    results, failed = run_all(args)
    print(" ".join(f"{column:>17}" for column in COLUMNS))
    for result in results:
        print(" ".join(f"{cell(result[column]):>17}" for column in COLUMNS))
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}; their output is above")


def write_report(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Compare every result with the one-card run of its strategy (or of `single`), and write what there is so far."""
    for result in results:
        on_one = {one["strategy"]: one for one in results if one["cards"] == 1 and one["target"] == result["target"]}
        alone = on_one.get(result["strategy"], on_one.get("single"))
        result["efficiency"] = (None if alone is None else
                                result["tokens_per_second"] / alone["tokens_per_second"] / result["cards"])
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "strategy")}
    device = "CPU" if args.tiny else torch.cuda.get_device_name()
    write_json(args.json, {"device": device, "torch": torch.__version__, "settings": settings, "results": results})


def run_all(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Start every run, and return the results and the names of runs that failed, which do not stop the others.

    Runs of one card share the machine, one on each card.
    """
    available = 2 if args.tiny else torch.cuda.device_count()
    cards = args.cards or sorted({1, available})
    jobs = [(strategy, count) for count in cards for strategy in args.strategies if count == 1 or strategy != "single"]
    results: list[dict[str, Any]] = []
    failed = []
    at_once = [job for job in jobs if job[1] == 1]
    rounds = [at_once[first : first + available] for first in range(0, len(at_once), available)]
    for group in [*rounds, *([job] for job in jobs if job[1] > 1)]:
        started = [start(args, strategy, count, first_card) for first_card, (strategy, count) in enumerate(group)]
        for (strategy, count), (process, file) in zip(group, started, strict=True):
            if process.wait() != 0:
                failed.append(f"{strategy} on {count}")
                continue
            results += json.loads(file.read_text())
            file.unlink()
        write_report(args, results)  # after every group: a run that is stopped keeps what it has measured
    return results, failed


def start(args: argparse.Namespace, strategy: str, cards: int, first_card: int) -> tuple[subprocess.Popen, Path]:
    """One run under the launcher; it writes a list of results to the file."""
    file = args.json.with_name(f"{args.json.stem}.{strategy}-{cards}.partial")
    launcher = ["accelerate.commands.launch", f"--num_processes={cards}", "--num_machines=1", "--mixed_precision=no",
                "--dynamo_backend=no", "--main_process_port=0", *(["--multi_gpu"] if cards > 1 else [])]
    if args.tiny:  # on a CPU accelerate starts several ranks through MPI only
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={cards}"]
    command = [sys.executable, "-m", *launcher, __file__, "--strategy", strategy, "--json", str(file),
               "--targets", *args.targets, *(["--tiny"] if args.tiny else [])]
    for name in ("seq_len", "unroll_steps", "accumulation", "valid", "rank", "repeats"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    environ = dict(os.environ)
    if not args.tiny:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first_card, first_card + cards)))
    print(f"{strategy} on {cards}", flush=True)
    return subprocess.Popen(command, env=environ, stdout=2), file  # stdout is for the table


def measure_strategy(args: argparse.Namespace) -> None:
    """On every rank: the steps of one strategy, with and without a target."""
    shape = TINY_SHAPE if args.tiny else SHAPE
    config = Config(
        run_name="bench",
        data=DataConfig(train_path="none", validation_path="none either", seq_len=args.seq_len),
        draft=DraftConfig(num_unroll_steps=args.unroll_steps),
        head=HeadConfig(rank=args.rank),
        trainer=TrainerConfig(gradient_accumulation_steps=args.accumulation),
        distributed=DistributedConfig(strategy=args.strategy, cpu=args.tiny),
    )
    accelerator = build_accelerator(config)
    limit_cpu_threads(accelerator.device)
    torch.manual_seed(accelerator.process_index)
    model = build_draft(config, shape, accelerator.device)
    autocast = torch.autocast(accelerator.device.type, torch.bfloat16)  # inside the module, as train/build.py has it
    model.forward = autocast(model.forward)  # type: ignore[method-assign]
    num_tokens = accelerator.num_processes * args.accumulation * args.seq_len
    hidden_bytes = 2 * shape["vocab_size"] * shape["hidden_size"]
    estimates = {"without": MemoryEstimate.of(config, model, hidden_bytes, accelerator.num_processes).total}
    prepared, optimizer = accelerator.prepare(model, build_optimizer(model, config.optim))
    updater = Updater(accelerator, prepared, optimizer, config.optim.max_grad_norm)
    results = []
    for with_target in args.targets:
        target = build_target(shape, accelerator.device) if with_target == "with" else None
        if target is not None:
            extra = sum(parameter.numel() * 2 for parameter in target.parameters()) - hidden_bytes
            estimates["with"] = estimates["without"] + extra
        step = Step(config, accelerator, updater, target, shape, args.valid)
        seconds, peak = timed(step, args.repeats, accelerator)
        communication, exposed = communication_share(step) if accelerator.device.type == "cuda" else (None, None)
        results.append({
            "strategy": args.strategy, "cards": accelerator.num_processes, "target": with_target,
            "ms": seconds * 1e3, "tokens_per_second": num_tokens / seconds, "peak_gib": peak,
            "estimated_gib": estimates[with_target] / 2**30, "communication": communication, "exposed": exposed,
        })
        del step, target
    if accelerator.is_main_process:
        args.json.write_text(json.dumps(results))
    del model, prepared, optimizer, updater
    leave(accelerator)


def build_draft(config: Config, shape: dict[str, Any], device: torch.device) -> SpecVocabDraft:
    architecture = DraftArchitecture(
        **{name: value for name, value in shape.items() if name != "num_hidden_layers"},
        feature_layers=default_feature_layers(shape["num_hidden_layers"]), rms_norm_eps=1e-6, rope_parameters=ROPE,
        max_position_embeddings=65536, num_unroll_steps=config.draft.num_unroll_steps,
    )
    with torch.device(device):
        return SpecVocabDraft(architecture, config.head).for_training()


def build_target(shape: dict[str, Any], device: torch.device) -> PreTrainedModel:
    config = Qwen3Config(**shape, max_position_embeddings=65536, rope_parameters=ROPE)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


class Step:
    """One optimizer step of train/loop.py on data that stay the same."""

    def __init__(self, config: Config, accelerator: Accelerator, updater: Updater, target: PreTrainedModel | None,
                 shape: dict[str, Any], valid: float) -> None:
        self.config, self.accelerator, self.updater, self.target = config, accelerator, updater, target
        device, length, hidden_size = accelerator.device, config.data.seq_len, shape["hidden_size"]
        self.objective = Objective(loss="forward_kl", aux_weight=0.1, step_decay=0.8, max_bytes=2**30)
        at = torch.arange(length)[None]
        self.masks = {"position_ids": at, "document_ids": torch.zeros_like(at),
                      "loss_mask": (at >= length - round(valid * length)).long()}
        self.input_ids = torch.randint(shape["vocab_size"], (1, length), device=device)
        hidden = torch.randn(1, length, hidden_size, device=device).bfloat16()
        self.features, self.final_hidden = torch.cat([hidden, hidden * 0.7, hidden + 0.1], dim=-1), hidden
        self.embedding: Any
        self.lm_head: Any
        if target is None:
            self.embedding = torch.randn(shape["vocab_size"], hidden_size, device=device).mul_(hidden_size**-0.5)
            self.embedding = self.lm_head = self.embedding.bfloat16()
        else:
            self.embedding, self.lm_head = target.get_input_embeddings().weight, target.lm_head.weight

        num_steps = config.draft.num_unroll_steps
        self.plan = plan_unroll(self.masks["loss_mask"], self.masks["document_ids"], num_steps)  # by loader's workers
        self.sum_over_ranks = host_sum(accelerator, config.distributed.timeout_s)

    def __call__(self) -> None:
        device, micro_batches = self.accelerator.device, self.config.trainer.gradient_accumulation_steps
        counts = self.sum_over_ranks(micro_batches * self.plan.rows.valid.sum(1))
        weights = send(step_weights(self.objective, counts), device)
        losses: list[Tensor] = []
        for index in range(micro_batches):
            features, final_hidden = self.run_target()
            with self.updater.micro_step(last=index == micro_batches - 1):
                loss = self.updater.model(
                    features=features, final_hidden=final_hidden,
                    token_embeds=nn.functional.embedding(self.input_ids, self.embedding),
                    lm_head_weight=self.lm_head, step_weights=weights, objective=self.objective,
                    plan=self.plan.to(device), **{name: mask.to(device) for name, mask in self.masks.items()},
                ).loss
                self.updater.backward(loss)
            losses.append(loss.detach())
        self.updater.step(lr=1e-4)
        float(self.accelerator.reduce(torch.stack(losses).sum(), "sum"))  # waits for the device

    def run_target(self) -> tuple[Tensor, Tensor]:
        """Features and final hidden state, as ``Target.forward`` gives them."""
        if self.target is None:
            return self.features, self.final_hidden
        captured: list[Tensor] = []
        layers = [self.target.model.layers[at] for at in default_feature_layers(self.target.config.num_hidden_layers)]
        hooks = [layer.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0])) for layer in layers]
        with torch.no_grad():
            final = self.target.model(input_ids=self.input_ids, use_cache=False).last_hidden_state
        for hook in hooks:
            hook.remove()
        return torch.cat(captured, dim=-1), final


def timed(step: Step, repeats: int, accelerator: Accelerator) -> tuple[float, float | None]:
    """Median seconds of a step, and the most memory that any rank had allocated."""
    for _ in range(3):
        step()
    on_gpu = accelerator.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    slowest = accelerator.gather(torch.tensor([statistics.median(times)], device=accelerator.device)).max()
    if not on_gpu:
        return float(slowest), None
    peak = torch.tensor([torch.cuda.max_memory_allocated() / 2**30], device=accelerator.device)
    return float(slowest), float(accelerator.gather(peak).max())


def communication_share(step: Step) -> tuple[float, float]:
    """Share of a step's wall time that NCCL's kernels take on this rank, and take while nothing else runs."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        started = time.perf_counter()
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    kernels = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    spans = [[(event.time_range.start, event.time_range.end) for event in kernels
              if event.name.startswith("nccl") == of_nccl] for of_nccl in (True, False)]
    communication, other, either = covered(spans[0]), covered(spans[1]), covered(spans[0] + spans[1])
    return communication / 1e6 / seconds, (either - other) / 1e6 / seconds


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def cell(value: float | int | str | None) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

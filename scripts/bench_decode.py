"""Tokens/s of plain and speculative decoding in one engine, and the time of every part of a round.

    python scripts/bench_decode.py --target TARGET --draft EXPORT STATIC_EXPORT --prompts spec_bench.jsonl \\
        --num-prompts 80 --shapes 3 7 8x10x60 --json decode.json
    python scripts/bench_decode.py --random --vocab-size 151936 --layers 36 --shapes 7   # Qwen3-8B's shape
    python scripts/bench_decode.py --tiny                                                # seconds, any machine

Every draft is measured with each head that it has: the full one and the speculated vocabulary, or the static head that
it was trained or pruned to (scripts/trim_vocab.py). A shape is a chain's length, or DEPTHxTOP_KxTOKENS of a dynamic
tree. All decode the same prompts in turn, in one process, with the same graphs; seconds include the prefill. Greedy
outputs are compared with the plain one, and where one differs, the gap between the target's two best logits there is
printed: rounding for a tie. ``--random`` makes target and drafts of random weights: their times are those of the
shape, their acceptance means nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from specvocab_kernels.timing import median_ms
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data_gen.chat import encode_prompt
from data_gen.prompts import load_prompts
from specvocab_model.config import ConfigError, DraftConfig, HeadConfig, TargetConfig
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.engine import DecodeEngine, DraftShape
from specvocab_model.evaluation import Difference, Measurement, first_difference
from specvocab_model.heads import build_head
from specvocab_model.sampling import Sampling
from specvocab_model.target import TORCH_DTYPES, Target, default_feature_layers, load_spec
from specvocab_model.target_spec import TargetSpec

REPEATS = 20  # of a part; the median counts
NO_EOS = -1  # random targets never stop
ROPE = {"rope_type": "default", "rope_theta": 1e6}


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.tiny:
        vars(args).update(random=True, vocab_size=211, hidden_size=48, intermediate_size=64, heads=[4, 2], head_dim=16,
                          layers=7, static_size=50, num_candidates=32, num_prompts=2, prompt_tokens=9,
                          max_new_tokens=12, shapes=[DraftShape(3), DraftShape(3, 3, 8)], dtype="float32")
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    try:
        target, drafts, prompts = random_setting(args, device) if args.random else real_setting(args, device)
        report = measure(args, target, drafts, prompts)
    except ConfigError as error:
        raise SystemExit(f"bench_decode: {error}") from error
    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or hub id")
    parser.add_argument("--gguf-file", help="in the target's folder")
    parser.add_argument("--draft", nargs="+", type=Path, default=[], help="exported checkpoints")
    parser.add_argument("--prompts", type=Path, help="jsonl, as eval.prompts; the first turn of each is answered")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded at a time")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[DraftShape(7), DraftShape(8, 10, 60)])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", choices=sorted(TORCH_DTYPES), default="bfloat16")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel anew")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--random", action="store_true", help="random weights of the shape that follows")
    parser.add_argument("--tiny", action="store_true", help="the same, tiny")
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--intermediate-size", type=int, default=12288)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="attention heads, key-value heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--static-size", type=int, default=32768)
    parser.add_argument("--num-candidates", type=int, default=2048)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    return parser


def parse_shape(text: str) -> DraftShape:
    try:
        return DraftShape(*map(int, text.split("x")))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a chain's length nor DEPTHxTOP_KxTOKENS: {error}"
                                         ) from error


Setting = tuple[Target, dict[str, SpecVocabDraft], list[list[int]]]


def real_setting(args: argparse.Namespace, device: torch.device) -> Setting:
    """Target, drafts and prompts from disk.

    Raises:
        ConfigError: something is missing or does not belong together.
    """
    if not (args.target and args.draft and args.prompts):
        raise ConfigError("--target, --draft and --prompts are all needed, or --random or --tiny")
    config = TargetConfig(model=args.target, gguf_file=args.gguf_file, dtype=args.dtype)
    spec = load_spec(config)
    drafts = {folder.name if folder.name != "export" else folder.parent.name:
              SpecVocabDraft.from_pretrained(folder, target_spec=spec) for folder in args.draft}
    layers = {model.architecture.feature_layers for model in drafts.values()}
    if len(layers) > 1 or len(drafts) < len(args.draft):
        raise ConfigError(f"the drafts need names of their own and the same feature layers of the target, but read "
                          f"{sorted(layers)} under the names {', '.join(drafts)}; measure them one by one")
    target = Target.load(config, device=device, feature_layers=layers.pop())
    prompts = [encode_prompt(target.tokenizer, prompt.conversation([]), {})
               for prompt in load_prompts(args.prompts, args.num_prompts)]
    return target, drafts, prompts


def random_setting(args: argparse.Namespace, device: torch.device) -> Setting:
    """A Qwen3 of the given shape and two drafts, with a speculator and with a static head, all of random weights."""
    torch.manual_seed(0)
    heads, kv_heads = args.heads
    shape: dict[str, Any] = {
        "vocab_size": args.vocab_size, "hidden_size": args.hidden_size, "intermediate_size": args.intermediate_size,
        "num_hidden_layers": args.layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": args.head_dim, "max_position_embeddings": 40960,
    }
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(
            Qwen3Config(**shape, rope_parameters=ROPE, tie_word_embeddings=False), dtype=TORCH_DTYPES[args.dtype])
    spec = TargetSpec(
        **shape, name="random", model_type="qwen3", rms_norm_eps=1e-6, rope_parameters=ROPE, eos_token_ids=(NO_EOS,),
        pad_token_id=0, logit_softcap=None, logit_scale=1.0, fingerprint="random")
    target = Target(spec, model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())),
                    default_feature_layers(args.layers))
    kinds = {"speculative": HeadConfig(num_candidates=args.num_candidates),
             "static": HeadConfig(type="static", draft_vocab_size=args.static_size)}
    drafts = {name: SpecVocabDraft.build(spec, DraftConfig(), head) for name, head in kinds.items()}
    numbers = random.Random(0)
    prompts = [[numbers.randrange(args.vocab_size) for _ in range(args.prompt_tokens)] for _ in range(args.num_prompts)]
    return target, drafts, prompts


def measure(
    args: argparse.Namespace, target: Target, drafts: dict[str, SpecVocabDraft], prompts: list[list[int]]
) -> dict[str, Any]:
    """What is printed, as JSON types.

    Raises:
        ConfigError: a head does not suit a shape.
    """
    options: dict[str, Any] = {
        "capacity": max(map(len, prompts)) + args.max_new_tokens, "batch_size": args.batch,
        "sampling": Sampling(temperature=args.temperature), "graphs": not args.no_graphs,
    }
    engines = {"autoregressive": DecodeEngine(target, **options)}
    for name, model in drafts.items():
        place_draft(model, target)
        kind = model.head_config.type
        for head in dict.fromkeys(["full", kind] if kind == "speculative" else [kind]):
            made = build_head(head, target, model)
            for shape in args.shapes:
                label = f"{name} {head} {name_of(shape)}"
                engines[label] = DecodeEngine(target, model, made, shape=shape, **options)
    measured = decode(args, target, engines, prompts)
    plain = measured["autoregressive"].tokens_per_second
    length = max(map(len, prompts)) + args.max_new_tokens // 2
    return {
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else "CPU",
        "torch": torch.__version__, "target": target.spec.name, "dtype": args.dtype, "batch": args.batch,
        "temperature": args.temperature, "num_prompts": len(prompts), "max_new_tokens": args.max_new_tokens,
        "results": {
            name: measured[name].to_dict() | {"speed_up": measured[name].tokens_per_second / plain,
                                              "milliseconds": times(engine, length)}
            for name, engine in engines.items()
        },
    }


def decode(
    args: argparse.Namespace, target: Target, engines: dict[str, DecodeEngine], prompts: list[list[int]]
) -> dict[str, Measurement]:
    """All engines on every batch in turn, after a pass over the shortest and the longest that captures the graphs."""
    batches = [prompts[start : start + args.batch] for start in range(0, len(prompts), args.batch)]
    by_length = sorted(batches, key=lambda batch: max(map(len, batch)))
    for batch in (by_length[0], by_length[-1]):
        for engine in engines.values():
            engine.generate(batch, max_new_tokens=args.max_new_tokens)
    measured = {name: Measurement() for name in engines}
    for number, batch in enumerate(batches):
        plain: list[list[int]] = []
        for name, engine in engines.items():
            generator = torch.Generator(target.device).manual_seed(number)
            start = time.perf_counter()
            outputs = engine.generate(batch, max_new_tokens=args.max_new_tokens, generator=generator)
            seconds = time.perf_counter() - start
            plain = plain or [output.sequences for output in outputs]
            for prompt, output, expected in zip(batch, outputs, plain, strict=True):
                measured[name].add("all", output, seconds / len(batch))
                if not args.temperature and output.sequences != expected:
                    input_ids = torch.tensor([prompt], device=target.device)
                    position, gap = first_difference(target, input_ids, expected, output.sequences)
                    measured[name].differences.append(
                        Difference(id=str(prompts.index(prompt)), turn=0, position=position, top2_gap=gap))
    return measured


def times(engine: DecodeEngine, length: int) -> dict[str, float]:
    """Median milliseconds of each part of a round, the text ``length`` tokens long."""
    on_gpu = engine.target.device.type == "cuda"
    return {name: median_ms(part, REPEATS, on_gpu=on_gpu) for name, part in engine.parts(length).items()}


def name_of(shape: DraftShape) -> str:
    return f"chain {shape.depth}" if shape.is_chain else f"tree {shape.depth}x{shape.top_k}x{shape.num_tokens}"


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['target']}, {report['dtype']}, {report['device']}, batch {report['batch']}, temperature "
        f"{report['temperature']}, {report['num_prompts']} prompts, up to {report['max_new_tokens']} new tokens",
        f"{'':44}{'τ':>7}{'tokens/s':>11}{'speed-up':>10}{'verify':>9}{'draft':>9}{'head':>9}  ms",
    ]
    for name, result in report["results"].items():
        parts = "".join(f"{result['milliseconds'][part]:9.3f}" if part in result["milliseconds"] else f"{'':9}"
                        for part in ("verify", "draft", "head"))
        lines.append(f"{name:44}{result['tau']:7.2f}{result['tokens_per_second']:11.1f}{result['speed_up']:10.2f}{parts}")
    for name, result in report["results"].items():
        lines += [f"{name}: leaves the plain output at new token {found['position']} of prompt {found['id']}, where "
                  f"the target's two best logits are {found['top2_gap']:.2g} apart" for found in result["differences"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

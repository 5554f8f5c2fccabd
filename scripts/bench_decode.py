"""Tokens/s of plain and speculative decoding in one engine, and the time of every part of a round.

    python scripts/bench_decode.py --target TARGET --draft EXPORT STATIC_EXPORT --prompts spec_bench.jsonl \\
        --num-prompts 80 --shapes 3 7 8x10x60 --json decode.json
    python scripts/bench_decode.py --random --vocab-size 151936 --layers 36 --shapes 7   # Qwen3-8B's shape
    python scripts/bench_decode.py --tiny                                                # seconds, any machine

Every draft is measured with each head that it has: the full one and the speculated vocabulary, or the static head that
it was trained or pruned to (scripts/trim_vocab.py). Of several exports of one draft, ``--own-heads`` measures the full
head once. A speculated vocabulary is measured as such, also for batches so large that decoding would take the full
head, which is faster there. A shape is a chain's length, or DEPTHxTOP_KxTOKENS of a dynamic tree. All decode the same
turns one after the other, in one process, with the same graphs; seconds include the prefill. Where decoding is greedy,
turns whose answers are equally long share a batch. A later turn of a prompt follows on the target's greedy answers.
Greedy outputs are compared with the plain one; of every output that differs, the JSON has the gap between the target's
two best logits there: rounding for a tie.
``--plain-layers`` adds every engine with nothing compiled (specvocab_model/compiled_layers.py).
``--random`` makes target and drafts of random weights: their times are those of the shape, their acceptance means
nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from specvocab_kernels.timing import median_ms
from tokenizers import Tokenizer, models
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data_gen.chat import encode_prompt
from data_gen.files import writing
from data_gen.prompts import Prompt, load_prompts
from specvocab_model.config import ConfigError, DraftConfig, HeadConfig, TargetConfig
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.engine import DecodeEngine, DraftShape
from specvocab_model.evaluation import first_differences
from specvocab_model.heads import build_head
from specvocab_model.measurement import Difference, Measurement
from specvocab_model.options import draft_shape, positive, run_command, temperature
from specvocab_model.sampling import Sampling
from specvocab_model.target import TORCH_DTYPES, Target, default_feature_layers, load_spec
from specvocab_model.target_spec import TargetSpec

SMALLEST_STEP = 64  # tokens; widths of attention are further apart (engine/shapes.py)
REPEATS = 20  # of a part; the median counts
CONTEXT_BATCH = 16  # prompts answered at a time where only the answers count
NO_EOS = -1  # random targets never stop
RANDOM_PROMPTS = 4
ROPE = {"rope_type": "default", "rope_theta": 1e6}


def main(argv: Sequence[str] | None = None) -> None:
    run_command(build_parser(), benchmark, argv)


def benchmark(args: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: something is missing or does not belong together, or the figures cannot be written.
    """
    if args.tiny:
        vars(args).update(random=True, vocab_size=211, hidden_size=48, intermediate_size=64, heads=[4, 2], head_dim=16,
                          layers=7, static_size=50, num_candidates=32, num_prompts=2, prompt_tokens=9,
                          max_new_tokens=12, shapes=[DraftShape(3), DraftShape(3, 3, 8)], dtype="float32")
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    if args.json:
        with writing(args.json):  # no figures are lost to a folder that is not there
            args.json.parent.mkdir(parents=True, exist_ok=True)
    target, drafts, turns = random_setting(args, device) if args.random else real_setting(args, device)
    report = measure(args, target, drafts, turns)
    print(table(report))
    if args.json:
        with writing(args.json):
            args.json.write_text(json.dumps(report, indent=2) + "\n")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or hub id")
    parser.add_argument("--gguf-file", help="in the target's folder")
    parser.add_argument("--draft", nargs="+", type=Path, default=[], help="exported checkpoints")
    parser.add_argument("--own-heads", action="store_true", help="the full head of the first draft only")
    parser.add_argument("--prompts", type=Path, help="jsonl, as eval.prompts")
    parser.add_argument("--num-prompts", type=positive, help="so many, evenly spaced over the file; by default all")
    parser.add_argument("--max-new-tokens", type=positive, default=256)
    parser.add_argument("--batch", type=positive, default=1, help="turns decoded at a time")
    parser.add_argument("--shapes", nargs="+", type=draft_shape, default=[DraftShape(7), DraftShape(8, 10, 60)])
    parser.add_argument("--temperature", type=temperature, default=Sampling(), help="0 is greedy")
    parser.add_argument("--dtype", choices=sorted(TORCH_DTYPES), default="bfloat16")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel anew")
    parser.add_argument("--plain-layers", action="store_true", help="also with nothing compiled")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--random", action="store_true", help="random weights of the shape that follows")
    parser.add_argument("--tiny", action="store_true", help="the same, tiny")
    parser.add_argument("--vocab-size", type=positive, default=151936)
    parser.add_argument("--hidden-size", type=positive, default=4096)
    parser.add_argument("--intermediate-size", type=positive, default=12288)
    parser.add_argument("--heads", type=positive, nargs=2, default=[32, 8], help="attention heads, key-value heads")
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--layers", type=positive, default=36)
    parser.add_argument("--static-size", type=positive, default=32768)
    parser.add_argument("--num-candidates", type=positive, default=2048)
    parser.add_argument("--prompt-tokens", type=positive, default=200)
    return parser


@dataclass(frozen=True, slots=True)
class Turn:
    """What is answered: a prompt's question, after the answers to the questions before it."""

    id: str
    category: str
    number: int
    prompt_ids: list[int]


Setting = tuple[Target, dict[str, SpecVocabDraft], list[Turn]]


def real_setting(args: argparse.Namespace, device: torch.device) -> Setting:
    """Target, drafts and prompts from disk.

    Raises:
        ConfigError: something is missing or does not belong together.
    """
    if not (args.target and args.draft and args.prompts):
        raise ConfigError("--target, --draft and --prompts are all needed, or --random or --tiny")
    config = TargetConfig(model=args.target, gguf_file=args.gguf_file, dtype=args.dtype)
    spec = load_spec(config)
    drafts = {folder.name if folder.name not in ("export", "pruned") else folder.parent.name:
              SpecVocabDraft.from_pretrained(folder, target_spec=spec) for folder in args.draft}
    layers = {model.architecture.feature_layers for model in drafts.values()}
    if len(layers) > 1 or len(drafts) < len(args.draft):
        raise ConfigError(f"the drafts need names of their own and the same feature layers of the target, but read "
                          f"{sorted(layers)} under the names {', '.join(drafts)}; measure them one by one")
    target = Target.load(config, device=device, feature_layers=layers.pop())
    prompts = load_prompts(args.prompts)
    count = min(args.num_prompts or len(prompts), len(prompts))
    spaced = [prompts[number * len(prompts) // count] for number in range(count)]
    return target, drafts, turns_of(target, spaced, args)


def turns_of(target: Target, prompts: Sequence[Prompt], args: argparse.Namespace) -> list[Turn]:
    """All turns of all prompts, each with the greedy answers to the ones before it."""
    turns: list[Turn] = []
    answers: dict[str, list[str]] = {prompt.id: [] for prompt in prompts}
    open_prompts = list(prompts)
    for number in range(max(prompt.num_turns for prompt in prompts)):
        if number:
            going_on = {prompt.id for prompt in open_prompts}
            before = [turn for turn in turns if turn.number == number - 1 and turn.id in going_on]
            answer_all(target, before, answers, args)
        turns += [Turn(prompt.id, prompt.category, number,
                       encode_prompt(target.tokenizer, prompt.conversation(answers[prompt.id]), tools=prompt.tools))
                  for prompt in open_prompts]
        open_prompts = [prompt for prompt in open_prompts if prompt.num_turns > number + 1]
    return turns


def answer_all(
    target: Target, turns: Sequence[Turn], answers: dict[str, list[str]], args: argparse.Namespace
) -> None:
    """Add the target's greedy answer to every turn; those of like length share a batch."""
    ordered = sorted(turns, key=lambda turn: len(turn.prompt_ids))
    capacity = len(ordered[-1].prompt_ids) + args.max_new_tokens
    batch_size = min(CONTEXT_BATCH, len(ordered))
    engine = DecodeEngine(target, capacity=capacity, batch_size=batch_size, graphs=not args.no_graphs)
    for start in range(0, len(ordered), batch_size):
        batch = ordered[start : start + batch_size]
        outputs = engine.generate([turn.prompt_ids for turn in batch], max_new_tokens=args.max_new_tokens)
        for turn, output in zip(batch, outputs, strict=True):
            answers[turn.id].append(str(target.tokenizer.decode(output.sequences, skip_special_tokens=True)))


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
    turns = [Turn(str(number), "random", 0, [numbers.randrange(args.vocab_size) for _ in range(args.prompt_tokens)])
             for number in range(args.num_prompts or RANDOM_PROMPTS)]
    return target, drafts, turns


def measure(
    args: argparse.Namespace, target: Target, drafts: dict[str, SpecVocabDraft], turns: Sequence[Turn]
) -> dict[str, Any]:
    """What is printed, as JSON types.

    Raises:
        ConfigError: a head does not suit a shape.
    """
    longest = max(len(turn.prompt_ids) for turn in turns)
    options: dict[str, Any] = {
        "capacity": longest + args.max_new_tokens, "batch_size": args.batch,
        "sampling": args.temperature, "graphs": not args.no_graphs,
    }
    engines: dict[str, DecodeEngine] = {}
    parts: dict[str, dict[str, str]] = {}
    for compile, layers in [(True, ""), (False, ", plain layers")][: 1 + args.plain_layers]:
        engines[f"autoregressive{layers}"] = DecodeEngine(target, **options, compile=compile)
        parts[f"autoregressive{layers}"] = {}
        for number, (name, model) in enumerate(drafts.items()):
            place_draft(model, target)
            kind = model.head_config.type
            for head in ["full", kind] if kind == "speculative" and (number == 0 or not args.own_heads) else [kind]:
                # Many rows at a time are faster with the full head; what is called speculative must be that.
                made = build_head(head, target, model, **({"impl": "candidates"} if head == "speculative" else {}))
                for shape in args.shapes:
                    label = f"{name} {head} {name_of(shape)}{layers}"
                    parts[label] = {"draft": name, "head": head, "shape": name_of(shape)}
                    engines[label] = DecodeEngine(target, model, made, shape=shape, **options, compile=compile)
    measured = decode(args, target, engines, turns)
    baseline = measured["autoregressive"].tokens_per_second
    length = sum(len(turn.prompt_ids) for turn in turns) // len(turns) + args.max_new_tokens // 2
    return {
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else "CPU",
        "torch": torch.__version__, "target": target.spec.name, "dtype": args.dtype, "batch": args.batch,
        "temperature": args.temperature.temperature, "num_turns": len(turns), "max_new_tokens": args.max_new_tokens,
        "results": {
            label: parts[label] | measured[label].to_dict() | {
                "speed_up": measured[label].tokens_per_second / baseline, "milliseconds": times(engine, length)}
            for label, engine in engines.items()
        },
    }


def decode(
    args: argparse.Namespace, target: Target, engines: dict[str, DecodeEngine], turns: Sequence[Turn]
) -> dict[str, Measurement]:
    """All engines on every batch in turn, after the graphs of all lengths are captured."""
    batches = split(turns, [len(turn.prompt_ids) for turn in turns], args.batch)
    measured = {name: Measurement() for name in engines}
    for engine in tqdm(engines.values(), unit="engine", desc="warming up"):
        warm_up(engine, batches, args.max_new_tokens)
    if args.batch > 1 and args.temperature.greedy:
        batches = alike(engines["autoregressive"], batches, args.max_new_tokens)
    for number, batch in enumerate(tqdm(batches, unit="batch", desc="decoding")):
        answers: dict[str, list[list[int]]] = {}  # plain decoding's are the first
        for name, engine in engines.items():
            generator = torch.Generator(target.device).manual_seed(number)
            start = time.perf_counter()
            outputs = engine.generate([turn.prompt_ids for turn in batch], max_new_tokens=args.max_new_tokens,
                                      generator=generator)
            seconds = time.perf_counter() - start
            for turn, output in zip(batch, outputs, strict=True):
                measured[name].add(turn.category, output, seconds / len(batch))
            answers[name] = [output.sequences for output in outputs]
        if args.temperature.greedy:
            note_differences(target, batch, answers, measured)
    return measured


def split(turns: Sequence[Turn], sizes: Sequence[int], batch_size: int) -> list[list[Turn]]:
    """Batches of turns of about the same size; one at a time, in their own order."""
    order = sorted(range(len(turns)), key=sizes.__getitem__) if batch_size > 1 else range(len(turns))
    ordered = [turns[index] for index in order]
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


def alike(plain: DecodeEngine, batches: Sequence[Sequence[Turn]], max_new_tokens: int) -> list[list[Turn]]:
    """Batches of turns whose greedy answers are equally long: a batch takes as long as its longest answer."""
    turns = [turn for batch in batches for turn in batch]
    sizes = [len(output.sequences) for batch in tqdm(batches, unit="batch", desc="lengths of answers")
             for output in plain.generate([turn.prompt_ids for turn in batch], max_new_tokens=max_new_tokens)]
    return split(turns, sizes, len(batches[0]))


def note_differences(
    target: Target, batch: Sequence[Turn], answers: dict[str, list[list[int]]], measured: dict[str, Measurement]
) -> None:
    """Where answers leave those of plain decoding, the first engine's."""
    expected = next(iter(answers.values()))
    for row, turn in enumerate(batch):
        others = {name: rows[row] for name, rows in answers.items() if rows[row] != expected[row]}
        if not others:
            continue
        input_ids = torch.tensor([turn.prompt_ids], device=target.device)
        found = first_differences(target, input_ids, expected[row], list(others.values()))
        for name, (position, gap) in zip(others, found, strict=True):
            measured[name].differences.append(
                Difference(id=turn.id, turn=turn.number, position=position, top2_gap=gap))


def warm_up(engine: DecodeEngine, batches: Sequence[Sequence[Turn]], max_new_tokens: int) -> None:
    """Capture what these batches will ask for: reading prompts by generating a token, rounds of every length."""
    lengths = [max(len(turn.prompt_ids) for turn in batch) for batch in batches]
    longest = batches[lengths.index(max(lengths))]
    engine.generate([turn.prompt_ids for turn in longest], max_new_tokens=1)
    shortest = min(len(turn.prompt_ids) for batch in batches for turn in batch)
    for length in range(shortest, max(lengths) + max_new_tokens, SMALLEST_STEP):
        for part in engine.parts(length).values():
            part()


def times(engine: DecodeEngine, length: int) -> dict[str, float]:
    """Median milliseconds of each part of a round, the text ``length`` tokens long."""
    on_gpu = engine.target.device.type == "cuda"
    return {name: median_ms(part, REPEATS, on_gpu=on_gpu) for name, part in engine.parts(length).items()}


def name_of(shape: DraftShape) -> str:
    return f"chain {shape.depth}" if shape.is_chain else f"tree {shape.depth}x{shape.top_k}x{shape.num_tokens}"


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['target']}, {report['dtype']}, {report['device']}, batch {report['batch']}, temperature "
        f"{report['temperature']}, {report['num_turns']} turns, up to {report['max_new_tokens']} new tokens",
        f"{'':44}{'τ':>7}{'tokens/s':>11}{'speed-up':>10}{'verify':>9}{'draft':>9}{'head':>9}  ms",
    ]
    for name, result in report["results"].items():
        parts = "".join(f"{result['milliseconds'][part]:9.3f}" if part in result["milliseconds"] else f"{'':9}"
                        for part in ("verify", "draft", "head"))
        lines.append(f"{name:44}{result['tau']:7.2f}{result['tokens_per_second']:11.1f}{result['speed_up']:10.2f}{parts}")
    for name, result in report["results"].items():
        if result["differences"]:
            gap = max(found["top2_gap"] for found in result["differences"])
            lines.append(f"{name}: {len(result['differences'])} of {report['num_turns']} outputs leave the plain one, "
                         f"where the target's two best logits are at most {gap:.2g} apart")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

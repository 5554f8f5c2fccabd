"""Find the vocabulary head that makes a draft fastest on this device without losing acceptance.

    python scripts/tune_head.py CHECKPOINT --target MODEL --data FOLDER [--train-data FOLDER] [--apply]
    python scripts/tune_head.py --table --target MODEL --data FOLDER [CHECKPOINT]
    python scripts/tune_head.py --latency-only --shapes 151936x4096,49152x576 --output FOLDER

The draft is unrolled over FOLDER once, a data set that it was not trained on. Candidate recall and simulated acceptance
length τ of every (rank, tile, keep, precision), and with --train-data of every static vocabulary, are then read off
its states, and the head's time is measured: CUDA graph replays on a GPU, plain calls on a CPU. Optuna's TPE searches
the largest predicted speed

    ρ = ρ_τ (1 + κ) / (1 + ν κ)

among heads with ρ_τ >= --min-tau-ratio. ρ_τ is the head's simulated τ over the full head's, ν its time over the full
head's, and κ the time of a round's full draft heads over that of the rest of the round (target, target's logits, draft
layers), measured with this repository's decoding unless --kappa gives an engine's. Ranks below the trained one are its
best approximations on a fifth of the documents, which then judge nothing.

--table prints recall over a grid instead; without a CHECKPOINT it is that of the target's own hidden states under a
calibrated speculator. --latency-only measures heads of random weights; its file, given as --latencies on another
machine, replaces measuring there and limits the search to its heads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data_gen.shards import load_rows, supervised_ids
from specvocab_model.config import DTYPES, ConfigError, TargetConfig
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.draft_states import DraftStates, collect_draft_states, collect_target_states
from specvocab_model.export import Provenance, load_checkpoint, save_checkpoint
from specvocab_model.options import positive, run_command, seed, usable_device
from specvocab_model.speculator import VocabSpeculator
from specvocab_model.target import TORCH_DTYPES, Target, TargetSpec, load_spec
from specvocab_model.tuning import latency, report
from specvocab_model.tuning.choices import Choice, Judge, LowerRanks, StaticChoice, calibrated_ranks
from specvocab_model.tuning.search import Costs, Outcome, Space, best_of, pareto_front, search
from specvocab_model.vocab import count_ids

SHAPING = 5  # every fifth document shapes the lower ranks and judges nothing
FRACTIONS = (1.0, 0.75, 0.5, 0.25)  # of the trained rank
TABLE_TOPS = (256, 512, 1024, 2048)


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(build_parser(), choose_action, arguments)


def choose_action(options: argparse.Namespace) -> None:
    """Measure latencies alone, print a table of them, or tune."""
    check(options)
    if options.latency_only:
        measure_latencies(options)
    elif options.table:
        print_table(options)
    else:
        tune(options)


def build_parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("checkpoint", nargs="?", help="folder of an exported draft whose vocab_proj is not in 8 bits")
    parser.add_argument("--target", help="hub id or folder")
    parser.add_argument("--gguf-file", help="GGUF file in that folder")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--device", type=usable_device, default="cuda" if on_gpu else "cpu")
    parser.add_argument("--data", help="data set that judges; not the training data")
    parser.add_argument("--train-data", help="data set whose token counts cut static vocabularies")
    parser.add_argument("--num-tokens", type=positive, default=8192, help="judged tokens of the data set")
    parser.add_argument("--ranks", type=integers, help="by default the trained rank and fractions of it")
    parser.add_argument("--batch", type=positive, default=1, help="rows of a head's call that is timed")
    parser.add_argument("--num-draft-tokens", type=positive, default=5, help="of a round, for κ")
    parser.add_argument("--context", type=positive, default=512, help="cached tokens of a round, for κ")
    parser.add_argument("--kappa", type=float, help="κ of an engine, in the place of measuring it")
    parser.add_argument("--min-tau-ratio", type=float, default=0.995)
    parser.add_argument("--trials", type=positive, default=200)
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--output", default="outputs/tune_head", help="folder of the JSON and SVG files")
    parser.add_argument("--apply", action="store_true", help="write the chosen head into CHECKPOINT")
    parser.add_argument("--table", action="store_true", help="only recall, over a grid")
    parser.add_argument("--latencies", help="file of --latency-only from the device that the head is chosen for")
    parser.add_argument("--latency-only", action="store_true", help="only times, of random weights")
    parser.add_argument("--shapes", type=shapes, default=[(151936, 4096)], help="VxD,VxD,... for --latency-only")
    return parser


def integers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def shapes(text: str) -> list[tuple[int, int]]:
    pairs = [[positive(size) for size in part.split("x")] for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} must be like 151936x4096,49152x576")
    return [(vocab_size, hidden_size) for vocab_size, hidden_size in pairs]


def check(options: argparse.Namespace) -> None:
    """Options that need each other.

    Raises:
        ConfigError: one is missing, or the search's library is.
    """
    if options.latency_only:
        return
    needed = ("target", "data") if options.table else ("checkpoint", "target", "data")
    missing = [name for name in needed if getattr(options, name) is None]
    if missing:
        raise ConfigError(f"give {', '.join(missing)}, or --latency-only; see --help")
    if options.latencies and options.kappa is None:
        raise ConfigError("--latencies are of another device, so κ cannot be measured here; give its --kappa")
    if not options.table and find_spec("optuna") is None:
        raise ConfigError("the search needs optuna: pip install 'specvocab[tune]'")


def tune(options: argparse.Namespace) -> None:
    """Search, print, write, and apply where asked.

    Raises:
        ConfigError: checkpoint, target and data do not fit, or no head loses little enough.
    """
    target, model, states, ranks = load(options)
    assert model is not None
    judge = Judge(states, model.lm_head_weight(target), ranks, token_counts(options, target.spec))
    space, costs = search_space(options, judge, states, model, target)
    outcomes = search(space, judge, costs, min_tau_ratio=options.min_tau_ratio, num_trials=options.trials,
                      seed=options.seed)
    best, front = best_of(outcomes, options.min_tau_ratio), pareto_front(outcomes)
    print(f"{states.num_valid} positions, full head: simulated τ {judge.full_tau:.3f}, {costs.full * 1e6:.1f} µs, "
          f"κ {costs.kappa:.3f}; {len(outcomes)} heads tried, Pareto front:")
    print(report.table(front if best is None or best in front else [*front, best], best))
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "options": vars(options), "device": device_name(options), "num_positions": states.num_valid,
        "full": {"simulated_tau": judge.full_tau, "seconds": costs.full}, "kappa": costs.kappa,
        "best": None if best is None else record_of(best), "front": [record_of(one) for one in front],
        "outcomes": [record_of(one) for one in outcomes],
    }
    (output / "tune_head.json").write_text(json.dumps(result, indent=2) + "\n")
    (output / "tune_head.svg").write_text(report.picture(outcomes, front, best, options.min_tau_ratio))
    print(f"written to {output / 'tune_head.json'} and {output / 'tune_head.svg'}")
    if best is None:
        raise ConfigError(f"no head tried reaches {options.min_tau_ratio} of the full head's τ; raise --trials, lower "
                          "--min-tau-ratio or train with a larger head.rank")
    print(f"best: {best.choice}, predicted speed {best.speed:.3f} of the full head's")
    if options.apply:
        apply(Path(options.checkpoint), best.choice, ranks, target.spec, result["best"])


def load(
    options: argparse.Namespace,
) -> tuple[Target, SpecVocabDraft | None, DraftStates, dict[int, tuple[Tensor, Tensor]]]:
    """Target, draft if there is one, states that judge, and the two factors of every rank."""
    target_config = TargetConfig(model=options.target, gguf_file=options.gguf_file, dtype=options.dtype)
    model = None if options.checkpoint is None else load_checkpoint(options.checkpoint, load_spec(target_config))
    layers = None if model is None else model.architecture.feature_layers
    target = Target.load(target_config, device=options.device, feature_layers=layers)
    rows = load_rows(options.data)
    order = np.random.default_rng(options.seed).permutation(len(rows)).tolist()
    judging = [index for number, index in enumerate(order) if number % SHAPING]
    shaping, num_shaping = order[::SHAPING], max(1, options.num_tokens // (SHAPING - 1))

    def documents(indices: list[int]) -> Iterator[Any]:
        return (rows[index] for index in indices)

    if model is None:
        states = collect_target_states(target, documents(judging), options.num_tokens)
        shapers = collect_target_states(target, documents(shaping), num_shaping).hidden[0]
        wanted = options.ranks or [max(1, target.spec.hidden_size // part) for part in (16, 8)]
        if max(wanted) > target.spec.hidden_size:
            raise ConfigError(f"--ranks {max(wanted)} is above the target's hidden_size {target.spec.hidden_size}; a "
                              "larger rank than that adds nothing")
        return target, None, states, calibrated_ranks(target.lm_head_weight, shapers, wanted)
    if model.speculator is None:
        raise ConfigError(f"{options.checkpoint} has no vocabulary speculator; add one with scripts/convert.py")
    place_draft(model, target)
    steps = model.architecture.num_unroll_steps
    states = collect_draft_states(target, model, documents(judging), num_steps=steps, num_tokens=options.num_tokens)
    shape = collect_draft_states(target, model, documents(shaping), num_steps=steps, num_tokens=num_shaping)
    lower = LowerRanks(model.speculator, shape.hidden[shape.rows.valid])
    trained = model.speculator.rank
    wanted = options.ranks or {max(1, round(trained * fraction)) for fraction in FRACTIONS}
    if max(wanted) > trained:
        raise ConfigError(f"--ranks {max(wanted)} is above the trained rank {trained}")
    return target, model, states, {rank: lower(rank) for rank in sorted(wanted)}


def token_counts(options: argparse.Namespace, spec: TargetSpec) -> Tensor | None:
    """How often the target wrote each token of the training data, [V]."""
    if options.train_data is None:
        print("no --train-data: static vocabularies are not compared")
        return None
    return count_ids(supervised_ids(options.train_data), spec.vocab_size)


def search_space(
    options: argparse.Namespace, judge: Judge, states: DraftStates, model: SpecVocabDraft, target: Target
) -> tuple[Space, Costs]:
    """What is searched and what it costs: measured here, or read from ``--latencies``."""
    lm_head = judge.lm_head
    sizes = [lm_head.shape[0] // part for part in (32, 16, 8, 4, 2)] if options.train_data else []
    if options.latencies:
        full, known = latency.read(Path(options.latencies), tuple(lm_head.shape), options.batch)
        listed = [choice for choice in known if judge.can_judge(choice)]
        if not listed:
            raise ConfigError(f"{options.latencies} has no head of rank {', '.join(map(str, judge.ranks))}; give "
                              "ranks that it has with --ranks")
        return Space(listed=listed), Costs(full=full, kappa=options.kappa, of_choice=known.__getitem__)

    hidden = states.hidden[states.rows.valid][: options.batch].contiguous()

    def seconds(choice: Choice) -> float:
        if isinstance(choice, StaticChoice):
            return latency.dense_seconds(lm_head[: choice.size], hidden)
        return latency.speculative_seconds(judge.weights(choice), hidden)

    full, kappa = latency.dense_seconds(lm_head, hidden), options.kappa
    if kappa is None:
        rest = latency.rest_of_round_seconds(target, model, num_draft_tokens=options.num_draft_tokens,
                                             context=options.context)
        kappa = options.num_draft_tokens * full / rest
    space = Space(ranks=tuple(judge.ranks), static_sizes=[size for size in sizes if size])
    return space, Costs(full=full, kappa=kappa, of_choice=seconds)


def apply(
    folder: Path, choice: Choice, ranks: dict[int, tuple[Tensor, Tensor]], spec: TargetSpec, tuning: dict[str, Any]
) -> None:
    """Replace the checkpoint's speculator. ``scripts/export.py`` brings the trained one back.

    Raises:
        ConfigError: the choice is a static vocabulary.
    """
    if isinstance(choice, StaticChoice):
        raise ConfigError(f"the best head is {choice}, and --apply writes speculators; leave out --train-data to "
                          "search these alone")
    model = load_checkpoint(folder, spec)
    dtype = model.draft.fc.weight.dtype
    down_proj, vocab_proj = (factor.cpu() for factor in ranks[choice.rank])
    speculator = VocabSpeculator(spec.hidden_size, choice.rank, choice.selection(spec.vocab_size))
    speculator.down_proj.weight = nn.Parameter(down_proj)
    speculator.vocab_proj.weight = nn.Parameter(vocab_proj)
    if choice.quantization is not None:
        speculator.quantize(choice.quantization)
    model.speculator = speculator
    provenance = replace(Provenance.read(folder), candidate_recall=None, tuning=tuning)
    save_checkpoint(folder, model, spec, provenance, dtype=dtype)
    print(f"written into {folder}; measure it with scripts/evaluate.py")


def record_of(outcome: Outcome) -> dict[str, Any]:
    """JSON types."""
    return {"head": str(outcome.choice)} | asdict(outcome)


def print_table(options: argparse.Namespace) -> None:
    """Recall of exact and tile selections at every rank and precision."""
    target, model, states, ranks = load(options)
    judge = Judge(states, target.lm_head_weight if model is None else model.lm_head_weight(target), ranks)
    print(f"{states.num_valid} positions of {options.data}, {'draft' if model else 'target'} states, {options.dtype}; "
          f"simulated τ of the full head {judge.full_tau:.4f}")
    print(report.recall_table(judge, TABLE_TOPS, options.dtype, of_draft=model is not None))


def measure_latencies(options: argparse.Namespace) -> None:
    """Times of random heads of every shape, printed and written to ``latency.json``."""
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    measured = []
    for vocab_size, hidden_size in options.shapes:
        ranks = options.ranks or [max(16, hidden_size // part) for part in (16, 8)]
        choices = latency.grid(vocab_size, ranks)
        shape = latency.measure_shape(vocab_size, hidden_size, choices, batch=options.batch,
                                      dtype=TORCH_DTYPES[options.dtype], device=torch.device(options.device))
        measured.append(shape)
        print(f"V {vocab_size}, d {hidden_size}, B {options.batch}: full head {shape['full'] * 1e6:.1f} µs")
        for entry in shape["heads"]:
            print(f"  {entry['head']:40}{entry['seconds'] * 1e6:9.1f} µs, ν {entry['seconds'] / shape['full']:.3f}")
    record = {"device": device_name(options), "torch": torch.__version__, "dtype": options.dtype, "shapes": measured}
    (output / "latency.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {output / 'latency.json'}")


def device_name(options: argparse.Namespace) -> str:
    return torch.cuda.get_device_name(options.device) if torch.device(options.device).type == "cuda" else "cpu"


if __name__ == "__main__":
    main()

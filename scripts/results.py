"""Tables in Markdown of what scripts/reproduce.sh has measured: acceptance, speed, training, ablations.

    python scripts/results.py outputs/smollm2_135m_results --runs outputs/smollm2_135m --output results.md \\
        --ablations outputs/smollm2_135m_ablation_*

Every JSON file of scripts/bench_decode.py in the folder becomes a table of acceptance lengths by category and one of
times, every training run, and every ablation, a row with its last validation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from data_gen.files import writing
from specvocab_model.config import ConfigError
from specvocab_model.files import read_json, require_fields
from specvocab_model.options import run_command
from train.run_files import RunFiles, read_runs

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
VALIDATION = {  # column: metric
    "τ full": "validation/simulated_tau/full",
    "τ candidates": "validation/simulated_tau/candidates",
    "accuracy of step 0": "validation/accuracy/step_0",
    "recall, target's choice": "validation/candidate_recall/target_top1",
    "recall, draft's choice": "validation/candidate_recall/draft_top1",
}

Result = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of JSON files of bench_decode.py")
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help="output folders of training runs")
    parser.add_argument("--ablations", nargs="*", type=Path, default=[], help="the same, of short runs")
    parser.add_argument("--output", type=Path, help="file to write; by default the tables are printed")
    run_command(parser, write, argv)


def write(args: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: there is nothing to write about, a file is of another command, or the tables cannot be written.
    """
    files = sorted(args.folder.glob("*.json"))
    if not files and not args.runs and not args.ablations:
        raise ConfigError(f"{args.folder} holds no JSON file of scripts/bench_decode.py; measure first")
    sections = [section for file in files for section in decoding(file.stem, read_report(file))]
    if args.runs:
        sections += ["## Training", training(read_runs(args.runs))]
    if args.ablations:
        sections += ["## Ablations", training(read_runs(args.ablations))]
    text = "\n\n".join(sections) + "\n"
    if args.output:
        with writing(args.output):
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(text)
    else:
        print(text, end="")


def read_report(file: Path) -> dict[str, Any]:
    fix = "keep no JSON files there but those of scripts/bench_decode.py"
    report = read_json(file, fix)
    require_fields(report, {"results": dict, "num_turns": int}, file, fix)
    return report


def decoding(name: str, report: Mapping[str, Any]) -> list[str]:
    """What one run of bench_decode.py has measured."""
    results: Mapping[str, Result] = report["results"]
    drafted = {label: result for label, result in results.items() if "draft" in result}
    drawn = f"temperature {report['temperature']:g}" if report["temperature"] else "greedy"
    return [
        f"## {name}",
        f"{report['target']}, {report['dtype']}, {report['device']}, torch {report['torch']}, batch {report['batch']}, "
        f"{drawn}, {report['num_turns']} turns of up to {report['max_new_tokens']} new tokens.",
        acceptance(drafted), speed(results), *filter(None, [divergence(drafted, report["num_turns"])]),
    ]


def acceptance(results: Mapping[str, Result]) -> str:
    """Acceptance lengths; MT-Bench's eight categories are pooled, by tokens and forwards."""
    categories = {name for result in results.values() for name in result["tau_per_category"]}
    groups = sorted(categories - set(MT_BENCH)) + (["MT-Bench"] if categories & set(MT_BENCH) else [])

    def row(label: str, result: Result) -> list[str]:
        first = result["acceptance_per_position"][:1]  # none where every answer was one token: nothing was judged
        return [label, f"{result['tau']:.3f}", ratio(result, results.values()),
                f"{first[0]:.3f}" if first else "", *(f"{pooled(result, group):.2f}" for group in groups)]

    return markdown(["", "τ", "of the full head's", "first draft accepted", *groups],
                    (row(label, result) for label, result in results.items()))


def ratio(result: Result, results: Iterable[Result]) -> str:
    """τ against that of the first full head of the same shape."""
    full = next((other for other in results if (other["head"], other["shape"]) == ("full", result["shape"])), None)
    return "" if full is None else f"{result['tau'] / full['tau']:.4f}"


def pooled(result: Result, group: str) -> float:
    """τ of a category, or of MT-Bench's together."""
    names = [name for name in (MT_BENCH if group == "MT-Bench" else [group]) if name in result["tau_per_category"]]
    tokens = sum(result["num_tokens_per_category"][name] for name in names)
    forwards = sum(result["num_tokens_per_category"][name] / result["tau_per_category"][name] for name in names)
    return tokens / forwards if forwards else float("nan")


def speed(results: Mapping[str, Result]) -> str:
    """Tokens/s, and milliseconds of the parts of a round."""
    parts = ("verify", "draft", "head")

    def row(label: str, result: Result) -> list[str]:
        taken = (result["milliseconds"].get(part) for part in parts)
        return [label, f"{result['tokens_per_second']:.1f}", f"{result['speed_up']:.2f}",
                *("" if each is None else f"{each:.3f}" for each in taken)]

    return markdown(["", "tokens/s", "speed-up", *(f"{part}, ms" for part in parts)],
                    (row(label, result) for label, result in results.items()))


def divergence(results: Mapping[str, Result], num_turns: int) -> str:
    """In how many outputs rounding has decided otherwise than in plain decoding."""
    gaps = {label: [found["top2_gap"] for found in result["differences"]] for label, result in results.items()}
    return "\n".join(f"- {label}: {len(found)} of {num_turns} outputs leave the plain one, where the target's two best "
                     f"logits are at most {max(found):.2g} apart" for label, found in gaps.items() if found)


def training(runs: Iterable[RunFiles]) -> str:
    """What every run has seen, its speed, and its last validation."""
    columns: dict[str, Callable[[RunFiles], str]] = {
        "steps": lambda run: f"{run.num_steps}",
        "million tokens": lambda run: f"{seen_tokens(run) / 1e6:.1f}",
        "minutes": lambda run: f"{seconds(run) / 60:.1f}",
        "tokens/s": lambda run: value(run, "perf/tokens_per_second", "{:,.0f}"),
        "peak GiB": lambda run: value(run, "perf/peak_memory_gib", "{:.1f}"),
        **{name: partial(value, metric=metric, form="{:.4f}") for name, metric in VALIDATION.items()},
    }
    return markdown(["", *columns], ([run.label, *(column(run) for column in columns.values())] for run in runs))


def seen_tokens(run: RunFiles) -> float:
    """Prompt and response, padding left out."""
    return sum(rate * took * steps for rate, took, steps in logged_steps(run))


def seconds(run: RunFiles) -> float:
    return sum(took * steps for _, took, steps in logged_steps(run))


def logged_steps(run: RunFiles) -> list[tuple[float, float, int]]:
    """Tokens/s, seconds of a step and number of steps of every line that has them."""
    lines = [line for line in run.metrics if "perf/seconds_per_step" in line]
    before = [0, *(line["step"] for line in lines)]
    return [(line["perf/tokens_per_second"], line["perf/seconds_per_step"], line["step"] - start)
            for line, start in zip(lines, before, strict=False)]


def value(run: RunFiles, metric: str, form: str) -> str:
    last = run.last(metric)
    return "" if last is None else form.format(last)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()

"""One self-contained HTML page about one run or several, finished or under way, from the files in their folders.

    python scripts/report.py outputs/qwen3_8b
    python scripts/report.py outputs/qwen3_8b outputs/qwen3_8b_rank256 --output compare.html

Reads ``metrics.jsonl``, ``samples.jsonl``, ``config.yaml`` and ``run.json``; writes ``report.html`` in the first.
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Sequence
from pathlib import Path

from specvocab_model.config import ConfigError
from specvocab_model.options import run_command
from train.charts import COLORS, Line, chart, page, table
from train.run_files import RunFiles, read_runs

ACCURACY = "accuracy/step_"
# Title, metric, note; "train/" and "validation/" are put before it.
SPLIT_CHARTS = (
    ("Loss", "loss", "draft against the target's full distribution, mean over positions of all unroll steps"),
    ("Speculator's loss", "aux_loss", "the same for the vocabulary speculator"),
)
TAU_CHARTS = (
    ("Acceptance length τ, full head", "simulated_tau/full", "simulated: tokens per forward of the target"),
    ("Acceptance length τ, speculative head", "simulated_tau/candidates", "drafts may only name candidates"),
)
RECALL_CHARTS = (
    ("Candidate recall", "candidate_recall/target_top1", "the target's first choice is among the candidates"),
    ("Candidate recall of the draft", "candidate_recall/draft_top1", "the same for the draft's first choice"),
)
PLAIN_CHARTS = (
    ("Tokens per second", "perf/tokens_per_second", "without padding, all ranks together"),
    ("Valid tokens per second", "perf/valid_tokens_per_second", "positions that are judged at the first unroll step"),
    ("Model FLOPs utilisation", "perf/mfu", ""),
    ("Peak memory, GiB", "perf/peak_memory_gib", "of the rank that needs most"),
    ("Learning rate", "optim/lr", ""),
    ("Gradient norm", "optim/grad_norm", "before clipping"),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="outputs/RUN")
    parser.add_argument("--output", type=Path, help="file to write (default: report.html in the first folder)")
    run_command(parser, write, argv)


def write(options: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: a folder is not that of a run, or the page cannot be written.
    """
    output = options.output or options.folders[0] / "report.html"
    page_text = report(read_runs(options.folders))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page_text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error}; choose another --output") from error
    print(f"written to {output}")


def report(runs: Sequence[RunFiles]) -> str:
    """The page. Every chart holds all runs, each in a colour of its own."""
    title = " · ".join(run.label for run in runs)
    body = [f"<h1>{html.escape(title)}</h1>", "<div class='grid'>", *(tiles(run, index) for index, run in
            enumerate(runs)), "</div>", "<h2>Training</h2><div class='grid'>", *charts(runs), "</div>"]
    if any(run.samples for run in runs):
        body += ["<h2>Drafted text</h2><p class='soft'>Validation answers of the target. <mark>Marked</mark> tokens "
                 "were drafted and accepted, <del>struck out</del> is the first wrong draft of a round.</p>",
                 "<div class='grid'>", *(samples(run) for run in runs), "</div>"]
    body += ["<h2>Configuration</h2>", configuration(runs)]
    return page(title, "".join(body))


def tiles(run: RunFiles, index: int) -> str:
    """The run's newest numbers."""
    steps = run.metrics[-1]["step"] if run.metrics else 0
    state = "finished" if run.finished else "not finished"
    shown = [
        ("τ full head", "validation/simulated_tau/full", "train/simulated_tau/full"),
        ("τ speculative head", "validation/simulated_tau/candidates", "train/simulated_tau/candidates"),
        ("candidate recall", "validation/candidate_recall/target_top1", "train/candidate_recall/target_top1"),
        ("loss", "validation/loss", "train/loss"),
        ("tokens/s", "perf/tokens_per_second", ""),
        ("GiB at most", "perf/peak_memory_gib", ""),
    ]
    cells = []
    for name, first, second in shown:
        value = run.last(first)
        value = run.last(second) if value is None and second else value
        if value is not None:
            text = f"{value:.2%}" if "recall" in first else f"{value:,.0f}" if "tokens" in first else f"{value:.3f}"
            cells.append(f"<span><b>{text}</b>{name}</span>")
    key = f"<span class='key' style='background:{COLORS[index % len(COLORS)]}'></span>"
    return (f"<div class='card'><h3>{key}{html.escape(run.label)}</h3><p class='soft'>{state}, step {steps}</p>"
            f"<div class='tiles'>{''.join(cells)}</div></div>")


def charts(runs: Sequence[RunFiles]) -> list[str]:
    step = "optimizer step"
    taus = [value for run in runs for _, metric, _ in TAU_CHARTS
            for split in ("train", "validation") for _, value in run.points(f"{split}/{metric}")]
    both = (min(taus), max(taus)) if taus else ()  # the same axis, to compare the heads
    return [
        *(chart(title, split_lines(runs, name), x_label=step, note=note) for title, name, note in SPLIT_CHARTS),
        *(chart(title, split_lines(runs, name), x_label=step, note=note, y_range=both)
          for title, name, note in TAU_CHARTS),
        accuracy_chart(runs),
        *(chart(title, split_lines(runs, name), x_label=step, note=note) for title, name, note in RECALL_CHARTS),
        *(chart(title, [Line(label=run.label, points=run.points(name), color=index) for index, run in enumerate(runs)],
                x_label=step, note=note) for title, name, note in PLAIN_CHARTS),
    ]


def split_lines(runs: Sequence[RunFiles], metric: str) -> list[Line]:
    """Training, in the background, and validation of every run."""
    lines = []
    for index, run in enumerate(runs):
        for split in ("train", "validation"):
            label = split if len(runs) == 1 else f"{run.label}, {split}"
            judged = split == "validation"
            lines.append(Line(label=label, points=run.points(f"{split}/{metric}"), color=index, dots=judged,
                              faint=not judged))
    return lines


def accuracy_chart(runs: Sequence[RunFiles]) -> str:
    """One run: its steps over the course of training. Several: the newest values by step."""
    note = "of the draft's first choice, where all earlier steps were right"
    if len(runs) == 1:
        names = sorted({name for line in runs[0].metrics for name in line if name.startswith(f"train/{ACCURACY}")},
                       key=lambda name: int(name.rpartition("_")[2]))
        lines = [Line(label=f"step {name.rpartition('_')[2]}", points=runs[0].points(name), color=index)
                 for index, name in enumerate(names)]
        return chart("Accuracy by unroll step", lines, x_label="optimizer step", note=note)
    lines = [Line(label=run.label, points=last_accuracies(run), color=index, dots=True)
             for index, run in enumerate(runs)]
    return chart("Accuracy by unroll step", lines, x_label="unroll step", note=note)


def last_accuracies(run: RunFiles) -> list[tuple[float, float]]:
    """(unroll step, accuracy) of the newest validation, or of the newest training step before the first one."""
    for split in ("validation", "train"):
        prefix = f"{split}/{ACCURACY}"
        for line in reversed(run.metrics):
            if f"{prefix}0" in line:
                return sorted((int(name.removeprefix(prefix)), value) for name, value in line.items()
                              if name.startswith(prefix))
    return []


def samples(run: RunFiles) -> str:
    """Of the newest validation."""
    if not run.samples:
        return ""
    step = run.samples[-1]["step"]
    tags = {"accepted": "mark", "rejected": "del", "prompt": "i"}
    parts = []
    for sample in (one for one in run.samples if one["step"] == step):
        text = "".join(f"<{tags[kind]}>{html.escape(piece)}</{tags[kind]}>" if kind in tags else html.escape(piece)
                       for kind, piece in sample["pieces"])
        parts.append(f"<p class='soft'>{html.escape(sample['id'])}: {sample['tokens_per_round']:.2f} tokens a round</p>"
                     f"<pre>{text}</pre>")
    return f"<div class='card'><h3>{html.escape(run.label)}, step {step}</h3>{''.join(parts)}</div>"


def configuration(runs: Sequence[RunFiles]) -> str:
    """Every setting; first those in which runs differ."""
    settings = [run.config | run.provenance for run in runs]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    header = ["setting", *(run.label for run in runs)]
    rows = [[key, *(_text(one.get(key)) for one in settings)] for key in keys]
    different = [row for row in rows if len(set(row[1:])) > 1]
    first = f"<p>Different:</p>{table(header, different)}" if different else ""
    open_it = " open" if len(runs) == 1 else ""
    every = f"<details{open_it}><summary>All settings</summary>{table(header, rows)}</details>"
    return f"<div class='card'>{first}{every}</div>"


def _text(value: object) -> str:
    return "–" if value is None else str(value)


if __name__ == "__main__":
    main()

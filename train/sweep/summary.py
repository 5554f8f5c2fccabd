"""What came out of a sweep: a table for a person, CSV and JSON for programs, a page with charts."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.charts import Line, chart, page, table
from train.sweep.points import Point, literal

COLUMNS = {  # of the last validation
    "tau_full": "validation/simulated_tau/full",
    "tau_candidates": "validation/simulated_tau/candidates",
    "recall": "validation/candidate_recall/target_top1",
    "loss": "validation/loss",
}


def rows(points: Sequence[Point], metric: str) -> list[dict[str, Any]]:
    """One row a point, the best first, those without a value last."""
    result = []
    for point in points:
        outcome = point.outcome()
        values = point.values(metric)
        row = {"point": point.name, **point.parameters, "status": outcome.get("status", "waiting"),
               "step": values[-1][0] if values else None, metric: values[-1][1] if values else None}
        for column, name in COLUMNS.items():
            logged = point.values(name) if name != metric else []
            if name != metric:
                row[column] = logged[-1][1] if logged else None
        result.append({**row, "seconds": outcome.get("seconds"), "error": outcome.get("error")})
    return sorted(result, key=lambda row: (row["status"] != "finished", row[metric] is None, -(row[metric] or 0.0)))


def write_summary(folder: Path, points: Sequence[Point], metric: str) -> list[dict[str, Any]]:
    """``summary.json``, ``.csv`` and ``.html`` in ``folder``; returns the rows."""
    table_rows = rows(points, metric)
    (folder / "summary.json").write_text(json.dumps(table_rows, indent=2) + "\n")
    with (folder / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table_rows[0]) if table_rows else ["point"])
        writer.writeheader()
        writer.writerows(table_rows)
    (folder / "summary.html").write_text(summary_page(folder.name, points, table_rows, metric))
    return table_rows


def text_table(table_rows: Sequence[dict[str, Any]]) -> str:
    """Columns as wide as they must be; an error stands on a line of its own."""
    columns = [name for name in table_rows[0] if name != "error"]
    cells = [[name.removeprefix("validation/") for name in columns],
             *([_short(row[name]) for name in columns] for row in table_rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    for index, row in reversed(list(enumerate(table_rows, start=1))):
        if row["error"]:
            lines.insert(index + 1, f"    {row['error']}")
    return "\n".join(lines)


def _short(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary_page(title: str, points: Sequence[Point], table_rows: Sequence[dict[str, Any]], metric: str) -> str:
    """The points over the course of training, and what each parameter does to the result."""
    shown = metric.removeprefix("validation/")
    order = {row["point"]: index for index, row in enumerate(table_rows)}
    ranked = sorted(points, key=lambda point: order[point.name])
    course = [Line(label=point.name, points=point.values(metric), color=index, dots=True)
              for index, point in enumerate(ranked)]
    cards = [chart(shown, course, x_label="optimizer step", note="best first")]
    for key in dict.fromkeys(key for point in points for key in point.parameters):
        cards.append(parameter_chart(key, table_rows, metric))
    header = list(table_rows[0]) if table_rows else []
    body = f"<h1>{title}</h1><div class='grid'>{''.join(cards)}</div><h2>Points</h2>"
    return page(title, body + f"<div class='card'>{table(header, [list(row.values()) for row in table_rows])}</div>")


def parameter_chart(key: str, table_rows: Sequence[dict[str, Any]], metric: str) -> str:
    """Result by value; values that are not numbers stand side by side in the order of their names."""
    points = [(row[key], row[metric]) for row in table_rows if row[metric] is not None and key in row]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value, _ in points)
    names = sorted({literal(value) for value, _ in points})
    places = [(float(value) if numeric else float(names.index(literal(value))), result) for value, result in points]
    positive = [place for place, _ in places if place > 0]
    log_x = numeric and len(positive) == len(places) > 0 and max(positive) >= 8 * min(positive)
    note = "" if numeric else ", ".join(f"{index}: {name}" for index, name in enumerate(names))
    return chart(f"{metric.removeprefix('validation/')} by {key}",
                 [Line(label=key, points=places, dots=True, joined=False)], x_label=key, note=note, log_x=log_x)

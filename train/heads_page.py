"""What scripts/compare_heads.py found, as tables for a terminal and as one HTML page with charts."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

from train.charts import Line, chart, number, page, table

Result = dict[str, Any]
Head = dict[str, Any]
KINDS = ("full", "speculative", "static", "trained", "low_rank", "cluster", "in_context")  # a colour each

COLUMNS: dict[str, Callable[[Head], float | None]] = {
    "τ": lambda head: head["tau"],
    "τ/τ full": lambda head: head["tau_ratio"],
    "coverage": lambda head: head.get("coverage"),
    "recall": lambda head: (head["candidate_recall"] or {}).get("target_top1"),
    "of draft": lambda head: (head["candidate_recall"] or {}).get("draft_top1"),
    "µs": lambda head: head["seconds"] * 1e6,
    "MB": lambda head: head["num_bytes"] / 1e6,
    "tokens/s": lambda head: head["tokens_per_second"],
    "speed-up": lambda head: head["speed_up"],
    "ρ here": lambda head: head["predicted_speed"],
    "ρ bytes": lambda head: head["predicted_speed_of_bytes"],
}
LEGEND = ("coverage: share of the target's tokens that a static vocabulary holds; recall: judged positions where the "
          "target's, and the full head's, first choice was a candidate; µs and MB: of one head call, time and what it "
          "reads; speed-up: over plain decoding here; ρ: predicted speed, 1 is the full head's, with times measured "
          "here and, where reading memory is all that takes time, with bytes")


def headline(result: Result) -> str:
    return (f"{result['target']} ({result['dtype']}, {result['device']}), {result['num_prompts']} prompts of "
            f"{result['prompts']}, {result['max_new_tokens']} new tokens, {result['num_draft_tokens']} draft tokens, "
            f"temperature {result['temperature']:g}; plain decoding {result['autoregressive_tokens_per_second']:.1f} "
            f"tokens/s; κ {result['kappa']:.3f} (measured {result['kappa_measured']:.3f}), of bytes "
            f"{result['kappa_of_bytes']:.3f}")


def text_table(result: Result) -> str:
    """For a terminal: every head, then the parts of its τ, then what static vocabularies miss."""
    heads: dict[str, Head] = result["heads"]
    parts = [headline(result), "", *_grid("head", COLUMNS, {name: [get(head) for get in COLUMNS.values()]
                                                            for name, head in heads.items()}), "", LEGEND]
    for title, key in (("τ by category", "tau_per_category"), ("τ by tokens of context, from", "tau_per_context")):
        columns = list(heads["full"][key])
        if len(columns) > 1:
            parts += ["", *_grid(title, columns, {name: [head[key].get(column) for column in columns]
                                                  for name, head in heads.items()})]
    longest = range(1, 1 + len(heads["full"]["acceptance_per_position"]))
    parts += ["", *_grid("accepted at place", [str(place) for place in longest],
                         {name: head["acceptance_per_position"] for name, head in heads.items()})]
    for name, rows in outside_tables(result).items():
        parts += ["", *_grid(name, list(rows["all"]), {row: list(cells.values()) for row, cells in rows.items()})]
    differing = {name: head["differing_turns"] for name, head in heads.items() if head["differing_turns"]}
    if result["temperature"] == 0:
        gaps = {name: number(heads[name]["largest_gap_of_a_difference"]) for name in differing}
        said = "; ".join(f"{name} in {count} turns (the target's two best logits at most {gaps[name]} apart)"
                         for name, count in differing.items())
        parts += ["", f"output that is not the target's own, token for token: {said or 'none'}"]
    return "\n".join(parts)


def _grid(corner: str, columns: Sequence[str] | dict[str, Any], rows: dict[str, Sequence[float | None]]) -> list[str]:
    wide = max([len(corner), *map(len, rows)]) + 2
    widths = [max(10, len(column) + 2) for column in columns]
    lines = [corner.ljust(wide) + "".join(column.rjust(width) for column, width in zip(columns, widths, strict=True))]
    for name, values in rows.items():
        lines.append(name.ljust(wide) + "".join(("–" if value is None else number(value)).rjust(width)
                                                for value, width in zip(values, widths, strict=False)))
    return lines


def outside_tables(result: Result) -> dict[str, dict[str, dict[str, float]]]:
    """Of every static head: by category, tokens, shares outside, shares of rounds that these ended, and τ lost."""
    tables = {}
    for name, head in result["heads"].items():
        if "outside" in head:
            tables[f"{name}: what it cannot say"] = {
                category: {"tokens": one["num_tokens"], "% outside": 100 * one["outside"],
                           "% of rounds ended so": 100 * one["ended"], "τ": one["tau"], "τ full": one["tau_full"],
                           "τ lost": one["tau_full"] - one["tau"]}
                for category, one in head["outside"].items()
            }
    return tables


def html_page(result: Result) -> str:
    """Self-contained."""
    heads: dict[str, Head] = result["heads"]
    title = f"Heads of a draft of {result['target']}"
    body = [f"<h1>{html.escape(title)}</h1><p class='soft'>{html.escape(headline(result))}</p>",
            f"<div class='card'>{table(['head', *COLUMNS], _rows(heads))}<p class='soft'>{LEGEND}</p></div>",
            "<h2>Charts</h2><div class='grid'>", *charts(heads), "</div>"]
    categories = list(heads["full"]["tau_per_category"])
    body += ["<h2>τ by category</h2><div class='card'>",
             table(["head", *categories], [[name, *(head["tau_per_category"][one] for one in categories)]
                                           for name, head in heads.items()]), "</div>"]
    if tables := outside_tables(result):
        body.append("<h2>Tokens outside static vocabularies</h2><div class='grid'>")
        for name, rows in tables.items():
            cells = [[category, *one.values()] for category, one in rows.items()]
            body.append(f"<div class='card'><h3>{html.escape(name)}</h3>{table(['', *rows['all']], cells)}</div>")
        body += ["</div><h2>… by kind of token</h2><div class='card'>", _kinds(heads), "</div>"]
    return page(title, "".join(body))


def _rows(heads: dict[str, Head]) -> list[list[Any]]:
    return [[name, *(get(head) for get in COLUMNS.values())] for name, head in heads.items()]


def _kinds(heads: dict[str, Head]) -> str:
    static = {name: head["kinds_outside"] for name, head in heads.items() if "kinds_outside" in head}
    kinds = next(iter(static.values()))
    none = {"outside": 0.0}  # a head whose text differs at a tie may lack a kind
    rows = [[kind, 100 * one["share"], *(100 * of_head.get(kind, none)["outside"] for of_head in static.values())]
            for kind, one in kinds.items()]
    return table(["kind of token", "% of the text", *(f"% outside {name}" for name in static)], rows)


def charts(heads: dict[str, Head]) -> list[str]:
    def points_of(x: str, y: str) -> list[Line]:
        return [Line(label=name, points=[(head[x], head[y])], color=KINDS.index(head["kind"]), dots=True)
                for name, head in heads.items()]

    def curves(key: str, first: int) -> list[Line]:
        lines = []
        for name, head in heads.items():
            values = head[key]
            points = ([(float(at), value) for at, value in values.items()] if isinstance(values, dict)
                      else list(enumerate(values, start=first)))
            lines.append(Line(label=name, points=points, color=KINDS.index(head["kind"]), dots=True))
        return lines

    micro = {name: head | {"µs": head["seconds"] * 1e6} for name, head in heads.items()}
    timed = [Line(label=name, points=[(head["µs"], head["tau"])], color=KINDS.index(head["kind"]), dots=True)
             for name, head in micro.items()]
    static: dict[str, list[tuple[float, float]]] = {}
    for head in heads.values():
        for category, one in head.get("outside", {}).items() if head["kind"] == "static" else ():
            static.setdefault(category, []).append((head["size"], 100 * one["outside"]))
    return [
        chart("τ against the head's time", timed, x_label="µs of one head call", log_x=True,
              note="a colour for each kind of head; further left and higher is better"),
        chart("τ against what the head reads", points_of("num_bytes", "tau"), x_label="bytes of one head call",
              log_x=True),
        chart("Predicted speed", points_of("num_bytes", "predicted_speed_of_bytes"), x_label="bytes of one head call",
              log_x=True, note="where reading memory is all that takes time; 1 is the full head's"),
        chart("τ by context", curves("tau_per_context", 0), x_label="tokens of context, from"),
        chart("Acceptance by place in the chain", curves("acceptance_per_position", 1), x_label="place",
              note="share of the drafts there that were accepted"),
        chart("Outside static vocabularies", [Line(label=category, points=sorted(points), color=index, dots=True)
                                              for index, (category, points) in enumerate(static.items())],
              x_label="tokens kept", note="% of the target's tokens, by category"),
    ]

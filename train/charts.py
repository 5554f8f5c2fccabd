"""Line charts as inline SVG, and the page around them: no script, no network, readable on light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 520, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 40
MAX_POINTS = 240  # of one line; more are thinned out
COLORS = ("#3568d4", "#d9662b", "#2a9261", "#a24bbd", "#b8860b", "#c2355b", "#1b94a8", "#6b7280")

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1c2330; --soft: #5d6778; --line: #dfe3ea; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161d; --card: #1b212b; --ink: #e6e9ef; --soft: #9aa5b6; --line: #323b49; }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 24px; max-width: 1680px; background: var(--page); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 18px; margin: 32px 0 12px }
.soft { color: var(--soft) }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)) }
.card { display: flex; flex-direction: column; min-width: 0; padding: 14px 16px; background: var(--card);
        border: 1px solid var(--line); border-radius: 10px }
.card h3 { font-size: 15px; margin: 0 } .card p { margin: 0 0 6px; font-size: 13px }
.tiles { display: flex; flex-wrap: wrap; gap: 8px 28px; margin-top: 8px }
.tiles b { display: block; font-size: 20px; font-weight: 600; color: var(--ink) }
.tiles span { color: var(--soft); font-size: 13px }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; color: var(--soft) }
svg { display: block; width: 100%; height: auto; margin: 6px 0 }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
.rule { stroke: var(--line) } .trace { fill: none; stroke-width: 2; stroke-linejoin: round }
.faint { opacity: .45; stroke-width: 1.5 } .dot { stroke-width: 0 } .hover { opacity: 0 } .hover:hover { opacity: 1 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 14px }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; margin: 6px 0 }
summary { cursor: pointer } mark { background: #2a926144; color: inherit; border-radius: 3px } del { color: #d24b4b }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart; points that are not finite are left out."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int = 0  # index into COLORS
    faint: bool = False  # in the background
    dots: bool = False  # show the points themselves
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to pixels, with round numbers to label."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * (self._at(value) - self._at(self.low)) / self._span()

    def _at(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def _span(self) -> float:
        return self._at(self.high) - self._at(self.low)

    def ticks(self, count: int) -> list[float]:
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            factors = (1, 2, 5) if len(decades) <= 3 else (1,)
            ticks = [factor * 10.0**power for power in decades for factor in factors]
            return [tick for tick in ticks if self.low <= tick <= self.high]
        raw = (self.high - self.low) / count
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def axis(values: Iterable[float], start: float, end: float, *, log: bool = False, pad: float = 0.06) -> Scale:
    """A scale that holds ``values``, with some room."""
    values = list(values)
    low, high = min(values), max(values)
    if log:
        room = (high / low) ** pad if high > low else 2.0
        return Scale(low / room, high * room, start, end, log=True)
    room = pad * (high - low) if high > low else max(abs(high) * 0.1, 1e-6)
    return Scale(low - room, high + room, start, end)


def number(value: float) -> str:
    """Three or four digits, whatever the size."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    if 1e4 <= abs(value) < 1e15:
        for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= unit:
                return f"{value / unit:.4g}{name}"
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"


def chart(
    title: str, lines: Sequence[Line], *, x_label: str, note: str = "", log_x: bool = False, log_y: bool = False,
    y_range: Sequence[float] = (),
) -> str:
    """A card with a chart; empty where no line has a point.

    Args:
        y_range: further values that the axis must hold, so that two charts can be compared.
    """
    drawn = [(line, _finite(line.points, log_x, log_y)) for line in lines]
    drawn = [(line, points) for line, points in drawn if points]
    if not drawn:
        return ""
    x = axis([at for _, points in drawn for at, _ in points], LEFT, WIDTH - RIGHT, log=log_x, pad=0.02)
    y = axis([*(value for _, points in drawn for _, value in points), *y_range], HEIGHT - BOTTOM, TOP, log=log_y)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for tick in y.ticks(5):
        at = y(tick)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
                     f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in x.ticks(6):
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{html.escape(x_label)}</text>')
    parts += [_trace(line, points, x, y) for line, points in drawn]
    note = f'<p class="soft">{html.escape(note)}</p>' if note else ""
    legend = "".join(_legend(line) for line, _ in drawn) if len(drawn) > 1 else ""
    return (f'<div class="card chart"><h3>{html.escape(title)}</h3>{note}{"".join(parts)}</svg>'
            f'<div class="legend">{legend}</div></div>')


def _finite(points: Sequence[tuple[float, float]], log_x: bool, log_y: bool) -> list[tuple[float, float]]:
    kept = [(x, y) for x, y in points
            if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)]
    stride = -(-len(kept) // MAX_POINTS) if kept else 1
    return kept if stride == 1 else [*kept[:-1:stride], kept[-1]]


def _trace(line: Line, points: list[tuple[float, float]], x: Scale, y: Scale) -> str:
    color = COLORS[line.color % len(COLORS)]
    path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
    faint = " faint" if line.faint else ""
    parts = [f'<polyline class="trace{faint}" stroke="{color}" points="{path}"/>'] if line.joined else []
    show = "dot" if line.dots or len(points) == 1 else "dot hover"
    parts += [
        f'<circle class="{show}" fill="{color}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="3.5">'
        f"<title>{html.escape(line.label)}: {number(value)} at {number(at)}</title></circle>" for at, value in points
    ]
    return "".join(parts)


def _legend(line: Line) -> str:
    color, opacity = COLORS[line.color % len(COLORS)], 0.45 if line.faint else 1
    stroke = f'<line x1="0" x2="22" y1="5" y2="5" stroke="{color}" stroke-width="2.5" opacity="{opacity}"/>'
    return (f'<span><svg style="display:inline;width:22px;height:10px;margin:0" viewBox="0 0 22 10">{stroke}</svg> '
            f"{html.escape(line.label)}</span>")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table; numbers are set to the right."""
    def cell(value: object) -> str:
        if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
            return f'<td class="number">{number(value)}</td>'
        return f"<td>{html.escape('' if value is None else str(value))}</td>"

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, body: str) -> str:
    """A whole HTML document that needs nothing but itself."""
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
            f"<style>{STYLE}</style></head><body>{body}</body></html>\n")

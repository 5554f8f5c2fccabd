"""A picture of a few curves as SVG, which every browser shows: no plotting library is needed for that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN = 560, 340, 60  # pixels of a panel, margins included


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One curve, or one histogram."""

    title: str
    x_label: str
    y_label: str
    points: Sequence[tuple[float, float]]  # (x, y), x ascending
    bars: bool = False
    log_x: bool = False


def svg(panels: Sequence[Panel]) -> str:
    """The panels side by side."""
    drawn = "".join(f'<g transform="translate({place * WIDTH},0)">{_panel(panel)}</g>'
                    for place, panel in enumerate(panels))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * len(panels)}" height="{HEIGHT}" '
            f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>{drawn}</svg>\n')


def _panel(panel: Panel) -> str:
    if not panel.points:
        return _text(WIDTH / 2, HEIGHT / 2, f"{panel.title}: no data")
    ahead: Callable[[float], float] = math.log10 if panel.log_x else float
    xs = [ahead(x) for x, _ in panel.points]
    low, high = min(xs), max(xs)
    top = max(y for _, y in panel.points) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (ahead(x) - low) / ((high - low) or 1.0)
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - y / top * (HEIGHT - 2 * MARGIN)

    placed = [place(x, y) for x, y in panel.points]
    bottom = HEIGHT - MARGIN
    if panel.bars:
        width = (WIDTH - 2 * MARGIN) / len(placed) * 0.8
        drawn = "".join(f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{bottom - y:.1f}" '
                        'fill="steelblue"/>' for x, y in placed)
    else:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        drawn = f'<polyline points="{line}" fill="none" stroke="steelblue" stroke-width="2"/>'
    ticks = [_text(place(x, 0)[0], bottom + 18, f"{x:.4g}") for x in _ticks(panel)]
    ticks += [_text(MARGIN - 22, place(panel.points[0][0], y)[1] + 4, f"{y:.4g}") for y in (0, top / 2, top)]
    axes = (f'<path d="M{MARGIN},{MARGIN} V{bottom} H{WIDTH - MARGIN}" fill="none" stroke="black"/>')
    labels = _text(WIDTH / 2, MARGIN - 25, panel.title) + _text(WIDTH / 2, HEIGHT - 15, panel.x_label)
    return drawn + axes + "".join(ticks) + labels + _text(MARGIN - 22, MARGIN - 25, panel.y_label)


def _ticks(panel: Panel) -> list[float]:
    first, last = panel.points[0][0], panel.points[-1][0]
    if not panel.log_x:
        return [first + (last - first) * part / 4 for part in range(5)]
    return [10.0**power for power in range(math.ceil(math.log10(first)), math.floor(math.log10(last)) + 1)]


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(words)}</text>'

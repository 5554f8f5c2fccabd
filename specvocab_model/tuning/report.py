"""The outcome of a search as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specvocab_model.tuning.choices import PRECISIONS, TILES, Judge, SpeculativeChoice
from specvocab_model.tuning.search import Outcome

WIDTH, HEIGHT, MARGIN = 760, 460, 70


def table(outcomes: Sequence[Outcome], best: Outcome | None) -> str:
    """One line each; the best is marked."""
    lines = [f"{'':2}{'head':36}{'candidates':>11}{'recall':>9}{'of draft':>10}{'τ':>8}{'ρ_τ':>8}{'µs':>9}{'ρ':>8}"]
    for one in outcomes:
        covered = one.coverage
        lines.append(f"{'* ' if one is best else '  '}{one.choice!s:36}{one.num_candidates:>11}"
                     f"{covered.target_top1:>9.2%}{covered.draft_top1:>10.2%}{covered.simulated_tau:>8.3f}"
                     f"{one.tau_ratio:>8.4f}{one.seconds * 1e6:>9.1f}{one.speed:>8.3f}")
    return "\n".join(lines)


def recall_table(judge: Judge, tops: Sequence[int], dtype: str, *, of_draft: bool) -> str:
    """Markdown: recall of the exact best ``tops`` and of tiles with about as many candidates, at every precision.

    Cells hold the recall of the target's token; with ``of_draft`` also that of the draft's, and simulated τ.
    """
    vocab_size = judge.vocab_size
    rules: list[tuple[int | None, int]] = [(None, top) for top in tops if top < vocab_size]
    for top in tops:
        near = [(tile, round(top * tile / vocab_size)) for tile in TILES]
        rules += [(tile, keep) for tile, keep in near if top / 2 < keep * -(-vocab_size // tile) < 1.3 * top]
    lines = ["| rank | selection | candidates | " + " | ".join(name or dtype for name in PRECISIONS) + " |",
             "|---|---|---|" + "---|" * len(PRECISIONS)]
    for rank in judge.ranks:
        for tile, keep in dict.fromkeys(rules):
            cells = []
            for precision in PRECISIONS:
                choice = SpeculativeChoice(rank=rank, tile=tile, keep=keep, quantization=precision)
                found = judge(choice)
                cells.append(f"{found.target_top1:.4f}"
                             + (f" {found.draft_top1:.4f} {found.simulated_tau:.4f}" if of_draft else ""))
            rule = f"exact top {keep}" if tile is None else f"tile {tile} keep {keep}"
            lines.append(f"| {rank} | {rule} | {choice.selection(vocab_size).num_candidates} | {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(outcomes: Sequence[Outcome], front: Sequence[Outcome], best: Outcome | None, min_tau_ratio: float) -> str:
    """An SVG: seconds of the head (logarithmic) against ρ_τ, the front as a line, the constraint dashed."""
    low_x, high_x = (bound(math.log10(one.seconds) for one in outcomes) for bound in (min, max))
    low_y = min(0.999 * min_tau_ratio, *(one.tau_ratio for one in front))
    high_y = max(1.0, min_tau_ratio, *(one.tau_ratio for one in outcomes))
    scale_x = (WIDTH - 2 * MARGIN) / max(high_x - low_x, 1e-9)
    scale_y = (HEIGHT - 2 * MARGIN) / (high_y - low_y)

    def x(one: Outcome) -> float:
        return MARGIN + (math.log10(one.seconds) - low_x) * scale_x

    def y(tau_ratio: float) -> float:
        return HEIGHT - MARGIN - (max(tau_ratio, low_y) - low_y) * scale_y

    shapes = [
        f'<path d="M{MARGIN} {MARGIN} V{HEIGHT - MARGIN} H{WIDTH - MARGIN}" stroke="#444" fill="none"/>',
        f'<path d="M{MARGIN} {y(min_tau_ratio):.1f} H{WIDTH - MARGIN}" stroke="#b33" stroke-dasharray="5 4"/>',
        _text(MARGIN - 6, y(min_tau_ratio) + 4, f"{min_tau_ratio:g}", "end"),
        _text(MARGIN - 6, y(1.0) + 4, "1", "end"),
        _text(MARGIN - 6, y(low_y) + 4, f"{low_y:.3f}", "end"),
        _text(MARGIN, HEIGHT - MARGIN + 18, f"{10 ** (low_x + 6):.1f} µs", "start"),
        _text(WIDTH - MARGIN, HEIGHT - MARGIN + 18, f"{10 ** (high_x + 6):.1f} µs", "end"),
        _text(WIDTH / 2, HEIGHT - MARGIN + 38, "time of one draft step's head", "middle"),
        _text(MARGIN, MARGIN - 14, "simulated τ in relation to the full head", "start"),
    ]
    shapes += [_dot(x(one), y(one.tau_ratio), str(one.choice), "#9ab", 3) for one in outcomes]
    path = " L".join(f"{x(one):.1f} {y(one.tau_ratio):.1f}" for one in front)
    shapes.append(f'<path d="M{path}" stroke="#147" fill="none"/>')
    shapes += [_dot(x(one), y(one.tau_ratio), str(one.choice), "#147", 4) for one in front]
    if best is not None:
        shapes.append(_dot(x(best), y(best.tau_ratio), str(best.choice), "#b33", 6))
        side = "end" if x(best) > WIDTH / 2 else "start"
        shapes.append(_text(x(best), y(best.tau_ratio) - 10, str(best.choice), side))
    body = "\n".join(shapes)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            f'font-size="12">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n')


def _dot(x: float, y: float, name: str, colour: str, radius: int) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{name}</title></circle>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'

"""Small pictures as SVG text, for a page that needs nothing from anywhere: bars, and curves over any axis.

Colours are hues of Okabe and Ito's, which colour-blind people tell apart, each with a contrast of 3 on white and on
nearly black. `STYLE` belongs to the page; `charts` has curves over a job's time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

PALETTE = ("#0072b2", "#b87400", "#d55e00", "#cc79a7", "#2b8fc4", "#857400", "#8a8f96", "#009e73", "#7a55a8", "#76808c")
STYLE = """
.picture{width:100%;min-width:46rem;height:auto}.picture text{font:14px system-ui,sans-serif;fill:var(--ink)}
.picture text.axis{font-weight:600}.picture .grid{stroke:var(--line)}
.legend span{margin-right:1rem;white-space:nowrap}
.legend i{display:inline-block;width:.9rem;height:.9rem;margin-right:.3rem;vertical-align:-.1rem}
"""
WIDTH, LEFT, RIGHT = 920, 190, 70
FITS = 20  # characters left of a bar
Series = Mapping[str, Sequence[tuple[float, float]]]


def figure(parts: Sequence[str], height: float, title: str) -> str:
    label = escape(title)
    head = (
        f'<div class="scroll"><svg class="picture" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">'
    )
    return head + "".join(parts) + "</svg></div>"


def text(x: float, y: float, words: str, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(words)}</text>'


def stacked(rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], title: str, most: float = 1.0) -> str:
    """One bar a row, its parts as shares of `most`; their sum is written behind it."""
    span = (WIDTH - LEFT - RIGHT) / most
    parts = []
    for number, (label, shares) in enumerate(rows.items()):
        y, x = 8 + 30 * number, float(LEFT)
        short = label if len(label) <= FITS else f"{label[: FITS - 1]}…"
        parts.append(f"<g><title>{escape(label)}</title>{text(LEFT - 10, y + 15, short, 'end')}</g>")
        for name, share in shares.items():
            wide = max(0.0, share) * span
            tip = f"<title>{escape(name)}: {share:.2%}</title>"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="20" fill="{colours[name]}">{tip}</rect>'
            )
            x += wide
        parts.append(text(x + 8, y + 15, f"{sum(shares.values()):.2%}"))
    return figure(parts, 16 + 30 * len(rows), title)


def legend(colours: Mapping[str, str]) -> str:
    items = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items())
    return f'<p class="legend">{"".join(items)}</p>'


def lines(series: Series, title: str, x_label: str, y_label: str, *, steps: bool = False, log_x: bool = False) -> str:
    """Curves over a common axis from 0 up. `steps`: a value holds from the point before it to its own."""
    points = [point for curve in series.values() for point in curve]
    if not points:
        return ""
    plot = _Axes(points, log_x)
    parts = plot.frame(x_label, y_label)
    for number, (name, curve) in enumerate(series.items()):
        colour = PALETTE[number % len(PALETTE)]
        path = _path([(plot.x(x), plot.y(y)) for x, y in curve], steps)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(curve) < 30:
            parts += (f'<circle cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="3" fill="{colour}"/>' for x, y in curve)
        if len(series) > 1:
            x, y = LEFT + 20 + 225 * (number % 3), 8 + 16 * (number // 3)
            parts.append(f'<rect x="{x}" y="{y - 4}" width="14" height="4" fill="{colour}"/>')
            parts.append(text(x + 20, y + 3, name))
    return figure(parts, plot.height, title)


def _path(places: Sequence[tuple[float, float]], steps: bool) -> str:
    moves = [f"M{places[0][0]:.1f} {places[0][1]:.1f}"]
    for x, y in places[1:]:
        moves.append(f"V{y:.1f}H{x:.1f}" if steps else f"L{x:.1f} {y:.1f}")
    return "".join(moves)


class _Axes:
    top, bottom, height = 60, 280, 330

    def __init__(self, points: Sequence[tuple[float, float]], log_x: bool) -> None:
        self.log_x = log_x and min(x for x, _ in points) > 0
        xs = [self._scaled(x) for x, _ in points]
        self.x_low, self.x_high = min(xs) if self.log_x else min(0.0, *xs), max(xs)
        self.y_high = nice(max(y for _, y in points) or 1.0)

    def _scaled(self, x: float) -> float:
        return math.log10(x) if self.log_x else x

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return LEFT - 100 + (self._scaled(value) - self.x_low) / span * (WIDTH - LEFT - RIGHT + 100)

    def y(self, value: float) -> float:
        return self.bottom - value / self.y_high * (self.bottom - self.top)

    def frame(self, x_label: str, y_label: str) -> list[str]:
        left, right = LEFT - 100, WIDTH - RIGHT
        parts = []
        for tick in range(5):
            value = self.y_high * tick / 4
            y = self.y(value)
            parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(text(left - 8, y + 5, f"{value:.4g}", "end"))
        for tick in range(6):
            at = self.x_low + (self.x_high - self.x_low) * tick / 5
            value = 10**at if self.log_x else at
            parts.append(text(self.x(value), self.bottom + 20, f"{value:.3g}", "middle"))
        parts.append(text((left + right) / 2, self.bottom + 42, x_label, "middle", "axis"))
        parts.append(text(left - 60, self.top - 16, y_label, "start", "axis"))
        return parts


def nice(value: float) -> float:
    """The next round number from `value` up."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        factor * power for factor in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10) if factor * power >= value * 0.9999
    )

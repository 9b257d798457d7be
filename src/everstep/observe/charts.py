"""Curves over time for a page without a script: SVG that stretches with its place, and labels that keep their size.

Incidents are shaded bands with their name above; spans whose steps were made again are shaded too. Each chart says in
words what it shows, for whoever does not see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from everstep.observe.html import colour
from everstep.observe.view import Bucket, Series

WIDE, HIGH = 1000, 300  # of the drawing's own coordinates
MOST_BINS = 400  # that are drawn of a curve
MOST_SHARES = 160  # that are drawn of each bucket
TICK = 14  # height of the mark of an incident where more than MOST_BANDS would hide the curve
MOST_BANDS = 24
THINNEST = 3  # an incident's band, of WIDE
APART = 0.13  # of the width: names of incidents that are nearer than this are left out
USUAL, OUTLIER = 0.9, 4.0  # so many bins are usual; what is so many times above them is cut off
GAP = 0.03  # of the time shown: curves are not drawn over longer ones
STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))

STYLE = """
.chart{margin:0}.chart figcaption{font-weight:600;margin-bottom:1.3rem}.chart figcaption small{font-weight:400;
color:var(--soft);margin-left:.6rem}
.plot{display:grid;grid-template:12rem 1.6rem/4.6rem 1fr}.plot.low{grid-template-rows:8rem 1.6rem}
.ys,.xs,.area{position:relative}.ys span,.xs span,.area b{position:absolute;font-size:.8125rem;color:var(--soft);
white-space:nowrap;font-weight:400}
.ys span{right:.5rem;transform:translateY(50%);line-height:1}.xs{grid-column:2}.xs span{top:.25rem;
transform:translateX(-50%)}.xs span:first-child{transform:none}.xs span.end{transform:translateX(-100%)}
.area b{bottom:100%;transform:translateX(-50%);color:var(--edge);font-weight:600}
.area b.begin{transform:none}.area b.end{transform:translateX(-100%)}
.area svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.area svg *{vector-effect:non-scaling-stroke}
.grid{stroke:var(--line);stroke-width:1}.curve{fill:none;stroke:var(--curve);
stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.range{fill:var(--range);stroke:none}.mark{fill:var(--mark);stroke:var(--edge);stroke-width:1;
stroke-dasharray:4 3}.tick{fill:var(--edge)}.redo{fill:var(--redo);stroke:none}
@media(max-width:30rem){.xs span:nth-child(even){display:none}}
"""


class Mark(NamedTuple):
    """A span of time with a name."""

    begin_s: float
    end_s: float
    name: str
    words: str


class Point(NamedTuple):
    at_s: float
    mean: float
    low: float
    high: float


class Frame(NamedTuple):
    """What all charts of a page share. `redone`: spans whose steps were made again."""

    now_s: float
    marks: Sequence[Mark] = ()
    redone: Sequence[tuple[float, float]] = ()

    @property
    def many(self) -> bool:
        """Incidents: their bands would hide what happened."""
        return len(self.marks) > MOST_BANDS

    def x(self, at_s: float) -> float:
        return min(1.0, max(0.0, at_s / (self.now_s or 1.0))) * WIDE


def curve(
    title: str, series: Series, frame: Frame, label: Callable[[float], str], *, from_zero: bool = True, note: str = ""
) -> str:
    """One series with its range. Empty when it has no value."""
    points = points_of(series, frame.now_s)
    if not points:
        return ""
    low, high = min(point.low for point in points), max(point.high for point in points)
    most = _most(points) if from_zero else high
    ticks = nice_ticks(min(0.0, low) if from_zero else low, most)
    span = ticks[-1] - ticks[0]

    def y(value: float) -> float:
        return HIGH - min(1.0, (value - ticks[0]) / span) * HIGH

    runs = broken(points, frame.now_s)
    drawn = "".join(_range(run, frame, y) + _line(run, frame, y) for run in runs)
    words = f"{title} over time: first {label(points[0].mean)}, last {label(points[-1].mean)}"
    words += f", lowest {label(low)}, highest {label(high)}."
    ys = [(y(tick), label(tick) if tick else "0") for tick in ticks]
    note = note or f"last {label(points[-1].mean)}"
    note += f"; peaks up to {label(high)} are cut off" if high > ticks[-1] else ""
    caption = f"{escape(title)}<small>{escape(note)}</small>"
    return _figure(caption, words, drawn, ys, frame)


def shares(series: Mapping[str, Series], frame: Frame, title: str) -> str:
    """Stacked: what the accelerators were busy with, bin by bin."""
    names = [bucket.value for bucket in Bucket if bucket.value in series]
    columns = {name: _shares_of(series[name]) for name in names}
    count = max((len(column) for column in columns.values()), default=0)
    if not count:
        return ""
    every_s = series[names[0]].every_s * _factor(len(series[names[0]].mean), MOST_SHARES)
    base, drawn = [0.0] * count, ""
    for name in names:
        column = columns[name] + [0.0] * (count - len(columns[name]))
        top = [under + share for under, share in zip(base, column, strict=True)]
        if any(column):
            drawn += (
                f'<path d="{_stairs(base, top, every_s, frame)}" fill="{colour(name)}"><title>{name}</title></path>'
            )
        base = top
    ys = [(HIGH - share * HIGH / 100, f"{share} %") for share in (0, 50, 100)]
    return _figure(escape(title), f"{title}: the table beside it has the sums.", drawn, ys, frame, low=True)


def points_of(series: Series, now_s: float) -> list[Point]:
    """Its bins that hold something, few enough to draw: neighbours become one."""
    size = _factor(len(series.mean), MOST_BINS)
    found = []
    for first in range(0, len(series.mean), size):
        means, lows, highs = (_known(column[first : first + size]) for column in (series.mean, series.low, series.high))
        if means:
            at_s = min((first + size / 2) * series.every_s, now_s)
            mean = sum(means) / len(means)
            found.append(Point(at_s, mean, min(lows or means), max(highs or means)))
    return found


def broken(points: Sequence[Point], now_s: float) -> list[list[Point]]:
    """The curve in pieces: where nothing was known for long, nothing is drawn."""
    steps = sorted(after.at_s - before.at_s for before, after in zip(points, points[1:], strict=False))
    usual = steps[len(steps) // 2] if steps else 0.0
    longest = max(GAP * now_s, 3.5 * usual)
    pieces: list[list[Point]] = []
    for point in points:
        if not pieces or point.at_s - pieces[-1][-1].at_s > longest:
            pieces.append([])
        pieces[-1].append(point)
    return pieces


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from `low` or below to `high` or above, about `count` + 1 of them."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-200):  # one value: it gets an axis of its own size
        low, high = (0.0, 1.0) if abs(low) < 1e-200 else sorted((low, low + abs(low)))
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def time_ticks(now_s: float, most: int = 7) -> list[tuple[float, str]]:
    """Times from 0 on and their names, in the unit of their step."""
    days = (86400 * factor for power in range(8) for factor in (10**power, 2 * 10**power, 5 * 10**power))
    step = next(step for step in (*STEPS_S, *days) if now_s / step <= most)
    size, unit = next((size, unit) for size, unit in UNITS if step >= size)
    return [(number * step, f"{number * step / size:g} {unit}") for number in range(int(now_s / step) + 1)]


def number(value: float) -> str:
    """A tick's or a curve's value, four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _most(points: Sequence[Point]) -> float:
    """The highest value that is shown: a few far above all others would flatten the rest."""
    ordered = sorted(point.high for point in points)
    usual = ordered[int(USUAL * (len(ordered) - 1))]
    return ordered[-1] if ordered[-1] <= OUTLIER * usual or usual <= 0 else 1.2 * usual


def _factor(count: int, most: int) -> int:
    return max(1, math.ceil(count / most))


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _shares_of(series: Series) -> list[float]:
    size = _factor(len(series.mean), MOST_SHARES)
    found = []
    for first in range(0, len(series.mean), size):
        known = _known(series.mean[first : first + size])
        found.append(sum(known) / len(known) if known else 0.0)
    return found


def _line(run: Sequence[Point], frame: Frame, y: Callable[[float], float]) -> str:
    places = " ".join(f"{frame.x(point.at_s):.1f},{y(point.mean):.1f}" for point in run)
    if len(run) == 1:  # a line without length, with round ends: a dot
        places = f"{places} {places}"
    return f'<polyline class="curve" points="{places}"/>'


def _range(run: Sequence[Point], frame: Frame, y: Callable[[float], float]) -> str:
    if len(run) < 2 or all(point.low == point.high for point in run):
        return ""
    upper = [f"{frame.x(point.at_s):.1f},{y(point.high):.1f}" for point in run]
    lower = [f"{frame.x(point.at_s):.1f},{y(point.low):.1f}" for point in reversed(run)]
    return f'<polygon class="range" points="{" ".join([*upper, *lower])}"/>'


def _stairs(base: Sequence[float], top: Sequence[float], every_s: float, frame: Frame) -> str:
    """The area between two stairs: each bin is as wide as its time."""
    edges = [frame.x(number * every_s) for number in range(len(top) + 1)]
    there = "".join(f"V{HIGH * (1 - value):.1f}H{edges[n + 1]:.1f}" for n, value in enumerate(top))
    back = "".join(f"V{HIGH * (1 - base[n]):.1f}H{edges[n]:.1f}" for n in reversed(range(len(base))))
    return f"M{edges[0]:.1f} {HIGH * (1 - base[0]):.1f}{there}{back}Z"


def _figure(
    caption: str, words: str, drawn: str, ys: Sequence[tuple[float, str]], frame: Frame, *, low: bool = False
) -> str:
    grid = "".join(f'<path class="grid" d="M0 {at:.1f}H{WIDE}"/>' for at, _ in ys)
    redone = "".join(_band(begin, end, "redo", frame) for begin, end in frame.redone)
    kind = "tick" if frame.many else "mark"
    marks = "".join(_band(m.begin_s, m.end_s, kind, frame, m.words) for m in frame.marks)
    under, over = (grid + redone + marks, "") if not low else (grid, "" if frame.many else marks)
    svg = f'<svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" aria-hidden="true">{under}{drawn}{over}</svg>'
    labels = "".join(f'<span style="bottom:{100 - at / HIGH * 100:.2f}%">{escape(text)}</span>' for at, text in ys)
    if frame.marks:
        words += f" Incidents: {_listed(frame.marks)}."
    return (
        f'<figure class="chart"><figcaption>{caption}</figcaption>'
        f'<div class="plot{" low" if low else ""}" role="img" aria-label="{escape(words)}">'
        f'<div class="ys">{labels}</div><div class="area">{svg}{_names(frame)}</div>'
        f'<div class="xs">{_times(frame)}</div>'
        "</div></figure>\n"
    )


def _listed(marks: Sequence[Mark]) -> str:
    named = ", ".join(f"{mark.name} at {mark.begin_s:.0f} s" for mark in marks[:8])
    return f"{named}, and {len(marks) - 8} more" if len(marks) > 8 else named


def _band(begin_s: float, end_s: float, kind: str, frame: Frame, words: str = "") -> str:
    left, right = frame.x(begin_s), frame.x(end_s)
    wide = max(THINNEST, right - left)
    tip = f"<title>{escape(words)}</title>" if words else ""
    left, high = min(left, WIDE - wide), TICK if kind == "tick" else HIGH
    return f'<rect class="{kind}" x="{left:.1f}" width="{wide:.1f}" y="0" height="{high}">{tip}</rect>'


def _names(frame: Frame) -> str:
    if frame.many:
        return ""
    shown, last = "", -1.0
    for mark in frame.marks:
        place = frame.x(mark.begin_s) / WIDE
        if place - last >= APART or last < 0:
            side = "begin" if place < APART / 2 else "end" if place > 1 - APART / 2 else ""
            shown += f'<b class="{side}" style="left:{place * 100:.2f}%">{escape(mark.name)}</b>'
            last = place
    return shown


def _times(frame: Frame) -> str:
    shown = ""
    for at_s, name in time_ticks(frame.now_s):
        side = "end" if at_s and at_s > 0.95 * frame.now_s else ""
        shown += f'<span class="{side}" style="left:{frame.x(at_s) / WIDE * 100:.2f}%">{name}</span>'
    return shown

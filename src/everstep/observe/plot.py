"""A picture of a run: loss and step time over wall time, with each incident marked.

The shaded band of an incident reaches from the last step before it to the first new one; its label names kind,
culprit and the time without a step. Colours are Okabe and Ito's, which colour-blind people tell apart; every curve
also has another position or shape. Needs matplotlib: pip install "everstep[plot]".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from everstep.core import events as e
from everstep.core.errors import UsageError
from everstep.observe.summary import IncidentSummary, Summary, summarize
from everstep.observe.text import duration, who

BLUE, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#777777", "#222222"
RUST = "#9C4400"  # the orange, dark enough for text
FONT_PT = 14
STYLE: Any = {
    "font.size": FONT_PT,
    "axes.titlesize": FONT_PT + 3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "savefig.facecolor": "white",
}
THINNEST = 0.003  # of the axis: an incident shorter than this is still visible
LETTER = 0.0078  # of the axis: mean width of a letter of the labels, for placing them without overlap
LABEL_ROW_PT = 20
MAX_ROWS = 4  # labels that need more rows than this shrink to the incidents' numbers


class Row(msgspec.Struct, frozen=True):
    """One line of a training log. `time`: seconds since 1970."""

    step: int
    time: float
    loss: float = math.nan


def read_rows(path: Path) -> list[Row]:
    """A training log with one JSON object a line; other fields are ignored, and so is a last line cut short.

    Raises UsageError when a line before the last is not such an object.
    """
    rows = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except msgspec.DecodeError as error:  # ValidationError is one as well
            if number < len(lines):
                raise UsageError(f"{path}, line {number}: not a line with step, loss and time: {error}") from error
    return rows


def plot(entries: Iterable[e.Entry], rows: Sequence[Row], out: Path, title: str = "") -> Summary:
    """Draw `out` (PNG) from a job's journal and the rows of its training log; returns the journal's summary.

    Without rows, the steps of the journal are drawn instead of the loss. Raises UsageError without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError('pictures need matplotlib: pip install "everstep[plot]"') from error
    kept = list(entries)
    summary = summarize(kept)
    points = [_at(row, summary) for row in rows] if rows else _journal_points(kept, summary)
    segments = _segments(points, [incident.opened_s for incident in summary.incidents if incident.downtime_s >= 0])
    end = max([summary.wall_s, *(point.at_s for segment in segments for point in segment)])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 8), layout="constrained")
        FigureCanvasAgg(figure)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        upper.set_xlim(0, max(end, 1e-3) * 1.01)
        _draw_progress(upper, segments, with_loss=bool(rows))
        _draw_step_times(lower, segments)
        rows_of_labels = _mark((upper, lower), summary.incidents)
        lower.set_xlabel("wall time since submission (s)")
        figure.align_ylabels()
        upper.set_title(title or _title(summary), loc="left", pad=12 + LABEL_ROW_PT * rows_of_labels, color=INK)
        figure.savefig(out, dpi=110, format="png")
    return summary


class Point(msgspec.Struct, frozen=True):
    at_s: float  # since the job's submission
    step: int
    loss: float


def _at(row: Row, summary: Summary) -> Point:
    return Point(row.time - summary.submitted_wall_s, row.step, row.loss)


def _journal_points(entries: Sequence[e.Entry], summary: Summary) -> list[Point]:
    """Without a training log: what the journal recorded, about once a second, in the job's count of steps."""
    began = entries[0].t_s if entries else 0.0
    first = {epoch.epoch: epoch.first_total for epoch in summary.epochs}
    seen = [x.event for x in entries if isinstance(x.event, e.StepsSeen)]
    return [Point(x.step_at_s - began, first.get(x.epoch, 1) - 1 + x.step, math.nan) for x in seen]


def _segments(points: Sequence[Point], cuts: Sequence[float]) -> list[list[Point]]:
    """Cut where the step does not advance (a restart fell back to an older one), and at `cuts`: a log that its
    script truncates when it resumes shows nothing of the restart."""
    segments: list[list[Point]] = []
    for point in points:
        last = segments[-1][-1] if segments else None
        if last is None or point.step <= last.step or any(last.at_s <= cut < point.at_s for cut in cuts):
            segments.append([])
        segments[-1].append(point)
    return segments


def _draw_progress(axes: Any, segments: Sequence[Sequence[Point]], with_loss: bool) -> None:
    for segment in segments:
        values = [point.loss if with_loss else point.step for point in segment]
        marker = "o" if len(segment) < 3 else ""
        axes.plot([point.at_s for point in segment], values, color=BLUE, linewidth=2.2, marker=marker, markersize=4)
    axes.set_ylabel("loss" if with_loss else "step")


def _draw_step_times(axes: Any, segments: Sequence[Sequence[Point]]) -> None:
    """One dot a step; a wide range on a logarithmic axis. The pause of a restart is no step: the band shows it."""
    times, durations = [], []
    for segment in segments:
        for before, after in zip(segment, segment[1:], strict=False):
            if after.at_s > before.at_s:
                times.append(after.at_s)
                durations.append((after.at_s - before.at_s) / (after.step - before.step))
    axes.plot(times, durations, linestyle="", marker=".", color=INK, markersize=6, alpha=0.7)
    axes.set_ylabel("step time (s)")
    if not durations:
        axes.text(0.5, 0.5, "no step was seen", transform=axes.transAxes, ha="center", color=GREY)
        return
    low, high = min(durations), max(durations)
    if high > 5 * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}" if high < 20 * low else "")
        axes.set_ylim(low / 1.5, high * 1.5)
    else:
        axes.set_ylim(0, high * 1.25)


def _mark(panels: Sequence[Any], incidents: Sequence[IncidentSummary]) -> int:
    """Shade each incident in all panels and label it above the first. Returns how many rows the labels take."""
    width = panels[0].get_xlim()[1]
    bands = [_band(incident, width) for incident in incidents]
    for begin, end in bands:
        for axes in panels:
            axes.axvspan(begin, end, color=ORANGE, alpha=0.3, linewidth=0)
            axes.axvline(begin, color=ORANGE, linewidth=1.6, linestyle=(0, (4, 2)))
    begins = [begin for begin, _ in bands]
    texts = [_label(incident) for incident in incidents]
    places = _places(begins, texts, width)
    if max((row for _, row in places), default=0) >= MAX_ROWS:
        texts = [str(number) for number in range(1, len(incidents) + 1)]
        places = [(left, row % MAX_ROWS) for left, row in _places(begins, texts, width)]
    style = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "annotation_clip": False}
    for text, (left, row) in zip(texts, places, strict=True):
        offset = (0, 6 + LABEL_ROW_PT * row)
        panels[0].annotate(text, (left, 1.0), offset, color=RUST, fontsize=FONT_PT - 1, **style)
    return max((row + 1 for _, row in places), default=0)


def _places(begins: Sequence[float], texts: Sequence[str], width: float) -> list[tuple[float, int]]:
    """Left end and row of each label, so that none covers another and none leaves the axis of this width."""
    ends: list[float] = []  # where the labels of each row end so far
    places = []
    for begin, text in zip(begins, texts, strict=True):
        extent = len(text) * LETTER * width
        left = max(0.0, min(begin, width - extent))
        row = next((r for r, taken in enumerate(ends) if left > taken), len(ends))
        ends[row : row + 1] = [left + extent + LETTER * width]
        places.append((left, row))
    return places


def _band(incident: IncidentSummary, width: float) -> tuple[float, float]:
    """From the last step before it to the first new one; an incident without these is a thin line."""
    begin = end = incident.opened_s
    if incident.downtime_s >= 0:
        begin = min(begin, incident.last_step_s) if incident.last_step_s >= 0 else begin
        end += sum(took for name, took in incident.phases.items() if name != "detect")
    return begin, max(end, begin + THINNEST * width)


def _label(incident: IncidentSummary) -> str:
    text = f"{incident.id} {incident.kind}"
    if incident.culprits:
        text += f", {who(incident.culprits)}"
    return text + (f": {duration(incident.downtime_s)}" if incident.downtime_s >= 0 else "")


def _title(summary: Summary) -> str:
    parts = [f"{summary.steps} steps in {duration(summary.wall_s)}"]
    count = len(summary.incidents)
    if count:
        parts.append(f"{count} incident{'s' if count > 1 else ''}, {duration(summary.downtime_s)} without a step")
    return f"{summary.job}\n{', '.join(parts)}, ETTR {summary.ettr:.1%}"

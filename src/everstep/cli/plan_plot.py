"""A picture of what `everstep plan` recommends, from a failure every 10 minutes to one every 30 days.

Above the part of the time that is lost, with its range, beside stop and restart; below it how often each tier saves,
and standbys.
Needs matplotlib: pip install "everstep[plot]".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from everstep.core.errors import UsageError
from everstep.observe.plot import BLUE, GREY, INK, ORANGE, STYLE
from everstep.plan.costs import Costs
from everstep.plan.planner import Question, Recommendation, recommend

FIRST_S, LAST_S = 600.0, 30 * 86400.0
NUM_POINTS = 60
TICKS = {600.0: "10 min", 3600.0: "1 h", 6 * 3600.0: "6 h", 86400.0: "1 d", 7 * 86400.0: "7 d", LAST_S: "30 d"}


def sweep(question: Question, costs: Costs, num: int = NUM_POINTS) -> list[Recommendation]:
    """The same job under ever fewer failures."""
    factor = (LAST_S / FIRST_S) ** (1 / (num - 1))
    questions = [msgspec.structs.replace(question, mttf_s=FIRST_S * factor**at) for at in range(num)]
    return [recommend(each, costs) for each in questions]


def draw(question: Question, out: Path, costs: Costs) -> None:
    """Write the PNG. Raises UsageError without matplotlib, or where it cannot be written."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError('pictures need matplotlib: pip install "everstep[plot]"') from error
    found = sweep(question, costs)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 10), layout="constrained")
        FigureCanvasAgg(figure)
        upper, middle, lower = figure.subplots(3, 1, sharex=True, height_ratios=[4, 4, 2])
        _ettr(upper, found)
        _intervals(middle, found)
        _standbys(lower, found)
        for axes in (upper, middle, lower):
            axes.axvline(question.mttf_s, color=GREY, linewidth=1.4, linestyle=(0, (2, 2)))
        lower.set_xscale("log")
        lower.set_xticks(list(TICKS), list(TICKS.values()))
        lower.minorticks_off()
        lower.set_xlim(FIRST_S, LAST_S)
        lower.set_xlabel("mean time between failures of the job (dotted: as asked)")
        upper.set_title(
            f"{question.gpus} GPUs, steps of {question.step_s:g} s: what is recommended", loc="left", color=INK
        )
        figure.align_ylabels()
        try:
            figure.savefig(out, dpi=110, format="png")
        except OSError as error:
            raise UsageError(f"--plot {out}: {error.strerror}") from error


def _ettr(axes: Any, found: list[Recommendation]) -> None:
    at = [each.question.mttf_s for each in found]
    axes.fill_between(at, [1 - r.low for r in found], [1 - r.high for r in found], color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(at, [1 - r.ettr for r in found], color=BLUE, linewidth=2.4, label="recommended, 90 % range")
    axes.plot(at, [1 - r.closed for r in found], color=INK, linewidth=1.6, linestyle=":", label="closed form")
    axes.plot(at, [1 - r.restart for r in found], color=ORANGE, linewidth=2.0, linestyle="--", label="stop and restart")
    axes.set_yscale("log")
    axes.set_ylabel("part of the time lost\n(1 - ETTR, without standbys)")
    axes.legend(loc="upper right", frameon=False)


def _intervals(axes: Any, found: list[Recommendation]) -> None:
    for name, colour, style in (("memory", BLUE, "-"), ("disk", ORANGE, "--")):
        points = [(r.question.mttf_s, t.every_s) for r in found for t in r.tiers if t.name == name]
        alone = [(r.question.mttf_s, t.closed_s) for r in found for t in r.tiers if t.name == name and t.closed_s > 0]
        if points:
            axes.plot(
                *zip(*points, strict=True), color=colour, linewidth=2.4, linestyle=style, label=f"{name}, recommended"
            )
        if alone:
            axes.plot(
                *zip(*alone, strict=True), color=colour, linewidth=1.2, linestyle=":", label="optimum of it alone"
            )
    axes.set_yscale("log")
    axes.set_ylabel("seconds between saves")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.25)  # room for the legend above the curves
    axes.legend(loc="upper left", frameon=False, ncols=2)


def _standbys(axes: Any, found: list[Recommendation]) -> None:
    at = [each.question.mttf_s for each in found]
    axes.step(at, [r.standbys for r in found], where="mid", color=BLUE, linewidth=2.4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("standby nodes")

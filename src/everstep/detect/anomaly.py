"""Metric anomalies: a loss or a gradient norm that jumps, stays on another level, or is no number at all.

One small state a metric. A value is compared with the median of the last ordinary ones, in units of their median
absolute deviation, so neither a slow drift nor the fast fall of a young loss is an alarm, and one spike does not hide
the next. Losses and norms are compared by ratio (on a log scale) and only upwards. What is single is told with
little confidence, what comes again with more: at the same step after a rollback it is the data, not chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

import msgspec

from everstep.core.types import Blame, Verdict

TO_SIGMA = 1.4826  # a median absolute deviation in standard deviations of a normal distribution
TINY = 1e-12  # stands for values that have no logarithm
CERTAIN = 0.99


class Limits(msgspec.Struct, frozen=True):
    """What counts as a jump of one metric. `least`: a ratio (log scale) or a difference that is never too little."""

    log: bool = True
    sigmas: float = 8.0
    least: float = 1.15
    floor: float = 0.005  # of the deviation, in log units or units of the metric: rounding makes series look exact
    window: int = 64  # ordinary values remembered
    warm_up: int = 20  # values before anything but a non-finite one is judged
    stays: int = 8  # so many values in a row out of line are the new level
    repeats: int = 3  # so many incidents ...
    within: int = 200  # ... in so many steps are no chance
    single: float = 0.9  # confidence in a single non-finite value


LOSS = Limits()
# Norms have heavy tails; one overflow is what a loss scaler expects.
NORM = Limits(least=3.0, floor=0.02, single=0.5)
PLAIN = Limits(log=False, least=0.0, floor=TINY)  # of anything: upwards, by deviation alone


class Series(msgspec.Struct, frozen=True):
    """One metric so far. `out`: values in a row that were out of line; `marks`: steps of what was told."""

    recent: tuple[float, ...] = ()
    out: tuple[float, ...] = ()
    broken: bool = False  # the last value was not finite
    marks: tuple[int, ...] = ()


def limits_of(name: str) -> Limits:
    """By the metric's name, as scripts call them: loss, train/loss, grad_norm, ..."""
    lower = name.lower()
    return NORM if "grad" in lower or "norm" in lower else LOSS if "loss" in lower or "perplexity" in lower else PLAIN


def saw(
    states: Mapping[str, Series], step: int, values: Mapping[str, float], who: Blame | None = None
) -> tuple[dict[str, Series], tuple[Verdict, ...]]:
    """All metrics of one step. `who`: whose metrics they are; None: the job's."""
    after, found = dict(states), []
    for name, value in values.items():
        after[name], verdict = judge(after.get(name, Series()), name, step, value, limits_of(name), who)
        if verdict is not None:
            found.append(verdict)
    return after, tuple(found)


def judge(
    series: Series, name: str, step: int, value: float, limits: Limits, who: Blame | None = None
) -> tuple[Series, Verdict | None]:
    """One value. A jump is told at its first value, once; so is a level that stays."""
    if not math.isfinite(value):
        return _not_finite(series, name, step, value, limits, who)
    series = msgspec.structs.replace(series, broken=False)
    x = math.log(max(value, TINY)) if limits.log else value
    far = _sigmas(series.recent, x, limits)
    if not far:
        recent = (*series.recent, x)[-limits.window :]
        return msgspec.structs.replace(series, recent=recent, out=()), None
    out = (*series.out, x)
    if len(out) >= limits.stays:  # the old level is gone: learn the new one
        shifted = msgspec.structs.replace(series, recent=out, out=())
        what = f"{name} stays at {value:.4g} since step {step - len(out) + 1}, before that {_usual(series, limits):.4g}"
        return shifted, _verdict("shift", what, 0.9, who)
    series = msgspec.structs.replace(series, out=out)
    if len(out) > 1:
        return series, None
    what = f"{name} is {value:.4g} at step {step}, {far:.0f} deviations above {_usual(series, limits):.4g}"
    return _marked(series, "spike", what, step, 1 - 0.5 * limits.sigmas / far, limits, who)


def _sigmas(recent: tuple[float, ...], x: float, limits: Limits) -> float:
    """How many deviations it lies above the usual; 0 when that is no jump."""
    if len(recent) < limits.warm_up:
        return 0.0
    middle = median(recent)
    scale = max(TO_SIGMA * median(abs(r - middle) for r in recent), limits.floor)
    above = x - middle
    least = math.log(limits.least) if limits.log else limits.least
    return above / scale if above > max(least, limits.sigmas * scale) else 0.0


def _usual(series: Series, limits: Limits) -> float:
    middle = median(series.recent)
    return math.exp(middle) if limits.log else middle


def _not_finite(
    series: Series, name: str, step: int, value: float, limits: Limits, who: Blame | None
) -> tuple[Series, Verdict | None]:
    """Each counts for the repetition, but only the first of a row and the one that makes it repeated are told."""
    first, series = not series.broken, msgspec.structs.replace(series, broken=True)
    before = len(_near(series, step, limits))
    what = f"{name} is {value} at step {step}"
    series, verdict = _marked(series, "non-finite", what, step, limits.single, limits, who)
    return series, verdict if first or before + 1 == limits.repeats else None


def _marked(
    series: Series, cause: str, what: str, step: int, confidence: float, limits: Limits, who: Blame | None
) -> tuple[Series, Verdict]:
    """Remember it; with enough of its like near by, or at the same step before, it is repeated and surer."""
    again = step in series.marks
    near = len(_near(series, step, limits)) + 1
    marked = msgspec.structs.replace(series, marks=(*series.marks, step)[-limits.window :])
    if again:
        what += ", as before the rollback: what that step reads is to blame, not chance"
    elif near >= limits.repeats:
        what += f", number {near} within {limits.within} steps"
    if again or near >= limits.repeats:
        cause, confidence = f"repeated-{cause}", max(CERTAIN, confidence)
    return marked, _verdict(cause, what, confidence, who)


def _near(series: Series, step: int, limits: Limits) -> list[int]:
    return [mark for mark in series.marks if abs(step - mark) <= limits.within]


def _verdict(cause: str, what: str, confidence: float, who: Blame | None) -> Verdict:
    whose = who or Blame(-1, "", "")
    blame = Blame(whose.rank, whose.node, cause, what)
    return Verdict("anomaly", (blame,), what, round(min(confidence, 1.0), 4))

"""The metrics of one member, as its script logs them, judged: what is out of line, since when, and when it is over.

`detect.anomaly` judges each value; this is what makes it fit for any script's metrics. Only losses and norms are
compared with what they were: a learning rate, an epoch or a time per step may jump as it likes. Of all others, and of
losses that can be negative, only a value that is no number counts, and not where that is usual (a validation loss that
is "nan" in steps without a validation). Once something is repeated and told, the metric is left alone for a while.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec.structs import replace

from everstep.core.anomaly import Anomaly
from everstep.core.types import Verdict
from everstep.detect.anomaly import LOSS, PLAIN, Limits, Series, judge, limits_of

KEPT = 4  # told at a time: the newest
SURE = 0.6  # a jump just above the limit is no incident; when it comes again it is surer
MOST = 64  # metrics that are watched
STEADY = 3  # finite values in a row, before one that is not means something
GRADIENTS = "gradients"


class Metering:
    """Feed it the metrics of steps, counted from 1. `told`: what is out of line, and what was lately."""

    def __init__(self) -> None:
        self.told: tuple[Anomaly, ...] = ()
        self._series: dict[str, Series] = {}
        self._steady: dict[str, int] = {}  # finite values in a row
        self._signed: set[str] = set()  # metrics that a logarithm is not for
        self._quiet_since: dict[str, int] = {}  # steps at which something lasting was told
        self._number = 0

    def saw(self, step: int, values: Mapping[str, float]) -> bool:
        """Whether there is more to tell than before."""
        before = self.told
        for name, value in values.items():
            if name in self._series or len(self._series) < MOST:
                self._one(step, name, value, self._limits(name, value))
        return self.told is not before

    def gradients(self, step: int, finite: bool) -> bool:
        """The same for the summed gradients of a step, of which it is known whether all are finite."""
        before = self.told
        if not finite or GRADIENTS in self._series:
            self._steady[GRADIENTS] = STEADY
            self._one(step, GRADIENTS, 0.0 if finite else math.nan, LOSS if not finite else PLAIN)
        return self.told is not before

    def _limits(self, name: str, value: float) -> Limits:
        limits = limits_of(name)
        if limits.log and value <= 0:
            self._signed.add(name)
            self._series.pop(name, None)
        return PLAIN if name in self._signed else limits

    def _one(self, step: int, name: str, value: float, limits: Limits) -> None:
        series, known = self._series.get(name, Series()), self._open(name)
        finite = math.isfinite(value)
        steady = self._steady.get(name, 0)
        self._steady[name] = steady + 1 if finite else 0
        verdict = None
        after = series
        if finite and limits is PLAIN:
            after = replace(series, broken=False)
        elif finite or known is not None or steady >= STEADY:
            after, verdict = judge(series, name, step, value, limits)
        self._series[name] = after
        if verdict is not None:
            self._out(step, name, value, series, verdict, limits)
        elif known is not None and finite and not after.out:
            self._tell(replace(known, over=step))

    def _out(self, step: int, name: str, value: float, before: Series, verdict: Verdict, limits: Limits) -> None:
        (blame,), known = verdict.culprits, self._open(name)
        found = Anomaly(0, name, step, blame.cause, verdict.why, verdict.confidence)
        if known is not None:  # it is repeated, or stays
            found = replace(known, cause=found.cause, why=found.why, confidence=found.confidence)
            found = replace(found, over=step if found.cause == "shift" else 0)
        elif verdict.confidence < SURE:
            return
        elif abs(step - self._quiet_since.get(name, -math.inf)) <= limits.within:
            self._quiet_since[name] = step
            return
        else:
            self._number += 1
            found = _with_range(replace(found, number=self._number), value, before, limits)
        if found.lasting:
            self._quiet_since[name] = step
        self._tell(found)

    def _open(self, name: str) -> Anomaly | None:
        return next((each for each in self.told if each.metric == name and not each.over), None)

    def _tell(self, anomaly: Anomaly) -> None:
        """What is not over stays longer than what is."""
        others = [each for each in self.told if each.number != anomaly.number]
        kept = sorted((*others, anomaly), key=lambda each: (not each.over, each.number))[-KEPT:]
        self.told = tuple(sorted(kept, key=lambda each: each.number))


def _with_range(anomaly: Anomaly, value: float, before: Series, limits: Limits) -> Anomaly:
    if math.isfinite(value):
        anomaly = replace(anomaly, value=value)
    if not before.recent:
        return anomaly
    low, high = (math.exp(x) if limits.log else x for x in (min(before.recent), max(before.recent)))
    why = f"{anomaly.why}; in the last {len(before.recent)} ordinary values it was {low:.4g} to {high:.4g}"
    return replace(anomaly, low=low, high=high, why=why)

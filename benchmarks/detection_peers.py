"""Two other ways to find stragglers, for benchmarks/detection.py: what they are given is raw time, no lengths.

- Plain z-score: the mean of a member's last five steps against mean and deviation of such means over its 100 steps
  before; above 3 it is slow.
- Greyhound's kind: autocorrelation finds the period of the series, Bayesian online change point detection (Adams and
  MacKay, 2007; normal, known variance, hazard 1/250) runs on the means of periods, and a change to a mean at least
  10 % higher is a slow-down.

Each may name a member once in 50 steps, so a long slow-down is not counted as many alarms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Event = tuple[int, int]  # step, member
QUIET_STEPS = 50
WINDOW, PAST = 5, 100
LONGEST = 128  # run lengths kept
HAZARD = 1.0 / 250
SLOWER = 1.1


def thinned(events: list[Event]) -> list[Event]:
    """Without those of a member within 50 steps after its last one."""
    last: dict[int, int] = {}
    kept = []
    for step, member in sorted(events):
        if step - last.get(member, -QUIET_STEPS) >= QUIET_STEPS:
            kept.append((step, member))
            last[member] = step
    return kept


def z_score(work_s: Floats) -> list[Event]:
    """Of the five-step mean against the member's own past."""
    sums = np.vstack((np.zeros(work_s.shape[1]), work_s.cumsum(0)))
    mean = (sums[WINDOW:] - sums[:-WINDOW]) / WINDOW  # row k: steps k .. k + 4
    total, square = (np.vstack((np.zeros(mean.shape[1]), (mean**p).cumsum(0))) for p in (1, 2))
    count = PAST
    past = (total[count:-1] - total[: -count - 1]) / count
    deviation = np.sqrt(np.maximum((square[count:-1] - square[: -count - 1]) / count - past**2, 1e-18))
    steps, members = np.nonzero((mean[count:] - past) / deviation > 3)
    return thinned([(int(s) + count + WINDOW - 1, int(m)) for s, m in zip(steps, members, strict=True)])


def period(series: Floats, longest: int = 20) -> int:
    """Lag of the highest autocorrelation above one half, 1 when there is none."""
    centred = series - series.mean()
    whole = float(centred @ centred)
    values = [float(centred[:-lag] @ centred[lag:]) / whole for lag in range(1, longest + 1)]
    best = int(np.argmax(values))
    return best + 1 if values[best] > 0.5 else 1


def change_points(work_s: Floats) -> list[Event]:
    """Greyhound's kind: ACF, Bayesian online change point, verified by the ratio of the means."""
    width = period(work_s[:PAST].mean(1))
    means = work_s[: len(work_s) // width * width].reshape(-1, width, work_s.shape[1]).mean(1)
    return thinned([(step * width + width - 1, member) for step, member in _online(means)])


def _online(x: Floats) -> list[Event]:
    members = x.shape[1]
    variance, centre = x[:50].var(0)[:, None], x[:50].mean(0)[:, None]
    prior = 10 * variance
    weight = np.zeros((members, LONGEST))
    weight[:, 0] = 1.0
    sums = np.zeros((members, LONGEST))
    lengths = np.arange(LONGEST)
    before = np.zeros(members, dtype=int)
    level = centre[:, 0].copy()
    found = []
    for step, now in enumerate(x):
        certain = 1 / prior + lengths / variance
        expected = (centre / prior + sums / variance) / certain
        spread = variance + 1 / certain
        likely = np.exp(-0.5 * (now[:, None] - expected) ** 2 / spread) / np.sqrt(spread)
        grown = weight * likely
        weight = np.concatenate(((grown * HAZARD).sum(1, keepdims=True), grown[:, :-1] * (1 - HAZARD)), 1)
        weight[:, -1] += grown[:, -1] * (1 - HAZARD)  # the longest stays the longest
        weight /= weight.sum(1, keepdims=True)
        sums = np.concatenate((np.zeros((members, 1)), sums[:, :-1] + now[:, None]), 1)
        best = weight.argmax(1)
        fell = (best < before - 3) & (best >= 2)
        for member in np.flatnonzero(fell):
            after = sums[member, best[member]] / best[member]
            if after > SLOWER * level[member]:
                found.append((step, int(member)))
        settled = best >= 20
        level = np.where(settled, sums[np.arange(members), best] / np.maximum(best, 1), level)
        before = np.where(fell | (best > before), best, before)
    return found

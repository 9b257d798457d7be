"""How often to save: from what a save costs, what it may cost, and how often nodes fail.

`Tuner` is CheckFreq's rule (FAST'21, section 4.2) at run time: as often as the background work allows and the bound on
the overhead permits, then less often when the measured overhead exceeds the bound. Its overhead is the growth of the
step time while a save is under way, not the time its call takes. `optimal_period_s` is the exact optimum for failures
that come at a constant rate, of which Young's and Daly's are approximations.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median, stdev
from typing import NamedTuple

BOUND = 0.01  # of the step time, unless told otherwise
PROFILE_STEPS = 5  # without a save, to know what a step costs; the first ones are slower and do not count
SKIP_STEPS = 2
QUIET_STEPS = 64  # newest undisturbed steps, and
RECENT = 32  # newest saves, over which the cost is averaged: a save's stall is no larger than the noise of a step
REST = 4  # saves in a row without an undisturbed step between them; what a step costs without is measured again then


def efficiency(period_s: float, mttf_s: float, cost_s: float, downtime_s: float, recovery_s: float) -> float:
    """Useful part of the time with a save of `cost_s` every `period_s` (cost included) and exponential failures.

    No failures happen in a downtime, they do in a recovery.
    """
    cycles = math.exp(recovery_s / mttf_s) * math.expm1(period_s / mttf_s)
    return (period_s - cost_s) / ((mttf_s + downtime_s) * cycles)


def optimal_period_s(mttf_s: float, cost_s: float) -> float:
    """The period with the greatest efficiency, whatever downtime and recovery cost."""
    ratio = cost_s / mttf_s
    return mttf_s * (1 + ratio + _lambert_w0(-math.exp(-1 - ratio)))


def _lambert_w0(x: float) -> float:
    """The solution w >= -1 of w e^w = x, for -1/e <= x < 0. Halley's method from the expansion at -1/e."""
    p = math.sqrt(max(2 * (math.e * x + 1), 0.0))
    w = -1 + p - p * p / 3
    for _ in range(20):
        error = w * math.exp(w) - x
        slope = math.exp(w) * (w + 1) - (w + 2) * error / (2 * w + 2) if w > -1 else 0.0
        if slope == 0.0 or abs(change := error / slope) < 1e-14:
            break
        w -= change
    return w


class Cost(NamedTuple):
    """What is known of one tier. Seconds; -1: not known yet."""

    step_s: float
    stall_s: float  # that a save adds to the steps
    whole_s: float  # until its background work is through


def interval_steps(cost: Cost, bound: float, mttf_s: float = math.inf) -> int:
    """Steps from one save to the next: the background work is through, the stall within the bound of the step time,

    and not more often than the optimum for the failure rate.
    """
    if cost.step_s <= 0 or cost.stall_s < 0:
        return 1
    least = max(1, math.ceil(cost.whole_s / cost.step_s), math.ceil(cost.stall_s / (bound * cost.step_s)))
    if math.isinf(mttf_s) or cost.stall_s <= 0:
        return least
    return max(least, round(optimal_period_s(mttf_s, cost.stall_s) / cost.step_s))


class Tuner:
    """One tier's interval, from measured times. Feed `stepped` with every step, ask `due` after it.

    A save's window is the steps from the one after it began to the one after its background work ended, which pays for
    what follows it: an older checkpoint is deleted. Its stall is what they took above as many undisturbed steps.
    """

    def __init__(self, bound: float = BOUND, mttf_s: float = math.inf) -> None:
        self.bound, self.mttf_s = bound, mttf_s
        self._seen = 0
        self._quiet: deque[float] = deque(maxlen=QUIET_STEPS)
        self._stalls: deque[float] = deque(maxlen=RECENT)
        self._wholes: deque[float] = deque(maxlen=RECENT)
        self._window: list[float] = []
        self._saving = self._ending = False
        self._since = 0  # steps since the last save
        self._num_saves = self._crowded = 0  # all; those since the last undisturbed step

    @property
    def cost(self) -> Cost:
        """As measured so far; the stall with its standard error added, for a bound is to be kept and not just met."""
        stall = max(0.0, fmean(self._stalls)) if self._stalls else -1.0
        if len(self._stalls) > 1:
            stall += stdev(self._stalls) / math.sqrt(len(self._stalls))
        step = fmean(self._quiet) if self._quiet else -1.0
        return Cost(step, stall, median(self._wholes) if self._wholes else -1.0)

    @property
    def interval(self) -> int:
        """Steps between two saves, for now."""
        return interval_steps(self.cost, self.bound, self.mttf_s)

    def stepped(self, seconds: float) -> None:
        """A step is through; how long it took."""
        self._seen += 1
        self._since += 1
        if self._seen <= SKIP_STEPS:
            return
        if self._saving or self._ending:
            self._window.append(seconds)
        else:
            self._quiet.append(seconds)
            self._crowded = 0
        self._close()

    @property
    def due(self) -> bool:
        """Whether the state should be saved now. Not while a save is under way, nor before steps were profiled: a few

        before the first save, one more with each until there are enough, and then one in REST saves.
        """
        profiled = len(self._quiet) >= min(QUIET_STEPS // 2, PROFILE_STEPS + self._num_saves) and self._crowded < REST
        return not self._saving and profiled and self._since >= self.interval

    def began(self) -> None:
        """A save was begun after the last step."""
        self._close()
        self._saving, self._window, self._since = True, [], 0
        self._num_saves += 1
        self._crowded += 1

    def ended(self, whole_s: float) -> None:
        """Its background work is through, since the begin of the save `whole_s`. To be told at the end of a step."""
        if self._saving:
            self._saving, self._ending = False, True
            self._wholes.append(whole_s)

    def _close(self) -> None:
        """The window is over, if the save is."""
        if self._ending:
            self._ending = False
            usual = fmean(self._quiet) if self._quiet else 0.0  # a median lacks what slow steps add to both
            self._stalls.append(sum(self._window) - usual * len(self._window))

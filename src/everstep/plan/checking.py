"""How often replicas compare their states: as often as the part of the step time that this may cost permits."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

BOUND = 0.0035  # of the step time: with audits, and waiting for the slowest member, it stays below 0.5 %
SKIP_STEPS = 2  # the first ones are slower and do not count
PROFILE_STEPS = 3
RECENT = 16
AUDIT_BOUND = 0.0005  # of the step time: an audit takes about a step more, so it comes every 2,000 steps or so
AUDIT_STEPS = 2000  # until one was timed


class Pace:
    """`every`: steps from one comparison to the next; None: from what is measured, 0: never.

    untimed: steps before the first one, which is then timed.
    """

    def __init__(self, every: int | None = None, bound: float = BOUND, untimed: int = 1) -> None:
        self._every, self._bound, self._untimed = every, bound, untimed
        self._seen = 0
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._costs: deque[float] = deque(maxlen=RECENT)
        self._last = 0  # step of the last comparison

    @property
    def interval(self) -> int:
        """For now. Until a comparison was timed, which it takes one for, `untimed`."""
        if self._every is not None:
            return self._every
        if not self._costs or not self._steps:
            return self._untimed
        return max(1, math.ceil(median(self._costs) / (self._bound * median(self._steps))))

    def stepped(self, seconds: float) -> None:
        """A step without a comparison took so long."""
        self._seen += 1
        if self._seen > SKIP_STEPS:
            self._steps.append(seconds)

    def compared(self, step: int, seconds: float) -> None:
        """The states of so many steps were compared, which took so long."""
        self._last = step
        self._costs.append(seconds)

    def due(self, following: int) -> bool:
        """Whether the states after that many steps are to be compared."""
        if self._every is not None:
            return self._every > 0 and following % self._every == 0
        return len(self._steps) >= PROFILE_STEPS and not 0 <= following - self._last < self.interval

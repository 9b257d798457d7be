"""Jitter: members that are late in turn (garbage collection, a noisy neighbour), so that no single one is slow.

A synchronous step waits for the latest, so short pauses of many add up. What they cost is the mean of the largest
excess of each step; it is jitter when it is worth saying (`WORTH` of a step) and no member has most of the pauses.
"""

from __future__ import annotations

import numpy as np

from everstep.detect.peers import Flags, Floats

MEMORY = 1.0 / 64  # weight of the newest step
WORTH = 0.08
OVER = 0.03  # it has ended below this
FEWEST = 8.0  # pauses within the memory


class Jitter:
    """Rates of pauses by member, and what they cost together."""

    def __init__(self, members: int) -> None:
        self.rates = np.zeros(members)  # pauses a step
        self.cost = 0.0  # of a step's work
        self.going_on = False

    def saw(self, paused: Flags, excess: Floats) -> bool:
        """One step. True when jitter began or ended with it (`going_on` tells which)."""
        self.rates += MEMORY * (paused - self.rates)
        latest = float(excess[paused].max()) if paused.any() else 0.0
        self.cost += MEMORY * (latest - self.cost)
        before, self.going_on = self.going_on, self.cost > (OVER if self.going_on else WORTH) and self._shared()
        return before is not self.going_on

    def forget(self, member: int) -> None:
        self.rates[member] = 0.0

    def _shared(self) -> bool:
        total, most = float(self.rates.sum()), float(self.rates.max())
        if self.going_on:
            return total > 0 and most < 0.9 * total
        return total > FEWEST * MEMORY and most < (0.6 if len(self.rates) > 2 else 0.7) * total

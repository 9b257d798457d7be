"""Online change point: one-sided CUSUM (Page, 1954) over many series at once, with a bounded step.

level = max(0, level + clip(z, -cap, cap) - drift), alarm above `limit`; z is in units of a series' own noise. The
cap decides how many outliers in a row make a change: with the defaults four, so a hiccup of three steps is none, and
no change, however large, is called sooner. White noise reaches the limit once in exp(2 drift limit) ~ 10^10 steps.
The maximum likelihood estimate of the onset is the last step at which the level was zero, so whatever a judge wants
to know about the time since then is summed up from there.
"""

from __future__ import annotations

import numpy as np

from everstep.detect.peers import Flags, Floats

DRIFT = 1.25
LIMIT = 12.0
CAP = 5.0


class Cusum:
    """Levels of series of any shape. `sums` has a leading axis of `tracked` quantities, summed since the onset."""

    def __init__(self, shape: tuple[int, ...], tracked: int, drift: float = DRIFT) -> None:
        self.level = np.zeros(shape)
        self.length = np.zeros(shape, dtype=np.int64)  # values since the onset
        self.onset = np.full(shape, -1, dtype=np.int64)  # step of the first of them
        self.sums = np.zeros((tracked, *shape))
        self._drift = drift

    def saw(self, step: int, z: Floats, tracked: Floats) -> None:
        """One more value of each series; nan changes nothing."""
        known = ~np.isnan(z)
        risen = np.where(known, np.clip(z, -CAP, CAP) - self._drift, 0.0)
        self.level = np.clip(self.level + risen, 0.0, 2 * LIMIT)  # bounded: what ends is over soon
        alive = self.level > 0
        self.onset = np.where(alive, np.where(self.length > 0, self.onset, step), -1)
        self.length = np.where(alive, self.length + known, 0)
        self.sums = np.where(alive, self.sums + np.where(known, tracked, 0.0), 0.0)

    @property
    def alarms(self) -> Flags:
        return self.level > LIMIT

    def means(self) -> Floats:
        """Of the tracked quantities, since the onset."""
        return self.sums / np.maximum(self.length, 1)

    def clear(self, where: Flags) -> None:
        """Forget what these series have gathered."""
        self.level[where], self.length[where], self.onset[where] = 0.0, 0, -1
        self.sums[:, where] = 0.0

"""What is usual for each member: its steady distance to the others, its own level, and how much it scatters.

Learned from healthy steps only, with bounded steps, so that neither outliers nor the first steps of a slow-down move
it: a value further away than 2.5 spreads pulls no harder than one at 2.5. What moves all members together (a longer
step for everybody) is followed at once in the own level, since it says nothing about a member.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from everstep.detect.peers import Flags, Floats, first_axis_median, others_median

PULL = 2.5  # spreads
FOLLOW = 1.0 / 16  # how fast own levels follow what all members share
STAYS = 0.8  # highest correlation of successive steps that is believed
PART = 1024  # members
MEDIAN_TO_SIGMA = 0.6745  # half of a normal distribution lies within this many deviations


class Usual:
    """Levels of each series, shape (channels, members). `floor`: no spread is taken to be smaller."""

    def __init__(self, shape: tuple[int, ...], horizon: int, floor: float) -> None:
        self.distance = np.zeros(shape)  # to the others' median
        self.own = np.zeros(shape)
        self.scatter = np.full(shape, floor)
        self.count = np.zeros(shape, dtype=np.int64)  # values learned from
        self._products = np.zeros((2, *shape))  # of successive distances, and of one with itself: mean of each
        self._before = np.full(shape, np.nan)
        self._alone = np.zeros(shape, dtype=bool)  # in this step
        self._horizon, self._floor = horizon, floor

    def begin(self, values: Floats) -> None:
        """From the first steps, (steps, channels, members): medians, and the spread around them."""
        apart = np.stack([one - others_median(one) for one in values])
        self.count = (~np.isnan(values)).sum(0)
        seen = self.count > 0
        own, self.distance = _in_parts(_middle, values), _in_parts(_middle, apart)
        self.own = np.where(seen, own, _over_members(own, seen, 0.0))  # who comes later begins at the others' level
        scatter = _in_parts(_scatter, values, apart, self.own, self.distance)
        typical = _over_members(scatter, seen, self._floor)
        weight = 1.0 / np.maximum(self.count, 1) ** 0.5  # a few values say little about their own spread
        self.scatter = np.maximum(scatter * (1 - weight) + typical * weight, self._floor)
        self._products = _in_parts(_persistence, values, apart, self.own, self.distance, self.spread)
        self._before = _bounded(values[-1], apart[-1], self.own, self.distance, self.spread)

    def excess(self, values: Floats, healthy: Flags) -> tuple[Floats, Floats]:
        """(beyond the usual distance to the others that are healthy, beyond the usual own level). Without others, the
        second twice."""
        own = values - self.own
        apart = values - others_median(np.where(healthy, values, np.nan)) - self.distance
        self._alone = np.isnan(apart)
        return np.where(self._alone, own, apart), own

    @property
    def spread(self) -> Floats:
        """Noise of each series: its own scatter, not much below what is typical of its channel."""
        return np.asarray(np.maximum(self.scatter, 0.7 * np.median(self.scatter, -1, keepdims=True)))

    @property
    def lasting(self) -> Floats:
        """Noise for sums over several steps. What stays for a while averages out less: with the correlation r of
        successive steps, the median of the channel, it is sqrt((1 + r) / (1 - r)) times as much."""
        itself = np.maximum(self._products[1], 1e-12)
        r = np.clip(np.median(self._products[0] / itself, -1, keepdims=True), 0.0, STAYS)
        return np.asarray(self.spread * np.sqrt((1 + r) / (1 - r)))

    def learn(self, excess: Floats, own: Floats, healthy: Flags, doubt: Floats) -> None:
        """What `excess` returned for this step; members that are not `healthy` keep their levels. The scatter follows
        the median distance, so a quarter of outliers widens it by half at most. A member in `doubt` (above 0: it may
        have become slow) is followed less, or a small shift would become usual before it is judged."""
        shared = _shared(own)
        known = ~np.isnan(own)
        healthy = healthy & known
        gain = healthy / np.minimum(self.count + 1, self._horizon)
        bound = PULL * self.spread / (1.0 + doubt)
        excess, alone = np.where(known, excess, 0.0), np.where(known, own - shared, 0.0)
        self.own = self.own + gain * np.clip(alone, -bound, bound) + FOLLOW * known * shared
        self.distance = self.distance + np.where(self._alone, 0.0, gain * np.clip(excess, -bound, bound))
        wider = np.where(np.abs(excess) > MEDIAN_TO_SIGMA * self.scatter, 1.0, -1.0)
        self.scatter = np.maximum(self.scatter * np.exp(gain * wider / (1.0 + doubt)), self._floor)
        self.count = self.count + healthy
        self._persists(np.where(healthy, excess, np.nan), gain)

    def _persists(self, distance: Floats, gain: Floats) -> None:
        """Follow how alike successive distances are; bounded, so that outliers count no more than others."""
        now = np.clip(distance / self.spread, -PULL, PULL)
        product = np.stack((now * self._before, now * now))
        known = ~np.isnan(product[0])
        self._products += np.where(known, gain * (product - self._products), 0.0)
        self._before = now

    def accept(self, where: Flags, distance: Floats) -> None:
        """These members' distance to the others has changed for good, and it is none of their doing."""
        self.distance = np.where(where, self.distance + distance, self.distance)

    def forget(self, member: int) -> None:
        """Another process has this member's place: it begins anew, at the level of the others."""
        self.count[:, member] = 0
        self.distance[:, member] = 0.0
        self.own[:, member] = np.median(self.own, -1)
        self.scatter[:, member] = np.median(self.scatter, -1)
        self._before[:, member] = np.nan


def _in_parts(function: Callable[..., Floats], *arrays: Floats) -> Floats:
    """The same for a thousand members at a time: arrays that stay in the cache halve the first fit of 10,000."""
    ends = range(0, arrays[0].shape[-1], PART)
    return np.concatenate([function(*(a[..., at : at + PART] for a in arrays)) for at in ends], -1)


def _middle(values: Floats) -> Floats:
    return first_axis_median(values, 0.0)


def _beyond(values: Floats, apart: Floats, own: Floats, distance: Floats) -> Floats:
    """Beyond the usual distance to the others; where there are none, beyond the own level."""
    return np.where(np.isnan(apart), values - own, apart - distance)


def _scatter(values: Floats, apart: Floats, own: Floats, distance: Floats) -> Floats:
    return first_axis_median(np.abs(_beyond(values, apart, own, distance)), 0.0) / MEDIAN_TO_SIGMA


def _bounded(values: Floats, apart: Floats, own: Floats, distance: Floats, spread: Floats) -> Floats:
    return np.asarray(np.clip(_beyond(values, apart, own, distance) / spread, -PULL, PULL))


def _persistence(values: Floats, apart: Floats, own: Floats, distance: Floats, spread: Floats) -> Floats:
    """Mean products of successive distances, and of each with itself: (2, channels, members)."""
    now = _bounded(values, apart, own, distance, spread)
    pairs = np.stack((now[1:] * now[:-1], now[1:] ** 2))
    known = ~np.isnan(pairs[0])
    return np.asarray(np.where(known, pairs, 0.0).sum(1) / np.maximum(known.sum(0), 1))


def _over_members(values: Floats, seen: Flags, unknown: float) -> Floats:
    """Median of each channel over the members that were seen; (channels, 1)."""
    return np.array([[np.median(v[k]) if k.any() else unknown] for v, k in zip(values, seen, strict=True)])


def _shared(own: Floats) -> Floats:
    """Median excess over all members of a channel, 0 where nobody is known; (channels, 1)."""
    counted = np.sort(own, -1)
    known = (~np.isnan(own)).sum(-1)
    middle = counted[np.arange(len(own)), np.maximum(known - 1, 0) // 2]
    return np.where(known > 1, middle, 0.0)[:, None]

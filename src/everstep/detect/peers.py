"""A member against the others: the median of all but oneself, and NVIDIA Resiliency Extension's scores.

Leaving oneself out matters in small groups: of two members, the median of both moves half as far as the slow one, and
makes the healthy one look fast. Arrays are over members in the last axis; nan: not known.
"""

from __future__ import annotations

import numpy as np
import numpy.ma  # the first median imports it: 15 ms that belong to the loading, not to a step
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Indices = NDArray[np.int64]
FLAGGED_UNDER = 0.75  # NVRx's default for both of its scores


def others_median(values: Floats) -> Floats:
    """For each member, the median of the other members' known values; nan where nobody else's is known."""
    ordered = np.sort(values, -1)  # nan comes last
    known = ~np.isnan(values)
    count = known.sum(-1, keepdims=True)
    low, high = (np.maximum(count + shift, 0) // 2 for shift in (-2, -1))  # of all but one, in their order
    halves = [_without(values, ordered, at) for at in (low, high)]
    mine = np.where(count > 1, (halves[0] + halves[1]) / 2, np.nan)
    all_known = _at(ordered, np.maximum(count - 1, 0) // 2) + _at(ordered, count // 2)
    return np.where(known, mine, all_known / 2)


def _without(values: Floats, ordered: Floats, at: Indices) -> Floats:
    """The value at this place of the order that is left without oneself. Among equals it does not matter who goes."""
    here = _at(ordered, at)
    return np.where(values <= here, _at(ordered, at + 1), here)


def _at(ordered: Floats, index: Indices) -> Floats:
    return np.take_along_axis(ordered, np.minimum(index, ordered.shape[-1] - 1), -1)


def relative_scores(times_s: Floats) -> Floats:
    """NVRx's relative score: the best member's time over one's own. 1 is the best; slow under `FLAGGED_UNDER`."""
    return np.fmin.reduce(times_s, -1, keepdims=True) / times_s


def individual_scores(best_s: Floats, times_s: Floats) -> Floats:
    """NVRx's individual score: one's own best time so far over one's time now."""
    return np.fmin(best_s, times_s) / times_s


def flagged(scores: Floats) -> tuple[int, ...]:
    """Members whose score is under NVRx's threshold. An unknown score flags nobody."""
    return tuple(int(member) for member in np.flatnonzero(scores < FLAGGED_UNDER))


def first_axis_median(values: Floats, otherwise: float) -> Floats:
    """Median of the known values over the first axis; `otherwise` where nothing is known. No warnings, unlike numpy's,
    and ten times as fast on a few long rows."""
    ordered = np.sort(values, 0)
    known = (~np.isnan(values)).sum(0, keepdims=True)
    low, high = np.maximum(known - 1, 0) // 2, np.minimum(known // 2, len(values) - 1)
    middle = (np.take_along_axis(ordered, low, 0) + np.take_along_axis(ordered, high, 0))[0] / 2
    return np.where(known[0] > 0, middle, otherwise)

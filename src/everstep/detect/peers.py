"""A member against the others: the median of all but oneself, and NVIDIA Resiliency Extension's scores.

Leaving oneself out matters in small groups: of two members, the median of both moves half as far as the slow one, and
makes the healthy one look fast. Arrays are over members in the last axis; nan: not known.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
FLAGGED_UNDER = 0.75  # NVRx's default for both of its scores


def others_median(values: Floats) -> Floats:
    """For each member, the median of the other members' known values; nan where nobody else's is known."""
    size = values.shape[-1]
    if size == 1:
        return np.full(values.shape, np.nan)
    order = values.argsort(-1)  # nan comes last
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.broadcast_to(np.arange(size), order.shape), -1)
    ordered = np.take_along_axis(values, order, -1)
    count = (~np.isnan(values)).sum(-1, keepdims=True)
    rest = count - (ranks < count)  # known values without one's own
    low, high = np.maximum(rest - 1, 0) // 2, rest // 2
    low, high = low + (ranks <= low), high + (ranks <= high)  # from "without me" to "among all"
    top = size - 1
    middle = np.take_along_axis(ordered, np.minimum(low, top), -1) + np.take_along_axis(
        ordered, np.minimum(high, top), -1
    )
    return np.where(rest > 0, middle / 2, np.nan)


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

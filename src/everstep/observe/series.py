"""Curves over time of bounded size: bins of equal width from the submission on; when they are full, two become one."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from everstep.observe.view import POINTS, Series

DIGITS = 6  # of a closed bin: no chart shows more, and JSON stays short


class Curve(msgspec.Struct):
    """Writes a `Series`, always the same one. `total`, `count`: of its newest bin, which is open."""

    total: float = 0.0
    count: int = 0

    def add(self, series: Series, at_s: float, value: float) -> None:
        """A value at this moment; one that comes late goes into the newest bin. What is not finite is left out."""
        if not math.isfinite(value):
            return
        mean, low, high = series.mean, series.low, series.high
        if at_s >= series.every_s * len(mean):
            self._open(series, max(0.0, at_s))
        self.total += value
        self.count += 1
        mean[-1] = self.total / self.count
        lowest, highest = low[-1], high[-1]
        if lowest is None or value < lowest:
            low[-1] = value
        if highest is None or value > highest:
            high[-1] = value

    def _open(self, series: Series, at_s: float) -> None:
        columns = (series.mean, series.low, series.high)
        if self.count:
            for column in columns:
                column[-1] = _short(column[-1])
        while at_s >= series.every_s * POINTS:
            self._halve(series)
        missing = int(at_s / series.every_s) + 1 - len(series.mean)
        if missing > 0:
            self.total, self.count = 0.0, 0
            for column in columns:
                column.extend([None] * missing)

    def _halve(self, series: Series) -> None:
        """The open bin becomes half of one that stays open."""
        series.every_s *= 2
        series.mean[:] = _merged(series.mean, _mean)
        series.low[:] = _merged(series.low, min)
        series.high[:] = _merged(series.high, max)
        last = series.mean[-1] if series.mean else None
        self.total, self.count = (0.0, 0) if last is None else (last, 1)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _merged(column: list[float | None], how: Callable[[list[float]], float]) -> list[float | None]:
    pairs = (column[n : n + 2] for n in range(0, len(column), 2))
    known = ([value for value in pair if value is not None] for pair in pairs)
    return [how(values) if values else None for values in known]

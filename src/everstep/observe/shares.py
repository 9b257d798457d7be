"""What the books of `observe.goodput` remember: what steps are worth, and what the time was spent on in its course."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import msgspec

from everstep.observe.view import POINTS, Series

NEAR = 0.1  # so much of a bin may lack in it
KEPT_MADE = 512  # points of the curve of what steps are worth


class Made(msgspec.Struct):
    """What all steps up to a step are worth, and when they were made: where a rollback takes back from. Between its
    points it is straight. `worth`: accelerator-seconds, `seconds`: of time."""

    steps: list[int] = msgspec.field(default_factory=lambda: [0])
    at_s: list[float] = msgspec.field(default_factory=lambda: [0.0])
    worth: list[float] = msgspec.field(default_factory=lambda: [0.0])
    seconds: list[float] = msgspec.field(default_factory=lambda: [0.0])

    @property
    def step(self) -> int:
        return self.steps[-1]

    def add(self, step: int, at_s: float, worth: float, seconds: float) -> None:
        """What was made since the newest point."""
        self._point(step, at_s, self.worth[-1] + worth, self.seconds[-1] + seconds)
        if len(self.steps) > KEPT_MADE:
            self._drop(slice(1, KEPT_MADE // 2, 2))

    def _point(self, step: int, at_s: float, worth: float, seconds: float) -> None:
        self.steps.append(step)
        self.at_s.append(at_s)
        self.worth.append(worth)
        self.seconds.append(seconds)

    def _drop(self, which: slice) -> None:
        del self.steps[which]
        for column in (self.at_s, self.worth, self.seconds):
            del column[which]

    def at(self, step: int) -> tuple[float, float, float]:
        """When it was made, the worth of it and all before it, and their seconds."""
        n = min(bisect_left(self.steps, step), len(self.steps) - 1)
        if n == 0 or self.steps[n] <= step:
            return self.at_s[n], self.worth[n], self.seconds[n]
        part = (step - self.steps[n - 1]) / (self.steps[n] - self.steps[n - 1])
        return _between(self.at_s, n, part), _between(self.worth, n, part), _between(self.seconds, n, part)

    def back(self, step: int, now_s: float) -> tuple[float, float, float]:
        """Steps after this one are made again: since when they were made, their worth, their seconds."""
        from_s, worth, seconds = self.at(step)
        lost, lost_s = self.worth[-1] - worth, self.seconds[-1] - seconds
        self._drop(slice(bisect_right(self.steps, step), None))
        if not self.steps or self.steps[-1] < step:
            self._point(step, now_s, worth, seconds)
        return from_s, lost, lost_s

    def forget(self, step: int) -> tuple[float, float, float]:
        """Steps up to this one are worth nothing, and the next one is the first: until when they were made, their
        worth, their seconds."""
        at_s, worth, seconds = self.at(step)
        kept = bisect_right(self.steps, step)
        rest = zip(self.steps[kept:], self.at_s[kept:], self.worth[kept:], self.seconds[kept:], strict=True)
        points = [(0, at_s, 0.0, 0.0), *((s - step, t, w - worth, x - seconds) for s, t, w, x in rest)]
        self._drop(slice(0, None))
        for point in points:
            self._point(*point)
        return at_s, worth, seconds

    def begin(self, step: int, at_s: float) -> None:
        """The job takes up the state of this step: what is before it was not made here."""
        self.steps[0], self.at_s[0] = step, at_s

    def scale(self, step: int, factor: float) -> float:
        """What was made after this step is worth that much less; how much less."""
        _, worth, _ = self.at(step)
        before = self.worth[-1]
        self.worth[:] = [each if each <= worth else worth + (each - worth) * factor for each in self.worth]
        return before - self.worth[-1]


def _between(column: list[float], n: int, part: float) -> float:
    return column[n - 1] + part * (column[n] - column[n - 1])


class Bins(msgspec.Struct):
    """Accelerator-seconds by bucket over time, in bins of `every_s` seconds from the submission on."""

    every_s: float = 1.0
    spent: dict[str, list[float]] = {}

    def add(self, bucket: str, from_s: float, to_s: float, spent: float) -> None:
        while to_s >= self.every_s * POINTS:
            self._halve()
        column = self.spent.get(bucket)
        if column is None:
            column = self.spent[bucket] = []
        every_s = self.every_s
        first, last = int(from_s / every_s), int(to_s / every_s)
        if len(column) <= last:
            column.extend([0.0] * (last + 1 - len(column)))
        if first == last:
            column[first] += spent
            return
        rate = spent / (to_s - from_s)
        column[first] += rate * ((first + 1) * every_s - from_s)
        column[last] += rate * (to_s - last * every_s)
        for n in range(first + 1, last):
            column[n] += rate * every_s

    def move(self, source: str, target: str, from_s: float, to_s: float, spent: float) -> None:
        """From one bucket to another, where the first one has it within this time."""
        column = self.spent.get(source, [])
        first, end = int(from_s / self.every_s), int(to_s / self.every_s) + 1
        there = sum(column[first:end])
        if there <= 0:
            return
        share = min(1.0, spent / there)
        for n in range(first, min(end, len(column))):
            moved = column[n] * share
            column[n] -= moved
            self.add(target, n * self.every_s, n * self.every_s, moved)

    def _halve(self) -> None:
        self.every_s *= 2
        for bucket, column in self.spent.items():
            self.spent[bucket] = [sum(column[n : n + 2]) for n in range(0, len(column), 2)]

    def shares(self, booked_s: float, now_s: float) -> dict[str, Series]:
        """Of the accelerators, in each bin. After `booked_s` only those that do nothing are booked: bins of which that
        is much are not told, for they would say that nobody did anything."""
        length = max((len(column) for column in self.spent.values()), default=0)
        whole = int(booked_s / self.every_s)
        nearly = now_s - booked_s <= NEAR * (now_s - whole * self.every_s)
        length = min(length, whole + nearly)
        totals = [0.0] * length
        for column in self.spent.values():
            for n, spent in enumerate(column[:length]):
                totals[n] += spent
        return {name: Series(self.every_s, _shares(column, totals)) for name, column in self.spent.items()}


def _shares(column: list[float], totals: list[float]) -> list[float | None]:
    padded = column[: len(totals)] + [0.0] * (len(totals) - len(column))
    return [round(spent / total, 4) if total > 0 else None for spent, total in zip(padded, totals, strict=True)]

"""Random numbers as an argument, and the draws that the models need. `random.Random(seed)` is a `Chance`."""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

Name = TypeVar("Name")
MASK = (1 << 64) - 1


class Chance(Protocol):
    """The part of `random.Random` that is used; its sequences are the same in every version of Python."""

    def random(self) -> float: ...

    def gauss(self, mu: float, sigma: float) -> float: ...


class Stream:
    """A generator of its own (splitmix64): what one model draws does not shift what another one does.

    So two strategies meet the same failures, and differ by what they do about them.
    """

    def __init__(self, seed: float) -> None:
        self._state = int(seed * 2**53)

    def random(self) -> float:
        self._state = state = (self._state + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        return ((state ^ (state >> 31)) >> 11) * 2.0**-53

    def gauss(self, mu: float, sigma: float) -> float:
        """Box and Muller."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self.random()))
        return mu + sigma * radius * math.cos(2.0 * math.pi * self.random())


def exponential(chance: Chance, mean: float) -> float:
    return -math.log(1.0 - chance.random()) * mean


def weibull(chance: Chance, scale: float, shape: float, age: float = 0.0) -> float:
    """Time from `age` on to the failure, given that there was none before."""
    beyond = (age / scale) ** shape - math.log(1.0 - chance.random())
    return float(scale * beyond ** (1.0 / shape)) - age


def below(chance: Chance, count: int) -> int:
    """A whole number from 0 to count - 1."""
    return min(count - 1, int(chance.random() * count))


class Weighted(Generic[Name]):
    """Draws names in proportion to their counts."""

    def __init__(self, counts: Mapping[Name, float]) -> None:
        self.names = list(counts)
        self._bounds = list(itertools.accumulate(counts.values()))

    def draw(self, chance: Chance) -> Name:
        place = bisect(self._bounds, chance.random() * self._bounds[-1])
        return self.names[min(place, len(self.names) - 1)]

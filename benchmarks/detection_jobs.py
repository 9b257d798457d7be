"""Synthetic jobs for benchmarks/detection.py: own times of members whose sequences vary, slow-downs at known steps.

A member's step is c + alpha N + beta sum l^2 over its 24 sequences of log-normal length: about 19 of 20 steps lie
within +-30 % of the mean. On top of that, what a real measurement has and a detector must not trip over: steady
differences between members (4 %), independent noise of each member's step (1.2 to 1.6 %, the error that ResiHP reports
for its model), noise that all members of a step share (1 %), members whose pace wanders (0.02 % a step), and hiccups
(a thousandth of the steps takes 10 to 100 % longer).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STEP_S = 0.3
SEQUENCES = 24
SHARES = (0.1, 0.6, 0.3)  # of the step's time: constant, by tokens, by squares


@dataclasses.dataclass(frozen=True)
class Slow:
    """`member` takes 1 + `by` times as long in steps first .. last - 1."""

    member: int
    first: int
    last: int
    by: float


@dataclasses.dataclass(frozen=True)
class Job:
    work_s: Floats  # (steps, members), like the two below
    tokens: Floats
    squares: Floats
    slow: tuple[Slow, ...]


def job(rng: np.random.Generator, members: int, by: Sequence[float], noise: float, steps: int = 1000) -> Job:
    """One job with one slow-down for each of `by`, in random order, of random members, at random times."""
    lengths = np.minimum(rng.lognormal(6.0, 0.55, (steps, members, SEQUENCES)), 8192.0)
    tokens, squares = lengths.sum(-1), (lengths**2).sum(-1)
    constant, by_tokens, by_squares = SHARES
    work = constant + by_tokens * tokens / tokens.mean() + by_squares * squares / squares.mean()
    work *= STEP_S * measured(rng, steps, members, noise)
    slow = tuple(slow_downs(rng, members, by, steps))
    for s in slow:
        work[s.first : s.last, s.member] *= 1.0 + s.by
    return Job(work, tokens, squares, slow)


def measured(rng: np.random.Generator, steps: int, members: int, noise: float) -> Floats:
    """What multiplies the time that the lengths explain."""
    pace = 1.0 + rng.normal(0, 0.04, members) + rng.normal(0, 2e-4, (steps, members)).cumsum(0)
    own, shared = rng.normal(0, noise, (steps, members)), rng.normal(0, 0.01, (steps, 1))
    hiccups = (rng.random((steps, members)) < 0.001) * rng.uniform(0.1, 1.0, (steps, members))
    return np.asarray(np.maximum(pace * (1.0 + own + shared + hiccups), 0.2))


def slow_downs(rng: np.random.Generator, members: int, by: Sequence[float], steps: int) -> Iterator[Slow]:
    """Each within a stretch of its own, from step 30 on; 40 to 200 steps long or to the job's end."""
    stretch = (steps - 30) // max(1, len(by))
    for number, one in enumerate(rng.permutation(np.asarray(by))):
        begin = 30 + number * stretch
        first = int(rng.integers(begin, begin + stretch // 2))
        last = min(steps, first + int(rng.integers(40, 201)))
        yield Slow(int(rng.integers(members)), first, last, float(one))

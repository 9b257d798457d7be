"""Steps of a few simulated members, and what the straggler detector says about the slow one among them.

Times are in units of a healthy step. What varies is what benchmarks/detection_jobs.py has: lengths that the detector is
told, noise that it is not, steady differences between members, wandering, hiccups. Needs numpy, so it is loaded when a
member is slow. Random numbers are those of `sim.chance.Stream`, made for whole arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.detect.straggler import Finding, Options, Straggler, Work

Floats = NDArray[np.float64]

MOST_STEPS = 256  # slow steps: what is not told by then has become usual
BY_TOKENS, BY_SQUARES = 0.6, 0.3  # parts of a step's time; the rest is constant
DIFFERS, SHARED, WANDERS = 0.04, 0.01, 2e-4  # between members; of all in a step; of each from step to step
HICCUPS = 1e-3  # steps that take 10 to 100 % longer
TAIL = 1.96  # deviations within which 19 of 20 lie

GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Crew(NamedTuple):
    """Who is compared. `jitter`: 19 of 20 steps vary by so much with their lengths; `noise`: deviation of the rest."""

    members: int
    jitter: float
    noise: float
    least: float  # smallest slow-down worth an event


class Told(NamedTuple):
    """Sure after so many slow steps; `since`: of these, those before the onset that it names."""

    steps: int
    since: int
    slowdown: float
    phase: str
    confidence: float


def told(crew: Crew, slowdown: float, healthy: int, seed: float) -> Told | None:
    """Of a member that takes `slowdown` times as long after so many steps with nobody slow. None: it is not told."""
    own_s, tokens, squares = _steps(crew, healthy + MOST_STEPS, seed)
    detector = Straggler(crew.members, Options(least=crew.least))
    nothing = np.zeros(crew.members)
    slow = -1
    for step in range(len(own_s)):
        if step == healthy:  # who is falsely taken to be slow already cannot be found
            slow = next((member for member in range(crew.members) if member not in detector.slow), 0)
        if slow >= 0:
            own_s[step, slow] *= slowdown
        for finding in detector.saw(step, Work(own_s[step], nothing, nothing, tokens[step], squares[step])):
            if slow >= 0 and finding.member == slow and not finding.cleared:
                return _told(finding, healthy)
    return None


def _told(finding: Finding, healthy: int) -> Told:
    since = max(0, finding.since - healthy)
    return Told(finding.step - healthy + 1, since, finding.slowdown, finding.phase, finding.confidence)


def _steps(crew: Crew, steps: int, seed: float) -> tuple[Floats, Floats, Floats]:
    """Own times, tokens and squares: (steps, members) each."""
    shape = (steps, crew.members)
    draws = _uniform(seed, 10 * steps * crew.members).reshape(10, *shape)
    length, square, own, wander, shared = (_normal(draws[2 * n], draws[2 * n + 1]) for n in range(5))
    scale = crew.jitter / TAIL / (BY_TOKENS + 2 * BY_SQUARES)
    tokens = np.maximum(1.0 + scale * length, 0.1)
    squares = tokens**2 * np.maximum(1.0 + scale * square / 2, 0.1)
    explained = 1.0 - BY_TOKENS - BY_SQUARES + BY_TOKENS * tokens + BY_SQUARES * squares
    pace = 1.0 + DIFFERS * own[0] + WANDERS * wander.cumsum(0)
    hiccups = (draws[0] < HICCUPS) * (0.1 + 0.9 * draws[1])
    scatter = crew.noise * np.roll(own, -1, 0) + SHARED * shared[:, :1] + hiccups
    return explained * np.maximum(pace * (1.0 + scatter), 0.2), tokens, squares


def _normal(first: Floats, second: Floats) -> Floats:
    """Box and Muller."""
    return np.asarray(np.sqrt(-2.0 * np.log(1.0 - first)) * np.cos(2.0 * np.pi * second))


def _uniform(seed: float, count: int) -> Floats:
    """splitmix64: `count` draws of `sim.chance.Stream`."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA) + np.full(1, int(seed * 2**53), np.uint64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(FIRST)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(SECOND)
    return np.asarray((state ^ (state >> np.uint64(31))) >> np.uint64(11), dtype=float) * 2.0**-53

"""When a fault is noticed, and what is believed about it: the shipped detectors, asked about simulated members.

A detector looks at every step of every member; that would cost by steps and members. So it is tried: a few times for
each distinct fault (kind, size, jitter, how long it has watched), on a sample of the members. What it said is kept, and
later faults of the same kind draw from that: cost grows with distinct faults. False alarms are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from everstep.core.config import Straggler
from everstep.core.errors import UsageError
from everstep.detect import corrupt
from everstep.detect.timeouts import LEARN_STEPS
from everstep.plan.checking import PROFILE_STEPS, SKIP_STEPS
from everstep.plan.checking import Pace as Comparing
from everstep.sim.chance import Chance, Stream, below
from everstep.sim.scenario import Scenario
from everstep.sim.standstill import Stood, stood

if TYPE_CHECKING:
    from everstep.sim.samples import Told

TRIALS = 5  # of each distinct fault
SAMPLE = 64  # members that stand for all
WATCHED = (64, 32, 16, 0)  # steps that the detector has seen before; in between counts as the lower one
MADE = (LEARN_STEPS, 2, 1, 0)  # the same of steps since somebody began anew, for the hang detector
KNOWN = 2  # from the second time on that somebody begins anew the detector knows how long that takes
MEMBERS = 3  # that hang: one that is stuck, and some that wait for it

Fault = tuple[object, ...]
Outcome = TypeVar("Outcome")


class Senses:
    """The detectors of one simulated job."""

    def __init__(self, scenario: Scenario, members: int, chance: Chance) -> None:
        self._job = scenario.job
        self._members = members
        self._settings = Straggler()
        self._chance = Stream(chance.random())
        self._kept: dict[Fault, list[object]] = {}

    def slow(self, slowdown: float, watched: int) -> Told | None:
        """What is said of a member that takes so many times as long; `watched`: steps that the detector saw before.

        None: nothing. A lone member has nobody to be compared with.
        """
        if self._members < 2:
            return None
        try:
            from everstep.sim import samples
        except ImportError as error:
            text = "the detector of slow members needs numpy (everstep[torch]), or give strategy.slow_detect_s"
            raise UsageError(f"{error}: {text}") from error
        crew = samples.Crew(min(SAMPLE, self._members), self._job.jitter, self._job.noise, self._settings.threshold)
        before = next(steps for steps in WATCHED if steps <= max(0, watched))
        size = round(slowdown, 2)
        fault = ("slow", crew, size, before)
        return self._tried(fault, lambda seed: samples.told(crew, size, before, seed))

    def hang(self, step_s: float, made: int, starts: int) -> Stood:
        """How long everybody stands still until it is judged; `made`: steps since somebody began anew, as happened
        `starts` times."""
        rounded_s, steps = float(f"{step_s:.2g}"), next(n for n in MADE if n <= max(0, made))
        members, jitter = min(MEMBERS, self._members), self._job.jitter
        known = min(starts, KNOWN) if steps < LEARN_STEPS else 0
        fault = ("hang", members, rounded_s, jitter, steps, known)
        return self._tried(fault, lambda seed: stood(members, rounded_s, jitter, steps, Stream(seed), known))

    def compared_every(self, step_s: float) -> int:
        """Steps from one comparison of the replicas' states to the next."""
        pace = Comparing()
        for _ in range(SKIP_STEPS + PROFILE_STEPS):
            pace.stepped(step_s)
        pace.compared(0, self._job.compare_s)
        return pace.interval

    def _tried(self, fault: Fault, trial: Callable[[float], Outcome]) -> Outcome:
        kept: list[Outcome] = self._kept.setdefault(fault, [])  # type: ignore[assignment]
        if len(kept) < TRIALS:
            kept.append(trial(self._chance.random()))
            return kept[-1]
        return kept[below(self._chance, TRIALS)]


def compared(replicas: int) -> corrupt.Odd | None:
    """What replicas' fingerprints say when the first one's state is wrong; None: there is nothing to compare."""
    return corrupt.odd([2, *[1] * (min(replicas, MEMBERS) - 1)])


def named_by_redo(step: int, wrong_since: int) -> tuple[int, ...]:
    """Who of two was wrong, once the steps up to the comparison after `step` are done again; the first one was.

    Its gradients were wrong from the step after the flip on, and through their sum the other's from the one after that.
    """
    traces = {n: (1 if n < wrong_since else 2, 1 if n <= wrong_since else 2) for n in range(wrong_since - 1, step + 1)}
    replay = corrupt.Replay(step, (2, 1), traces, (0, 1))
    for again in range(wrong_since - 1, step + 1):
        judged = corrupt.judge(replay, again, (1, 1), (1, 1))
        if judged.over or judged.roles:
            return judged.roles
    return ()

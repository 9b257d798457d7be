"""What is done about a slow worker: nothing at first, then, when it has cost as much, a standby takes its role.

The ladder is that of `plan.escalation`. The decisions are records; what follows from one is a wish to drain the slow
worker's place, as a person's is: an input of the job's machine, which stays a pure fold over its journal. Nothing is
drained unless [straggler] act says so.
"""

from __future__ import annotations

import msgspec

from everstep.control import drain, seats
from everstep.control.job import Job, Stage
from everstep.core import events as e
from everstep.core.decisions import Action
from everstep.core.errors import UsageError
from everstep.plan.barred import of_slow
from everstep.plan.escalation import Climb, bear, climbed, ladder, lost_to, watched
from everstep.plan.policy import Situation

LEAST_S = 0.01  # a worker that loses less than this in a step is not worth an incident


def worth(slowdown: float, step_s: float) -> bool:
    """Whether a worker that takes so much longer for its usual work of `step_s` is told at all."""
    return slowdown * step_s >= LEAST_S


def patience_s(steps: int, step_s: float, lasts_s: float) -> float:
    """How long a verdict waits yet, after so many steps since the onset: what is over soon is told nobody."""
    return lasts_s - steps * step_s


class Phase(msgspec.Struct):
    """A slow phase of one worker, as long as its incident is open."""

    judged: e.SlowJudged
    place: str  # node/local_rank
    since_s: float  # up to when its cost is counted
    climb: Climb = Climb()


class Slowness:
    """Feed it every record; ask it again and again what is due."""

    def __init__(self, act: bool) -> None:
        self._act = act
        self._found: list[e.SlowJudged] = []  # not decided yet
        self._open: dict[str, Phase] = {}

    def saw(self, record: e.AnyEvent) -> None:
        match record:
            case e.SlowJudged():
                self._found.append(record)
            case e.IncidentClosed(incident):
                self._found = [judged for judged in self._found if judged.incident != incident]
                self._open.pop(incident, None)

    def due(self, job: Job, now: float) -> list[e.Decided | e.DrainAsked]:
        """Decisions, and what is to be fed to the job's machine."""
        found, self._found = self._found, []
        made: list[e.Decided | e.DrainAsked] = []
        for judged in found:
            rank = next((blame.rank for blame in judged.verdict.culprits), -1)
            situation = _situation(job, judged, str(rank))
            if situation is None:
                continue
            self._open[judged.incident] = Phase(judged, situation.target, now)
            made.append(e.Decided(judged.incident, watched(situation, job.costs)))
        for phase in self._open.values():
            made += self._climb(job, phase, now)
        return made

    def _climb(self, job: Job, phase: Phase, now: float) -> list[e.Decided | e.DrainAsked]:
        """Time in which nobody makes a step for another reason is not its fault."""
        seconds, phase.since_s = now - phase.since_s, now
        situation = _situation(job, phase.judged, phase.place)
        if situation is None or not self._act or job.stage is not Stage.RUNNING:
            return []
        lost = lost_to(seconds, situation.slowdown, situation.workers)
        phase.climb, rung = bear(phase.climb, ladder(situation, job.costs), lost)
        if rung is None or rung.action is not Action.EVICT:
            return []
        decided = e.Decided(phase.judged.incident, climbed(situation, job.costs, rung))
        return [decided, e.DrainAsked(phase.place)]


def _situation(job: Job, judged: e.SlowJudged, wanted: str) -> Situation | None:
    """None: there is no such worker any more. `wanted`: its rank, or its place."""
    try:
        place = drain.find(job, wanted)
    except UsageError:
        return None
    ready = len(seats.ready_ones(job, job.formation)) if job.formation is not None else 0
    return Situation(
        kind="slow",
        target=place,
        workers=len(seats.acting(job)),
        gone=False,
        in_steps=job.formation is not None,
        fixed=job.fixed,
        standbys=ready,
        spares=ready,
        slowdown=1.0 + judged.slowdown,
        barred=of_slow(),
    )

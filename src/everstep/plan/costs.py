"""What actions cost: priors from published systems, and what this job's own incidents took.

A prior is a curve over the number of workers, `Curve`, with its source; outside of its points it is constant, between
them linear in the logarithm of the number. Each of a job's own incidents counts as one observation, the prior as
`PRIOR_WEIGHT` of them: after a few incidents the job's own times decide. `Accounts` folds the journal's records into
observations; live jobs and the simulator use the same fold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from everstep.core import events as e
from everstep.core.decisions import Action, Estimate
from everstep.core.formation import Formation

PRIOR_WEIGHT = 1.0  # observations: the first incident of a job counts as much as what others published
NODE = "node"  # key of: from the loss of a node until another one is there
PROCESS = "process"  # key of: from the death of a process until its successor is ready for a role


class Curve(msgspec.Struct, frozen=True):
    """Seconds over the number of workers: (workers, seconds), ascending."""

    points: tuple[tuple[int, float], ...]
    source: str

    def __call__(self, workers: int) -> float:
        first, last = self.points[0], self.points[-1]
        if workers <= first[0]:
            return first[1]
        for (low, low_s), (high, high_s) in zip(self.points, self.points[1:], strict=False):
            if workers <= high:
                part = math.log(workers / low) / math.log(high / low)
                return low_s + part * (high_s - low_s)
        return last[1]


def flat(seconds: float, source: str) -> Curve:
    return Curve(((1, seconds),), source)


def table(curves: Mapping[Action | str, Curve]) -> dict[str, Curve]:
    """Keyed by the plain text of each action, as it is in the journal."""
    return {key(what): curve for what, curve in curves.items()}


def key(what: Action | str) -> str:
    return what.value if isinstance(what, Action) else what


SMALL = 4  # workers: what this project's own benchmarks measured on one machine (docs/benchmarks.md) is put there


def _measured(seconds: float, *published: tuple[int, float], source: str) -> Curve:
    return Curve(((SMALL, seconds), *published), f"{source}; up to {SMALL} workers: docs/benchmarks.md")


# Downtime of each action: time without a step, beside the steps that are lost. Sections are those of SYSTEMS.
_PLANNED = ((32, 11.5), (128, 14.5), (256, 15.5), (512, 14.2), (1024, 16.6))
_IN_PROCESS = ((16, 50.0), (256, 47.0), (2304, 120.0))
_RESTART = ((32, 80.0), (128, 190.0), (256, 230.0), (512, 260.0), (1024, 300.0), (8192, 388.2))
_UNPLANNED = ((32, 19.6), (128, 20.2), (256, 20.4), (512, 20.4), (1024, 21.1))
_TWO_PHASE = (32, 7.0)
PRIORS = table(
    {
        Action.LEAVE: flat(0.0, "nothing stops"),
        Action.RETRY: _measured(0.05, _TWO_PHASE, source="section 1, ablation: connections in two phases"),
        Action.REROUTE: _measured(0.15, _TWO_PHASE, source="as retry; plans are made before. Section 12"),
        Action.TAKE_OVER: _measured(0.15, _TWO_PHASE, source="as retry; the stage is held already. Section 12"),
        Action.PROMOTE: _measured(0.082, *_UNPLANNED, source="section 1, unplanned"),
        Action.SHRINK: _measured(0.046, _TWO_PHASE, source="as retry; survivors hold the state"),
        Action.GROW: _measured(0.03, *_PLANNED, source="section 1, planned"),
        Action.RESPAWN: _measured(0.81, *_IN_PROCESS, source="section 10, in-process recovery"),
        Action.REPARTITION: _measured(0.15, (32, 57.0), source="section 1: Oobleck removes a member"),
        Action.ROLL_BACK: _measured(0.81, *_IN_PROCESS, source="section 10, in-process recovery"),
        Action.RESTART: _measured(0.21, *_RESTART, source="section 1, Megatron"),
        Action.EVICT: _measured(0.03, *_PLANNED, source="section 1, planned"),
        Action.STOP: flat(3600.0, "assumed: a person has to look"),
        NODE: flat(90.0, "section 1: rescheduling in a restart, 1.50 min"),
        PROCESS: _measured(1.5, (8192, 108.0), source="section 1: warm-up in a restart, 1.80 min"),
    }
)


class Costs(msgspec.Struct, frozen=True):
    """What is known of a job's costs. `seen`: (observations, their sum in seconds) by action, NODE or PROCESS."""

    seen: dict[str, tuple[int, float]] = {}
    priors: dict[str, Curve] = msgspec.field(default_factory=lambda: PRIORS)
    weight: float = PRIOR_WEIGHT

    def estimate(self, what: Action | str, workers: int) -> Estimate:
        count, total_s = self.seen.get(key(what), (0, 0.0))
        return Estimate(self.priors[key(what)](workers), self.weight, count, total_s)

    def seconds(self, what: Action | str, workers: int) -> float:
        """Expected: an action's downtime, or until a node or a process is there."""
        return self.estimate(what, workers).mean_s

    def saw(self, what: Action | str, seconds: float) -> Costs:
        """With one more observation."""
        count, total_s = self.seen.get(key(what), (0, 0.0))
        return msgspec.structs.replace(self, seen={**self.seen, key(what): (count + 1, total_s + seconds)})


class Accounts(msgspec.Struct):
    """What each decision cost, from the journal's records: feed every record, get what there is to learn.

    An incident's last decision is charged with its downtime: what was tried before belongs to its price. The time until
    the fault was found does not: it is the same whatever is done.
    """

    chosen: dict[str, Action] = {}
    lost_at_s: list[float] = []  # of nodes that are not replaced yet
    died_at_s: dict[str, float] = {}  # node -> when a process died there that has no successor yet
    seated: set[str] = set()

    def saw(self, record: e.AnyEvent, now: float) -> list[tuple[str, float]]:
        """(what, seconds) that this record lets us learn."""
        match record:
            case e.Decided(incident, decision):
                self.chosen[incident] = decision.action
            case e.IncidentClosed(incident, outcome, downtime_s, phases):
                action = self.chosen.pop(incident, None)
                if action is not None and outcome == "recovered" and downtime_s >= 0:
                    return [(key(action), max(0.0, downtime_s - phases.get("detect", 0.0)))]
            case e.NodeLost():
                self.lost_at_s.append(now)
            case e.NodeJoined() if self.lost_at_s:
                return [(NODE, max(0.0, now - self.lost_at_s.pop(0)))]
            case e.WorkerEnded(_, node, exit) if exit.failed:
                self.died_at_s.setdefault(node, now)
            case e.FormationMade(formation):
                return self._successors(formation, now)
        return []

    def _successors(self, formation: Formation, now: float) -> list[tuple[str, float]]:
        """Members for the first time, in processes that followed one which died there."""
        new = [seat for seat in formation.seats if seat.worker not in self.seated]
        self.seated = {seat.worker for seat in formation.seats}
        later = [seat.node for seat in new if not seat.worker.endswith("#0")]
        return [(PROCESS, now - self.died_at_s.pop(node)) for node in later if node in self.died_at_s]

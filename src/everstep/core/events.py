"""What happened: the inputs of the job's state machine, and the records the journal keeps beside them.

Inputs are replayed by a restarted controller: the machine's state is a fold over them. Records are facts
the machine or the controller derived; people, reports and dashboards read those. All are past tense.
"""

from __future__ import annotations

import msgspec

from everstep.core.anomaly import Anomaly
from everstep.core.dealing import Dealing
from everstep.core.decisions import Decision
from everstep.core.formation import Formation
from everstep.core.load import NodeLoad
from everstep.core.types import Blame, EpochPlan, Exit, JobSpec, NodeLoss, NodeReport, Verdict


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of everything the journal holds."""


# Inputs of the job's state machine --------------------------------------------------------------------


class JobSubmitted(Event, frozen=True):
    spec: JobSpec


class ControllerStarted(Event, frozen=True):
    """A controller began its life number `term` (1 is the first)."""

    term: int


class NodeReported(Event, frozen=True):
    report: NodeReport


class NodeGone(Event, frozen=True):
    """The link to a node ended (`how` CLOSED) or its lease ran out (SILENT)."""

    node: str
    incarnation: str
    how: NodeLoss


class HangSuspected(Event, frozen=True):
    """The hang detector wants evidence: stacks were asked for. `why` empty: the suspicion was unfounded."""

    epoch: int
    why: str


class HangJudged(Event, frozen=True):
    """The hang detector is sure enough to act on this epoch."""

    epoch: int
    verdict: Verdict


class StopAsked(Event, frozen=True):
    """Somebody wants the job to end: a signal to the launcher or a worker, or a command."""

    why: str
    signal: int = 15
    grace_s: float = 30.0
    stop_at_step: int = 0


class DrainAsked(Event, frozen=True):
    """A person wants this target out of the job: a node, or the place of one worker (node/local_rank).

    `undo`: that place is to be filled again.
    """

    target: str
    undo: bool = False


class SaveAsked(Event, frozen=True):
    """A person wants the state after the next step on disk. Wishes are counted from 1."""

    number: int


class CostLearned(Event, frozen=True):
    """What an action took in an incident that is over (`plan.costs`): later decisions rest on it."""

    what: str
    seconds: float


class Ticked(Event, frozen=True):
    """Time passed; journalled only when it made the machine act."""


Input = (
    JobSubmitted
    | ControllerStarted
    | NodeReported
    | NodeGone
    | HangSuspected
    | HangJudged
    | StopAsked
    | DrainAsked
    | SaveAsked
    | CostLearned
    | Ticked
)


# Records ----------------------------------------------------------------------------------------------


class StageChanged(Event, frozen=True):
    """The job's life cycle moved on (names of control.lifecycle.Stage)."""

    old: str
    new: str
    why: str = ""


class NodeJoined(Event, frozen=True):
    node: str
    incarnation: str
    address: str
    slots: int


class NodeLost(Event, frozen=True):
    node: str
    incarnation: str
    how: NodeLoss


class EpochFormed(Event, frozen=True):
    plan: EpochPlan


class FormationMade(Event, frozen=True):
    """Workers with a session are to act in these roles from here on."""

    formation: Formation


class PlanAmended(Event, frozen=True):
    """A node got a place in the running epoch; no other worker is touched."""

    plan: EpochPlan


class StepsDealt(Event, frozen=True):
    """From some step on, what was committed was dealt in another way. `missed`: dealings before it may not be known."""

    dealing: Dealing
    missed: bool = False


class StateRestored(Event, frozen=True):
    """All members of this formation went back to a kept state of `step` steps; to 0: they began again.

    `before`: steps known to be committed until then. `lost`: how many of these are done again.
    """

    epoch: int
    step: int
    before: int
    lost: int


class SaveRequested(Event, frozen=True):
    """The state after `step` steps is to be saved to disk."""

    step: int


class SaveDurable(Event, frozen=True):
    """It is complete there: a crash of everything would not lose it."""

    step: int


class SaveFailed(Event, frozen=True):
    step: int
    why: str


class StepResumed(Event, frozen=True):
    """Every member of a formation that follows a fault committed a step in it.

    `gap_s`: the longest time a survivor was without a commit; -1: nobody survived to measure it.
    """

    epoch: int
    committed: int
    gap_s: float


class WorkerEnded(Event, frozen=True):
    """A worker failed or ended. `seen_s` is its time on the controller's clock."""

    rank: int
    node: str
    exit: Exit
    seen_s: float


class IncidentOpened(Event, frozen=True):
    """First sign of a fault. `kind`: crash, exception (of a function whose process lives on), hang, slow, node-lost,
    stop, incomplete, rolled-back, step-fell-back, save-failed, corrupt (replicas differ), anomaly (of a metric)."""

    incident: str
    kind: str
    culprits: tuple[Blame, ...]
    why: str


WATCHED = ("slow", "anomaly")  # kinds of incidents for which nobody stops, and nobody ends


class SlowJudged(Event, frozen=True):
    """The straggler detector names a worker, whose `phase` takes longer since step `since`.

    `slowdown` 0.5: compute takes 1.5 times the usual; loader and saves take half of a usual step longer.
    """

    incident: str
    verdict: Verdict
    phase: str  # compute, data, save
    slowdown: float
    since: int
    step: int  # of the job, at the verdict


class AnomalyJudged(Event, frozen=True):
    """A metric that the session of `worker` logs left its usual range, or does so again and again."""

    incident: str
    verdict: Verdict
    worker: str
    anomaly: Anomaly


class IncidentUpdated(Event, frozen=True):
    """More is known: collateral damage, or a better first cause than the one named before."""

    incident: str
    culprits: tuple[Blame, ...]
    collateral: tuple[Blame, ...] = ()
    why: str = ""


class Decided(Event, frozen=True):
    """What is done about an incident, and what else was weighed."""

    incident: str
    decision: Decision


class EvidenceSaved(Event, frozen=True):
    """Files written into the incident's folder, relative to the run folder."""

    incident: str
    files: tuple[str, ...]


class CauseFound(Event, frozen=True):
    """What the first cause of an incident wrote has a known meaning: the class is the culprit's `cause`. Where several
    detectors know of the incident: their verdicts as one, and each with the role it played (see detect.fuse)."""

    incident: str
    verdict: Verdict
    evidence: tuple[tuple[str, Verdict], ...] = ()


class SurvivorsTold(Event, frozen=True):
    """Every member's agent has signalled its workers to stop; time since the first sign of the fault."""

    incident: str
    after_s: float


class StepsSeen(Event, frozen=True):
    """Progress of the slowest worker of the epoch, at most once a second, and at its first step.

    `step_at_s`: when the last step was made, controller's clock. `first_step_at_s`: the epoch's first step, or -1.
    `total_step` is the optimizer's own count (-1 when it keeps none). `stall_s`: time of this membership's steps that
    went into calls of saves, by the worker with most of it; it begins at 0 again after a change. `twice_s`: the same,
    of what went into passes of audited steps that are not committed.
    """

    epoch: int
    step: int
    total_step: int
    step_at_s: float
    first_step_at_s: float = -1.0
    saves: int = 0
    saved_step: int = -1
    rss_bytes: int = 0
    stall_s: float = 0.0
    twice_s: float = 0.0


class MetricsSeen(Event, frozen=True):
    """What the first member's script logged of a committed step, the newest, at most once a second. After a rollback
    the same steps come again: what was told of them before does not count."""

    step: int
    values: dict[str, float]


class WorkersSeen(Event, frozen=True):
    """By rank: seconds of its own in its newest steps (mean), waits not counted, -1: none; its memory; and the newest
    step whose state it put into the vault of its node, -1: none. Seldom: the more workers, the more seldom."""

    epoch: int
    own_s: tuple[float, ...]
    rss_bytes: tuple[int, ...]
    kept_steps: tuple[int, ...] = ()


class LoadSeen(Event, frozen=True):
    """By node, spares too: how busy it, its workers and its devices were since the record before. Seldom: the more
    workers, the more seldom. Who sent nothing since then is not in it."""

    nodes: dict[str, NodeLoad]


class FleetSeen(Event, frozen=True):
    """Accelerators of a job whose workers are not listed, after a change. `slow`: of those that act.
    `straggling`: share of the time of steps in which all wait for a slow one; `redundant`: share of the rest that is
    spent on redundancy."""

    acting: int
    spare: int
    missing: int
    slow: int = 0
    straggling: float = 0.0
    redundant: float = 0.0


class IncidentClosed(Event, frozen=True):
    """Recovered: the first step of the new epoch was made, or the job ended. Durations in seconds.

    `downtime_s`: from the last step before the fault to the first step after it, -1 when there was none.
    `phases`: name -> seconds, in order (detect, stop, form, first-step).
    """

    incident: str
    outcome: str
    downtime_s: float = -1.0
    phases: dict[str, float] = {}
    redone_steps: int = 0


class LookTaken(Event, frozen=True):
    """A person asked to see where these workers are. `what`: stacks or profile. `file`: relative to the run folder."""

    number: int
    what: str
    ranks: tuple[int, ...]
    file: str
    summary: str


class Alert(Event, frozen=True):
    """Something a person should know that is not an incident by itself."""

    kind: str
    text: str
    node: str = ""  # that it is about, if it is about one


class JobEnded(Event, frozen=True):
    exit_code: int
    why: str


Record = (
    StageChanged
    | NodeJoined
    | NodeLost
    | EpochFormed
    | FormationMade
    | PlanAmended
    | StepsDealt
    | StateRestored
    | SaveRequested
    | SaveDurable
    | SaveFailed
    | StepResumed
    | WorkerEnded
    | IncidentOpened
    | SlowJudged
    | AnomalyJudged
    | IncidentUpdated
    | Decided
    | EvidenceSaved
    | CauseFound
    | SurvivorsTold
    | StepsSeen
    | MetricsSeen
    | WorkersSeen
    | LoadSeen
    | FleetSeen
    | IncidentClosed
    | LookTaken
    | Alert
    | JobEnded
)
AnyEvent = Input | Record


class Entry(msgspec.Struct, frozen=True):
    """One line of the journal. `t_s`: the controller's monotonic clock; `wall_s`: seconds since 1970."""

    n: int
    t_s: float
    wall_s: float
    job: str
    epoch: int
    event: AnyEvent

"""The fold over a job's journal that everything people see is made of: `Viewer.add` each entry, show `Viewer.view`.

Its memory does not grow with the job: `dump` and `load` keep the whole of it (less than 1 MB with 1,000 workers), so
that a reader starts from the newest dump and not from the begin. Parts: `places` (who is where), `cases` (incidents),
`training` (steps, saves), `goodput` (what the accelerators' time was spent on), `series` (curves).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self

import msgspec

from everstep.core import events as e
from everstep.observe import goodput as g
from everstep.observe.cases import ASIDE, OTHER, PLANNED, Sign, name_in
from everstep.observe.known import VERSION, Known, Steps
from everstep.observe.training import Training
from everstep.observe.view import KEPT_ALERTS, KEPT_EPOCHS, AlertView, EpochView, View, WorkerState

CLOCK_JUMP_S = 5.0  # a new controller whose monotonic clock differs by more from wall time runs on another clock
NAMED = 8  # who came and left, of an epoch
WAITS = "waits for"  # so begins why a job re-seats, but cannot yet
STANDS = ("re-seating", "evicting", "re-forming")  # stages in which no step is made

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Known)


class Viewer:
    """A `View` of all entries so far. Not for several threads."""

    def __init__(self, known: Known | None = None) -> None:
        self._known = known = known or Known()
        self._view, self._places, self._cases, self._goodput = known.view, known.places, known.cases, known.goodput
        self._cases.known = {case.id: case for case in self._view.incidents}
        self._training = Training(known)
        self._ahead_s = 0.0
        self._handlers = self._by_kind()

    def _by_kind(self) -> dict[type, Callable[..., object]]:
        training, cases = self._training, self._cases
        return {
            e.JobSubmitted: self._submitted, e.ControllerStarted: self._started, e.StageChanged: self._stage,
            e.JobEnded: self._ended, e.HangSuspected: self._suspected, e.HangJudged: self._hung,
            e.StopAsked: self._stop, e.Alert: self._alert, e.NodeJoined: self._joined, e.NodeLost: self._lost,
            e.DrainAsked: self._drains, e.NodeReported: self._reported, e.WorkerEnded: self._worker,
            e.WorkersSeen: self._workers, e.FleetSeen: self._fleet, e.EpochFormed: self._epoch,
            e.FormationMade: self._formation, e.PlanAmended: self._amended, e.StepsSeen: self._steps,
            e.StateRestored: training.restored, e.StepResumed: training.resumed, e.MetricsSeen: training.metrics,
            e.SaveRequested: training.save_requested, e.SaveDurable: training.save_durable,
            e.SaveFailed: training.save_failed, e.IncidentOpened: self._opened,
            e.IncidentUpdated: partial(cases.updated, self._view),
            e.IncidentClosed: self._closed, e.SlowJudged: self._slow, e.AnomalyJudged: cases.judged,
            e.Decided: cases.decided, e.EvidenceSaved: cases.saved, e.CauseFound: partial(cases.found, self._view),
            e.SurvivorsTold: cases.survivors,
        }  # fmt: skip

    # The fold -------------------------------------------------------------------------------------------

    def add(self, entry: e.Entry) -> None:
        """The next entry of the journal."""
        known, view, event = self._known, self._view, entry.event
        if known.began_s < 0:
            known.began_s = entry.t_s
            view.job, view.submitted_wall_s = entry.job, entry.wall_s
        kind = type(event)
        if kind is e.ControllerStarted:
            self._align(entry)
        known.last_t_s, known.last_wall_s = entry.t_s, entry.wall_s
        goodput = self._goodput
        at_s = max(goodput.now_s, entry.t_s + known.offset_s - known.began_s)
        goodput.advance(at_s)
        view.entries += 1
        self._ahead_s = 0.0
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(event, at_s)

    def until(self, now_s: float) -> None:
        """Time has passed to this moment (seconds since the submission) and nothing was written: the view shows
        what that costs, if all is as it looks. The next entry tells what it was."""
        self._ahead_s = max(0.0, now_s - self._goodput.now_s)

    @property
    def now_s(self) -> float:
        """Of the newest entry, in seconds since the submission."""
        return self._goodput.now_s

    @property
    def last_wall_s(self) -> float:
        """Of the newest entry, since 1970; 0: there is none."""
        return self._known.last_wall_s

    @property
    def accelerators(self) -> int:
        """That the job has now, or wants; none once it ended."""
        return 0 if self._view.ended else self._view.fleet.total

    @property
    def effective_s(self) -> float:
        """Seconds in which steps were made that last."""
        return self._goodput.effective(self._ahead_s)

    def buckets(self) -> dict[str, float]:
        """Those of the view, at less cost."""
        return self._goodput.buckets(self._ahead_s)

    @property
    def view(self) -> View:
        """Up to date. It is changed by later entries: encode or copy what must stay."""
        view, goodput = self._view, self._goodput
        ahead_s = 0.0 if view.ended else self._ahead_s
        view.now_s = goodput.now_s + ahead_s
        view.buckets = goodput.buckets(ahead_s)
        view.bucket_series = goodput.bins.shares(goodput.booked_s, goodput.now_s)
        self._price(goodput.losses(ahead_s))
        wall_s = view.ended_s if view.ended else view.now_s
        view.ettr = self.effective_s / wall_s if wall_s > 0 else 0.0
        return view

    def _price(self, losses: dict[str, dict[str, float]]) -> None:
        """What each incident cost, and each cause; what no incident caused, by bucket."""
        costs = dict(self._known.told_costs)
        for case in self._view.incidents:
            case.cost = losses.pop(case.id, {})
            if case.cost:
                cause = self._cases.cause(case)
                costs[cause] = costs.get(cause, 0.0) + sum(case.cost.values())
        for owner, parts in losses.items():
            for bucket, spent in parts.items():
                cause = OTHER if owner else bucket
                costs[cause] = costs.get(cause, 0.0) + spent
        self._view.costs = costs

    def dump(self) -> bytes:
        """All of it, for `load`."""
        cases = self._cases
        known, cases.known = cases.known, {}  # they are in the view too
        try:
            return _encoder.encode(self._known)
        finally:
            cases.known = known

    @classmethod
    def load(cls, data: bytes) -> Self:
        """Raises ValueError when these are not the bytes of a `dump` of this version."""
        try:
            known = _decoder.decode(data)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a snapshot of this version of Everstep: {error}") from error
        if known.version != VERSION:
            raise ValueError(f"a snapshot of version {known.version}, not {VERSION}")
        return cls(known)

    def _align(self, entry: e.Entry) -> None:
        """A new controller may run on another machine: its monotonic clock then means something else."""
        known = self._known
        apart, wall = entry.t_s - known.last_t_s, entry.wall_s - known.last_wall_s
        if self._view.entries and (apart < 0 or (wall >= 0 and abs(apart - wall) > CLOCK_JUMP_S)):
            known.offset_s += known.last_t_s + max(0.0, wall) - entry.t_s

    # The job --------------------------------------------------------------------------------------------

    def _submitted(self, event: e.JobSubmitted, _at_s: float) -> None:
        self._view.script = event.spec.script
        self._places.submitted(event.spec.min_nodes, event.spec.max_nodes)
        self._count()

    def _started(self, event: e.ControllerStarted, at_s: float) -> None:
        self._view.term = event.term
        if event.term > 1:
            self._cases.tell(at_s, "act", f"a new controller took over: life number {event.term}")

    def _stage(self, event: e.StageChanged, at_s: float) -> None:
        view, known = self._view, self._known
        view.stage = event.new
        known.waits = event.new == "re-seating" and event.why.startswith(WAITS)
        if event.new in STANDS:
            self._stands(event.new)
        elif event.new == "running" and event.old == "suspect" and not view.simulated:
            self._goodput.relabel(self._goodput.last_s, at_s, g.PRODUCTIVE)  # it was unfounded
        elif event.new == "running" and self._makes_steps:
            self._goodput.resumed()
            known.owner = ""
        if event.new in STANDS or event.new in ("forming", "running"):
            self._cases.tell(at_s, "act", f"the job is {event.new}{f': {event.why}' if event.why else ''}")
        self._phase()

    def _stands(self, stage: str) -> None:
        """Nobody makes a step from now on. Who is asked to stop at a step, without a fault, makes those until then."""
        known, goodput, case, view = self._known, self._goodput, self._cases.stopping(), self._view
        known.owner = case.id if case is not None else ""
        if not goodput.started or goodput.open[-1].kind not in g.STEPPING:
            return
        if case is None or case.kind in PLANNED:
            if stage == "re-forming" and not view.simulated:
                goodput.relabel(goodput.last_s, goodput.now_s, g.RECOVERY, known.owner)
        elif view.simulated:  # it is known when the fault came
            goodput.stopped(0.0, case.opened_s, known.owner)
        else:
            goodput.stopped(view.step_s, self._cases.ended_s(case, goodput.last_s), known.owner)

    @property
    def _makes_steps(self) -> bool:
        """A job that runs: a new epoch's first step may still be to come."""
        return not self._known.steps.fresh or self._view.simulated

    def _phase(self) -> None:
        kind = self._kind()
        self._goodput.phase(kind, self._known.owner if kind in (g.RECOVERY, g.WAITING) else "")

    def _kind(self) -> str:
        """What those who act do now, as far as it can be told."""
        stage, goodput, runs = self._view.stage, self._goodput, self._makes_steps
        if runs and stage in ("running", "stopping"):
            return g.PRODUCTIVE
        if stage == "suspect":
            return g.DETECTION if runs else g.RECOVERY
        lacks = goodput.missing > 0
        if not goodput.started and not self._known.owner:
            return g.WAITING if lacks and stage in ("", "checking", "re-forming") else g.START
        if stage == "re-forming" or (self._known.waits and lacks):
            return g.WAITING
        case = self._cases.stopping()
        planned = stage == "evicting" and (case is None or case.kind in PLANNED)
        return g.PRODUCTIVE if runs and planned else g.RECOVERY

    def _ended(self, event: e.JobEnded, at_s: float) -> None:
        view = self._view
        if view.ended:
            return
        view.exit_code, view.why, view.ended_s = event.exit_code, event.why, at_s
        self._cases.tell(at_s, "close", f"the job ended with {event.exit_code}: {event.why}")
        self._goodput.ended()
        self._known.owner = ""

    def _suspected(self, event: e.HangSuspected, at_s: float) -> None:
        if event.why:
            self._cases.sign(Sign(at_s, "", -1, f"looks hung: {event.why}"))

    def _hung(self, event: e.HangJudged, at_s: float) -> None:
        for blame in event.verdict.culprits:
            self._cases.sign(Sign(at_s, blame.node, blame.rank, f"judged hung: {event.verdict.why}"))
            self._places.state(self._view, blame.rank, WorkerState.STOPPED)

    def _stop(self, event: e.StopAsked, at_s: float) -> None:
        self._cases.sign(Sign(at_s, "", -1, f"the job is asked to end: {event.why}"))

    def _alert(self, event: e.Alert, at_s: float) -> None:
        self._view.alerts.append(AlertView(at_s, event.kind, event.text[:400]))
        del self._view.alerts[:-KEPT_ALERTS]
        if event.kind == "step-fell-back":
            self._training.from_scratch()

    def _steps(self, event: e.StepsSeen, at_s: float) -> None:
        if self._training.seen(event, at_s):
            self._known.owner = ""
            self._phase()
            self._count()

    # Incidents ------------------------------------------------------------------------------------------

    def _opened(self, event: e.IncidentOpened, at_s: float) -> None:
        for case in self._cases.opened(self._view, event, at_s):
            cost = self._goodput.charged.pop(case.id, {})
            told = self._known.told_costs
            cause = name_in(told, self._cases.cause(case))
            told[cause] = told.get(cause, 0.0) + sum(cost.values())
        if event.kind not in ASIDE:
            if self._goodput.missing and not self._goodput.short:
                self._known.lacks()
            self._explained(event)

    def _explained(self, event: e.IncidentOpened) -> None:
        """Why the members seat anew may be told after it: who leaves early is found out by the others first."""
        known, goodput, view = self._known, self._goodput, self._view
        if view.stage != "re-seating" or known.owner or event.kind in PLANNED or view.simulated or not goodput.started:
            return
        known.owner = event.incident
        for segment in goodput.open:
            if segment.kind == g.RECOVERY and not segment.owner:
                segment.owner = event.incident
        goodput.stopped(view.step_s, self._cases.ended_s(view.incidents[-1], goodput.last_s), event.incident)
        self._phase()

    def _closed(self, event: e.IncidentClosed, at_s: float) -> None:
        case = self._cases.closed(self._view, event, at_s)
        if self._goodput.slow.pop(event.incident, None) is None or case is None:
            return
        for blame in case.culprits:
            if self._places.is_slow(self._view, blame.rank):
                self._places.state(self._view, blame.rank, WorkerState.ACTS)
        self._count()

    def _slow(self, event: e.SlowJudged, at_s: float) -> None:
        self._cases.judged(event, at_s)
        self._goodput.settle(self._goodput.last_s)
        self._goodput.slowed(event.incident, event.slowdown, event.since)
        for blame in event.verdict.culprits:
            self._places.state(self._view, blame.rank, WorkerState.SLOW)
        self._count()

    # Who is where ---------------------------------------------------------------------------------------

    def _count(self) -> None:
        """A job that has ended stays as it was then."""
        if not self._view.ended and self._known.counted():
            self._phase()

    def _joined(self, event: e.NodeJoined, at_s: float) -> None:
        if self._view.ended:
            return
        self._places.joined(self._view, event, at_s)
        if not self._view.simulated:
            self._cases.tell(at_s, "recover", f"{event.node} joined")
        self._count()

    def _lost(self, event: e.NodeLost, at_s: float) -> None:
        if self._view.ended:  # its agents leave
            return
        self._places.lost(self._view, event, at_s)
        self._cases.sign(Sign(at_s, event.node, -1, f"{event.node} was lost: {event.how.value}"))
        self._count()

    def _drains(self, event: e.DrainAsked, at_s: float) -> None:
        if "/" in event.target:
            self._places.empty(self._view, event.target, event.undo)
            self._count()
        else:
            self._places.leaving(self._view, event.target, event.undo, at_s)
        what = "may be used again" if event.undo else "is asked to leave"
        self._cases.sign(Sign(at_s, event.target.partition("/")[0], -1, f"{event.target} {what}"))

    def _reported(self, event: e.NodeReported, at_s: float) -> None:
        report, view = event.report, self._view
        if not view.goal:
            view.goal = max((w.session.goal for w in report.workers if w.session is not None), default=0)
        if self._places.reported(view, report, at_s):
            self._count()

    def _worker(self, event: e.WorkerEnded, at_s: float) -> None:
        self._places.ended(self._view, event)
        self._count()
        exit = event.exit
        if exit.failed:
            how = exit.message or (f"signal {exit.signal}" if exit.signal else f"exit status {exit.code}")
            text = f"rank {event.rank} on {event.node} ended ({exit.cause.value}): {how}"
            seen_s = min(at_s, max(0.0, self._known.at(event.seen_s)))
            self._cases.sign(Sign(seen_s, event.node, event.rank, text, ended=True))

    def _workers(self, event: e.WorkersSeen, _at_s: float) -> None:
        self._places.seen(self._view, event)

    def _fleet(self, event: e.FleetSeen, at_s: float) -> None:
        goodput = self._goodput
        goodput.settle(goodput.now_s)
        goodput.told, goodput.straggling, goodput.redundant = True, event.straggling, event.redundant
        self._places.fleet(self._view, event)
        self._count()
        self._known.curve("members", at_s, event.acting)

    # Epochs ---------------------------------------------------------------------------------------------

    def _epoch(self, event: e.EpochFormed, at_s: float) -> None:
        view, plan, known = self._view, event.plan, self._known
        view.restarts += bool(view.epoch)
        view.epoch = plan.epoch
        known.steps = Steps(plan.epoch, paces=known.steps.paces)
        self._places.planned(view, plan, at_s)
        self._made(EpochView(plan.epoch, at_s, plan.world_size), tuple(member.node for member in plan.members), False)
        self._cases.tell(at_s, "recover", f"epoch {plan.epoch} is formed: {plan.world_size} workers")
        self._count()
        self._phase()

    def _formation(self, event: e.FormationMade, at_s: float) -> None:
        formation = event.formation
        names = tuple(seat.worker for seat in formation.seats)
        self._made(EpochView(formation.epoch, at_s, len(names), formation=True), names, True)
        self._places.formation(self._view, formation)
        if formation.epoch > 1:
            self._cases.tell(at_s, "act", f"formation {formation.epoch}: {len(names)} workers go on")
        self._count()
        self._known.curve("members", at_s, len(names))

    def _made(self, made: EpochView, names: tuple[str, ...], seated: bool) -> None:
        """Against the one before, if that was of the same sort."""
        known, case = self._known, self._cases.stopping()
        if known.seats and known.seated == seated:
            before, now = set(known.seats), set(names)
            made.came = tuple(name for name in names if name not in before)[:NAMED]
            made.left = tuple(name for name in known.seats if name not in now)[:NAMED]
            if seated:
                made.links_kept, made.links_new = _links(known.seats, names)
        made.why = case.id if case is not None else ""
        known.seats, known.seated = names, seated
        self._view.epochs.append(made)
        del self._view.epochs[:-KEPT_EPOCHS]

    def _amended(self, event: e.PlanAmended, at_s: float) -> None:
        self._places.amended(self._view, event.plan, at_s)
        self._cases.tell(at_s, "recover", "a node got a place in the running epoch")
        self._count()


def _links(before: tuple[str, ...], after: tuple[str, ...]) -> tuple[int, int]:
    """Neighbours in the ring that stay so, and those that are new."""
    if len(after) < 2:
        return 0, 0
    old = set(zip(before, before[1:] + before[:1], strict=True))
    new = set(zip(after, after[1:] + after[:1], strict=True))
    return len(old & new), len(new - old)

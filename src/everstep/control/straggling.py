"""The straggler detector in the controller's hands: lines up what heartbeats tell of each step, and says who is slow.

What is slow is an incident of kind "slow", from the verdict until the worker is well again; jitter is an alert. What is
done about a verdict is decided in one place, `StragglerWatch.answer`. A detector, and what it learned, stays as long
as the job has the same places (node, local rank), over restarts too: what makes a worker slow is as a rule its node's.
Of a place that another one takes over only that is forgotten: with thousands of members one is replaced every few
minutes. A controller that is replaced begins to learn anew, and says so.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from everstep.control.job import Job
from everstep.control.slowness import Slowness, patience_s, worth
from everstep.core import events as e
from everstep.core.config import Straggler as Settings
from everstep.core.types import Blame, EpochPlan, NodeProgress, StacksAsked, Verdict
from everstep.core.work import StepWork
from everstep.detect.critical import waited_for
from everstep.plan.escalation import LEFT_ROLE

if TYPE_CHECKING:
    from everstep.detect.straggler import Finding, Straggler

DETECTOR = "everstep.detect.straggler"  # imports numpy: not before there is something to judge
SAMPLES = 3  # stacks of a slow worker, one with each heartbeat: one alone may show it between two slow parts
LITTLE = 0.01  # part of the others' time that a member needs at least
MOST_STEPS = 512  # waiting for members that tell nothing of them

Place = tuple[str, int]  # node, local rank
EVERYBODY: Place = ("", -1)  # whom jitter concerns


class Slow(msgspec.Struct):
    """An open incident."""

    incident: str
    place: Place
    samples: int = 0  # of its stacks, asked for


class Pending(NamedTuple):
    """A verdict that has to last yet."""

    finding: Finding
    due_s: float
    growths: list[float]  # of steps since: how many times as long they took for it


class Lineup:
    """What the members tell of the same step. It is complete when each told of it, or of a later one."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._newest = dict.fromkeys(ranks, 0)
        self._least, self._at_least = 0, len(self._newest)  # the smallest of these, and how many have it
        self._steps: dict[int, dict[int, StepWork]] = {}
        self._done = 0

    def add(self, rank: int, work: StepWork) -> None:
        newest = self._newest.get(rank)
        if newest is None or work.step <= self._done:
            return
        self._steps.setdefault(work.step, {})[rank] = work
        self._newest[rank] = max(newest, work.step)
        if newest == self._least < work.step:
            self._at_least -= 1
            if not self._at_least:  # once a step, however many members there are
                self._least = min(self._newest.values())
                self._at_least = sum(step == self._least for step in self._newest.values())

    def complete(self) -> list[tuple[int, dict[int, StepWork]]]:
        """Steps in order, each once, with what is known of them by rank."""
        upto = self._least
        if len(self._steps) > MOST_STEPS:
            upto = max(upto, sorted(self._steps)[-MOST_STEPS])
        ready = sorted(step for step in self._steps if step <= upto)
        self._done = max([self._done, *ready])
        return [(step, self._steps.pop(step)) for step in ready]


class StragglerWatch:
    """Feed it the epochs and their heartbeats."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._module: Any = None
        self._loading: threading.Thread | None = None
        self._missing = ""  # why there is no detector
        self._epoch = 0
        self._places: dict[int, Place] = {}  # by rank, of who acts
        self._order: dict[Place, int] = {}  # the detector's members
        self._lineup = Lineup(())
        self._detector: Straggler | None = None
        self._pending: dict[Place, Pending] = {}
        self._open: dict[Place, Slow] = {}
        self._jitters = False  # it was told
        self._incidents = 0
        self._found_at: dict[str, int] = {}  # node -> verdicts so far
        self._slowness = Slowness(settings.act)

    def adopt(self, entries: Iterable[e.Entry]) -> list[e.Record]:
        """An earlier controller's journal. Its verdicts are closed: what it had learned went with it."""
        open_ones: dict[str, None] = {}
        for entry in entries:
            match entry.event:
                case e.IncidentOpened(incident, "slow", culprits):
                    open_ones[incident] = None
                    self._count(culprits[0].node)
                case e.IncidentClosed(incident):
                    open_ones.pop(incident, None)
        return [e.IncidentClosed(name, "a new controller watches anew") for name in open_ones]

    def new_epoch(self, plan: EpochPlan | None, acting: frozenset[int]) -> list[e.Record]:
        """Other members, or the same ones again."""
        members = plan.members if plan is not None else ()
        places = {m.first_rank + k: (m.node, k) for m in members for k in range(m.slots)}
        self._epoch = plan.epoch if plan is not None else 0
        self._places = {rank: place for rank, place in places.items() if rank in acting}
        self._lineup = Lineup(self._places)
        left = [self._open.pop(place) for place in list(self._open) if place not in self._places.values()]
        gone = [e.IncidentClosed(slow.incident, LEFT_ROLE) for slow in left]
        return self._closed([*gone, *self._anew()])

    def _anew(self) -> list[e.IncidentClosed]:
        """Who takes another's place is forgotten alone. Where more members come than left, all are watched anew."""
        wanted = set(self._places.values())
        new = sorted(wanted - self._order.keys())
        left = [place for place in self._order if place not in wanted]
        if len(new) <= len(left):
            for place, gone in zip(new, left, strict=False):
                self._replace(gone, place)
            return []
        self._order = {place: number for number, (_, place) in enumerate(sorted(self._places.items()))}
        self._detector, self._jitters = None, False
        self._pending.clear()
        closed, self._open = self._open, {}
        return [e.IncidentClosed(slow.incident, "the members changed: watched anew") for slow in closed.values()]

    def _replace(self, gone: Place, place: Place) -> None:
        """The detector's members stay in their order."""
        self._order = {place if each == gone else each: number for each, number in self._order.items()}
        self._pending.pop(gone, None)
        if self._detector is not None:
            self._detector.forget(self._order[place])

    def saw(self, message: NodeProgress, now: float, ask: Callable[[str, StacksAsked], None]) -> list[e.Record]:
        """One heartbeat of this epoch, of workers that act. `ask` sends a question to a node."""
        if not self._settings.enabled or len(self._places) < 2:
            return []
        for worker in message.workers:
            past = max(0, worker.total_step - worker.step)  # steps of the job before this attempt
            for work in worker.work:
                self._lineup.add(worker.rank, msgspec.structs.replace(work, step=work.step + past) if past else work)
        records = [*itertools.chain(*self._judged(now)), *self._due(now)]
        self._sample(message.node, ask)
        return records

    def due(self, job: Job, now: float) -> list[e.Decided | e.DrainAsked]:
        """What is decided about slow workers, and follows for the job."""
        return self._slowness.due(job, now)

    def end(self) -> list[e.Record]:
        """The job has ended."""
        return [e.IncidentClosed(slow.incident, "slow to the end of the job") for slow in self._open.values()]

    def wait(self) -> None:
        """Until the detector is loaded: for who has all the time."""
        if self._loading is not None:
            self._loading.join()

    # Judging --------------------------------------------------------------------------------------------

    def _judged(self, now: float) -> Iterable[list[e.Record]]:
        steps = self._lineup.complete() if self._loaded() else []
        if self._missing:
            why, self._missing = self._missing, ""
            self._settings = msgspec.structs.replace(self._settings, enabled=False)
            yield [e.Alert("straggler", f"nobody looks for slow workers: {why}")]
        for step, told in steps:
            by_member = {self._order[self._places[rank]]: work for rank, work in told.items()}
            for finding in self._findings(step, by_member):
                yield self._records(finding, by_member, now)
            self._weigh(by_member)
            if self._missing:
                return  # it is told with the next heartbeat

    def _findings(self, step: int, told: Mapping[int, StepWork]) -> tuple[Finding, ...]:
        """Of the detector. A defect of it must not end the controller: it ends the watch."""
        size = len(self._order)
        try:
            if self._detector is None:
                self._detector = self._module.Straggler(size, self._module.Options(least=self._settings.threshold))
            assert self._detector is not None
            return self._detector.saw(step, self._module.Work.of(size, told))
        except Exception as error:  # noqa: BLE001 - told at once
            self._missing = f"{type(error).__name__}: {error}"
            return ()

    def _loaded(self) -> bool:
        """Importing it takes a while, in which the controller has more urgent things to do."""
        if self._module is None and self._loading is None:
            self._loading = threading.Thread(target=self._load, name="everstep-detector", daemon=True)
            self._loading.start()
        return self._module is not None

    def _load(self) -> None:
        try:
            self._module = importlib.import_module(DETECTOR)
        except ImportError as error:  # a controller on a machine without numpy
            self._missing = str(error)

    def _records(self, finding: Finding, told: Mapping[int, StepWork], now: float) -> list[e.Record]:
        place = list(self._order)[finding.member] if finding.member >= 0 else EVERYBODY
        if finding.cleared:
            return self._well(place, finding)
        if place in self._open or place in self._pending:
            return []
        typical_s = _typical_s(told)
        if place is not EVERYBODY and not worth(finding.slowdown, typical_s):
            assert self._detector is not None
            self._detector.forget(finding.member)  # it may become worse
            return []
        wait_s = patience_s(finding.step - finding.since, typical_s, self._settings.lasts_s)
        self._pending[place] = Pending(finding, now + wait_s, [])
        return []

    def _weigh(self, told: Mapping[int, StepWork]) -> None:
        """What this step lost to each member that is about to be told."""
        typical_s = _typical_s(told) if self._pending else 0.0
        for place, pending in self._pending.items():
            member = self._order.get(place, -1)
            others_s = max((work.work_s for each, work in told.items() if each != member), default=0.0)
            if member in told and others_s > 0:
                own_s, lost_s = told[member].work_s, pending.finding.slowdown * typical_s
                pending.growths.append(waited_for(own_s, max(own_s - lost_s, others_s * LITTLE), others_s))

    def _due(self, now: float) -> Iterator[e.Record]:
        """What has lasted for long enough to be told."""
        for place, pending in list(self._pending.items()):
            if pending.due_s <= now:
                del self._pending[place]
                yield from self._told(place, pending.finding, pending.growths)

    def _told(self, place: Place, finding: Finding, growths: Sequence[float]) -> list[e.Record]:
        if place is EVERYBODY:
            self._jitters = True
            return [e.Alert("jitter", finding.why)]
        ranks = {place: rank for rank, place in self._places.items()}
        verdict = finding.verdict([(ranks.get(each, -1), each[0]) for each in self._order])
        incident = self._count(place[0])
        self._open[place] = Slow(incident, place)
        verdict = self._in_words(verdict, finding, ranks.get(place, -1), place)
        verdict = msgspec.structs.replace(verdict, why=verdict.why + _cost(growths))
        judged = e.SlowJudged(incident, verdict, finding.phase, round(finding.slowdown, 4), finding.since, finding.step)
        return self.answer(judged)

    def answer(self, judged: e.SlowJudged) -> list[e.Record]:
        """What is done about a slow worker: it is written down, and `control.slowness` decides."""
        self._slowness.saw(judged)
        return [judged, e.IncidentOpened(judged.incident, "slow", judged.verdict.culprits, judged.verdict.why)]

    def _in_words(self, verdict: Verdict, finding: Finding, rank: int, place: Place) -> Verdict:
        times = self._found_at[place[0]]
        again = f" ({times} times so far on this node)" if times > 1 else ""
        why = (
            f"rank {rank} on {place[0]} is slow in {finding.phase} since step {finding.since}{again}: {finding.why} "
            f"(confidence {finding.confidence:.2f})"
        )
        culprit = Blame(rank, place[0], f"slow-{finding.phase}", f"{finding.slowdown:+.0%}")
        return msgspec.structs.replace(verdict, culprits=(culprit,), why=why)

    def _well(self, place: Place, finding: Finding) -> list[e.Record]:
        self._pending.pop(place, None)
        if place is EVERYBODY:
            told, self._jitters = self._jitters, False
            return [e.Alert("jitter", f"over: {finding.why}")] if told else []
        slow = self._open.pop(place, None)
        return self._closed([e.IncidentClosed(slow.incident, f"well again: {finding.why}")] if slow is not None else [])

    def _closed(self, records: list[e.IncidentClosed]) -> list[e.Record]:
        for record in records:
            self._slowness.saw(record)
        return list(records)

    def _count(self, node: str) -> str:
        self._incidents += 1
        self._found_at[node] = self._found_at.get(node, 0) + 1
        return f"S{self._incidents:03d}"

    def _sample(self, node: str, ask: Callable[[str, StacksAsked], None]) -> None:
        """Stacks of this node's slow workers, a few times while they are slow."""
        for slow in self._open.values():
            if slow.place[0] == node and slow.place in self._places.values() and slow.samples < SAMPLES:
                slow.samples += 1
                ask(node, StacksAsked(slow.incident, self._epoch, (slow.place[1],), alive=True))


def _typical_s(told: Mapping[int, StepWork]) -> float:
    """Median of the members' own time of one step."""
    times = sorted(work.work_s for work in told.values())
    return times[len(times) // 2] if times else 0.0


def _cost(growths: Sequence[float]) -> str:
    """What it costs the job: of the critical path of these steps, the part that is there for this worker alone."""
    if not growths:
        return ""
    longer = sum(growths) / len(growths) - 1.0
    if longer < 0.005:
        return "; so far nobody waits for it: others take as long"
    steps = f"{len(growths)} step{'s' if len(growths) > 1 else ''}"
    return f"; all wait for it: a step takes {100 * longer:.0f} % longer than without that ({steps} looked at)"

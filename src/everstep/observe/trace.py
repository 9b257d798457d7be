"""What a job's trace shows of the job itself: slices of time, as a fold over its journal.

Its stages, epochs, incidents with their phases, saves and alerts, and the steps that it had made at each time. Clocks
of nodes are learned on the way (observe.clocks).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from everstep.core import events as e
from everstep.core.types import Blame
from everstep.observe.clocks import Clocks, Timeline

TRACKS = ("stage", "epochs", "incidents", "watched", "saves", "alerts")  # from the top
POINTS = 20_000  # of the counter of steps; more are thinned out
MOST_ROLES = 64  # named in an epoch


class Slice(NamedTuple):
    """Something of the job. `end_s`: infinite while it lasts; equal to `begin_s`: a moment. `parts`: one behind the
    other from its begin on, by name, in seconds."""

    track: str
    name: str
    begin_s: float
    end_s: float
    args: Mapping[str, Any] = {}
    parts: tuple[tuple[str, float], ...] = ()


class Story:
    """Fold over the journal. Its size is that of the job's incidents, epochs and saves."""

    def __init__(self) -> None:
        self.job = ""
        self.timeline = Timeline()
        self.clocks = Clocks()
        self.slices: list[Slice] = []
        self.nodes: dict[str, None] = {}  # that had a worker
        self._open: dict[tuple[str, str], Slice] = {}  # by track and what it is about
        self._steps: list[tuple[float, int]] = []
        self._every, self._seen = 1, 0

    def add(self, entry: e.Entry) -> None:
        at_s = self.timeline.at(entry)
        self.job = entry.job
        event = entry.event
        match event:
            case e.NodeReported():
                self.clocks.add(event, at_s)
            case e.StageChanged(_, new, why):
                self._next("stage", new, at_s, {"why": why})
            case e.EpochFormed(plan):
                self.nodes |= dict.fromkeys(member.node for member in plan.members)
                self._next("epochs", f"epoch {plan.epoch}: {plan.world_size} workers", at_s, {})
            case e.FormationMade(formation):
                seats = [seat.worker for seat in formation.seats]
                name = f"epoch {formation.epoch}: {len(seats)} members"
                self._next("epochs", name, at_s, {"roles": seats[:MOST_ROLES]})
            case e.StepsSeen(_, step, total):
                self._count(self.timeline.moment(event.step_at_s), max(step, total))
            case e.SaveRequested() | e.SaveDurable() | e.SaveFailed():
                self._save(event, at_s)
            case e.StateRestored(_, step, before, lost):
                args = {"step": step, "before": before, "done again": lost}
                self._moment("alerts", f"all went back to step {step}", at_s, args)
            case e.Alert(kind, text):
                self._moment("alerts", kind, at_s, {"text": text})
            case _:
                self._incident(event, at_s)

    def end(self) -> list[Slice]:
        """All slices; what is not over ends with the newest entry."""
        last_s = self.timeline.now_s
        open_ = [each._replace(end_s=max(last_s, each.begin_s)) for each in self._open.values()]
        return sorted(self.slices + open_, key=lambda each: (each.begin_s, -each.end_s))

    @property
    def steps(self) -> list[tuple[float, int]]:
        return self._steps

    def _moment(self, track: str, name: str, at_s: float, args: Mapping[str, Any]) -> None:
        self.slices.append(Slice(track, name, at_s, at_s, args))

    def _begin(self, track: str, key: str, name: str, at_s: float, args: Mapping[str, Any]) -> None:
        self._open[track, key] = Slice(track, name, at_s, math.inf, args)

    def _close(
        self, track: str, key: str, at_s: float, args: Mapping[str, Any], phases: Mapping[str, float] | None = None
    ) -> None:
        """Phases lie one behind the other; the first one, detection, came before it was known."""
        began = self._open.pop((track, key), None)
        if began is None:
            return
        parts = tuple((name, seconds) for name, seconds in (phases or {}).items() if seconds > 0)
        begin_s = began.begin_s - max(0.0, (phases or {}).get("detect", 0.0))
        end_s = max(at_s, begin_s + sum(seconds for _, seconds in parts))
        self.slices.append(Slice(track, began.name, begin_s, end_s, {**began.args, **args}, parts))

    def _next(self, track: str, name: str, at_s: float, args: Mapping[str, Any]) -> None:
        """One follows the other."""
        self._close(track, "", at_s, {})
        self._begin(track, "", name, at_s, args)

    def _count(self, at_s: float, step: int) -> None:
        if self._seen % self._every == 0:
            self._steps.append((at_s, step))
        self._seen += 1
        if len(self._steps) >= POINTS:
            self._steps, self._every = self._steps[::2], self._every * 2

    def _save(self, event: e.SaveRequested | e.SaveDurable | e.SaveFailed, at_s: float) -> None:
        key = str(event.step)
        match event:
            case e.SaveRequested(step):
                self._begin("saves", key, f"save of step {step}", at_s, {"step": step})
            case e.SaveDurable():
                self._close("saves", key, at_s, {"outcome": "durable"})
            case e.SaveFailed(_, why):
                self._close("saves", key, at_s, {"outcome": f"failed: {why}"})

    def _incident(self, event: e.AnyEvent, at_s: float) -> None:
        args: dict[str, Any]
        match event:
            case e.IncidentOpened(incident, kind, culprits, why):
                track = "watched" if kind in e.WATCHED else "incidents"
                args = {"why": why, "who": [_named(culprit) for culprit in culprits]}
                self._begin(track, incident, f"{kind} ({incident})", at_s, args)
            case e.Decided(incident, decision):
                args = {"why": decision.why, "loss, accelerator-seconds": decision.loss_s}
                self._moment("incidents", f"{decision.action.value} ({incident})", at_s, args)
            case e.IncidentClosed(incident, outcome, downtime_s, phases, redone):
                args = {"outcome": outcome, "downtime, s": downtime_s, "steps done again": redone}
                track = "incidents" if ("incidents", incident) in self._open else "watched"
                self._close(track, incident, at_s, args, phases)


def _named(culprit: Blame) -> str:
    who = f"rank {culprit.rank} of {culprit.node}" if culprit.rank >= 0 else culprit.node
    return f"{who}: {culprit.cause}" if culprit.cause else who

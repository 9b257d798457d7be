"""How long each incident took, phase by phase: a fold over the records and the first steps of each epoch."""

from __future__ import annotations

import msgspec

from everstep.core import events as e


class Open(msgspec.Struct):
    """An incident on its way. Times on the controller's clock, 0 while not reached."""

    id: str
    opened_s: float
    last_step_s: float
    last_total_step: int
    settled_s: float = 0.0
    running_s: float = 0.0


class Recovery(msgspec.Struct):
    """Feed it every record and each epoch's progress; it answers with the incidents that are over."""

    open: dict[str, Open] = {}
    step_at_s: float = 0.0
    best_total_step: int = -1

    def saw(self, record: e.AnyEvent, now: float) -> list[e.IncidentClosed]:
        match record:
            case e.IncidentOpened(incident, kind) if kind not in e.WATCHED:
                self.open[incident] = Open(incident, now, self.step_at_s, self.best_total_step)
            case e.WorkerEnded(_, _, exit):
                self.best_total_step = max(self.best_total_step, exit.total_step)
                for item in self.open.values():
                    if not item.settled_s:  # the heartbeats before a fault miss its last steps
                        item.last_total_step = max(item.last_total_step, exit.total_step)
            case e.StageChanged(_, "re-forming"):
                self._stamp("settled_s", now)
            case e.StageChanged(_, "running"):
                self._stamp("running_s", now)
            case e.StepsSeen():
                return self._steps(record)
            case e.StepResumed(_, _, gap_s):
                closed = [self._close(item, "recovered", now, gap_s) for item in self.open.values()]
                self.open.clear()
                return closed
            case e.IncidentClosed(incident):
                self.open.pop(incident, None)
            case e.JobEnded(_, why):
                closed = [self._close(item, f"job ended: {why}", now, -1.0) for item in self.open.values()]
                self.open.clear()
                return closed
        return []

    def _stamp(self, field: str, now: float) -> None:
        for item in self.open.values():
            if not getattr(item, field):
                setattr(item, field, now)

    def _steps(self, seen: e.StepsSeen) -> list[e.IncidentClosed]:
        closed = []
        for item in list(self.open.values()):
            if item.running_s and seen.first_step_at_s >= item.opened_s:
                downtime = seen.first_step_at_s - item.last_step_s if item.last_step_s else -1.0
                closed.append(self._close(item, "recovered", seen.first_step_at_s, downtime, seen))
                del self.open[item.id]
        self.step_at_s = max(self.step_at_s, seen.step_at_s)
        self.best_total_step = max(self.best_total_step, seen.total_step)
        return closed

    def _close(
        self, item: Open, outcome: str, at: float, downtime: float, seen: e.StepsSeen | None = None
    ) -> e.IncidentClosed:
        phases = {}
        if item.last_step_s:
            phases["detect"] = item.opened_s - item.last_step_s
        marks = [("stop", item.settled_s), ("form", item.running_s), ("first-step", at if downtime >= 0 else 0.0)]
        before = item.opened_s
        for name, mark in marks:
            if mark:
                phases[name] = mark - before
                before = mark
        if downtime >= 0:
            _fit(phases, downtime)
        redone = 0
        if seen is not None and seen.total_step >= 0 and item.last_total_step >= 0:
            redone = max(0, item.last_total_step - (seen.total_step - seen.step))
        return e.IncidentClosed(item.id, outcome, downtime, phases, redone)


def _fit(phases: dict[str, float], downtime_s: float) -> None:
    """The survivors measured how long they stood; heartbeats miss the last steps before, and tell late of the first
    one after. So what is too much was no waiting to notice it, then no waiting for the first step."""
    excess = sum(phases.values()) - downtime_s
    for name in ("detect", "first-step"):
        cut = min(max(0.0, excess), phases.get(name, 0.0))
        if cut:
            phases[name] -= cut
            excess -= cut

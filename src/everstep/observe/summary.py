"""What a job's journal amounts to: one fold over its entries into a `Summary`, for a finished or a running job.

ETTR here is effective training time / wall time, as in the view of the job (docs/goodput.md): time in which steps were
made that last, over the time from the job's submission to its end (or the newest entry). So starts, first steps,
detection, restarts and redone work count as lost, and an undisturbed job has an ETTR of nearly 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.core import events as e
from everstep.core.types import Blame, Verdict
from everstep.observe.unsaved import unsaved
from everstep.observe.view import IncidentView, View
from everstep.observe.viewer import Viewer

CLOCK_JUMP_S = 5.0  # a new controller whose monotonic clock differs by more from wall time runs on another clock


class EpochSummary(msgspec.Struct):
    """One epoch. Times are seconds since the job's submission, -1 while not reached; totals -1 when unknown."""

    epoch: int
    world_size: int
    nodes: tuple[str, ...]
    formed_s: float
    steps: int = 0
    first_step_s: float = -1.0
    last_step_s: float = -1.0
    first_total: int = -1
    last_total: int = -1
    redone_steps: int = 0
    began: int = 0  # steps of a kept state that it began with: its workers count on from there
    saves: int = 0
    rss_bytes: int = 0


class IncidentSummary(msgspec.Struct):
    """One incident. `opened_s` since the job's submission; `downtime_s` -1 when there was no step before or after."""

    id: str
    kind: str
    epoch: int
    opened_s: float
    culprits: tuple[Blame, ...]
    why: str
    collateral: tuple[Blame, ...] = ()
    files: tuple[str, ...] = ()
    outcome: str = ""  # empty while it is open
    downtime_s: float = -1.0
    phases: dict[str, float] = {}
    redone_steps: int = 0
    told_s: float = -1.0  # from the first sign until every survivor was told
    cause: Verdict | None = None  # what the first cause wrote means
    answer: str = ""  # what was decided, and what it was expected to cost
    step: int = -1  # last step of its epoch, -1 when that made none
    last_step_s: float = -1.0  # when that was made


class Summary(msgspec.Struct):
    """The whole job. Times in seconds since its submission; `submitted_wall_s` since 1970."""

    job: str = ""
    script: str = ""
    submitted_wall_s: float = 0.0
    wall_s: float = 0.0  # up to the end, or the newest entry
    stage: str = ""
    exit_code: int | None = None  # None while it runs
    why: str = ""
    epochs: list[EpochSummary] = []
    incidents: list[IncidentSummary] = []
    alerts: list[e.Alert] = []
    nodes: dict[str, str] = {}  # every node that ever joined -> "" or how it was lost last
    num_incidents: int = 0
    downtime_s: float = 0.0  # of all incidents
    restarts: int = 0  # epochs beyond the first
    controller_lives: int = 0
    steps: int = 0  # made by all epochs together, redone ones included
    redone_steps: int = 0
    total_step: int = -1  # highest step of the job, by the optimizer's count, or as far as steps add up
    last_save_step: int = -1  # newest finished save, same count
    step_s: float = 0.0  # median over the record's intervals, weighted by steps, or if `recent`, of the newest ones
    recent: bool = False
    effective_s: float = 0.0
    unsaved: str = ""  # the job ended, and nothing of it is on disk: why

    @property
    def ettr(self) -> float:
        return self.effective_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def ended(self) -> bool:
        return self.exit_code is not None


def summarize(entries: Iterable[e.Entry]) -> Summary:
    """Fold a journal, whole or partial. An empty one gives an empty summary."""
    fold = _Fold()
    for entry in entries:
        fold.add(entry)
    return fold.finish()


def brief(view: View) -> Summary:
    """Of a job whose journal is long: the newest incidents and alerts only, and no epoch but the last."""
    wall_s = view.ended_s if view.ended else view.now_s
    nodes = tuple(node.name for node in view.nodes if node.first_rank >= 0)
    members = next((epoch.members for epoch in reversed(view.epochs) if not epoch.formation), len(view.workers.nodes))
    return Summary(
        view.job, view.script, view.submitted_wall_s, wall_s, view.stage, view.exit_code, view.why,
        epochs=[EpochSummary(view.epoch, members, nodes, view.now_s)] if view.epoch else [],
        incidents=[_outline(incident) for incident in view.incidents],
        alerts=[e.Alert(alert.kind, alert.text) for alert in view.alerts],
        num_incidents=view.num_incidents, downtime_s=view.downtime_s, restarts=view.restarts,
        controller_lives=view.term, steps=view.steps, redone_steps=view.redone_steps, total_step=view.step,
        last_save_step=view.saved_step, step_s=view.step_s, recent=True, effective_s=view.ettr * wall_s,
        unsaved=unsaved(view),
    )  # fmt: skip


def _outline(view: IncidentView) -> IncidentSummary:
    answer = f"{view.answer}, {view.answer_why}" if view.answer else ""
    return IncidentSummary(
        view.id, view.kind, view.epoch, view.opened_s, view.culprits, view.why, view.collateral, view.files,
        view.outcome, view.downtime_s, view.phases, view.redone_steps, view.told_s, view.cause, answer, view.step,
        view.first_sign_s,
    )  # fmt: skip


class _Fold:
    def __init__(self) -> None:
        self.summary = Summary(epochs=[], incidents=[], alerts=[], nodes={})
        self.incidents: dict[str, IncidentSummary] = {}
        self.epochs: dict[int, EpochSummary] = {}
        self.intervals: list[tuple[float, int]] = []  # seconds a step, steps
        self.began_s: float | None = None
        self.offset_s = 0.0  # added to the controller's clock to keep one time line over its lives
        self.last: e.Entry | None = None
        self.viewer = Viewer()

    def at(self, t_s: float) -> float:
        """Controller's clock to seconds since submission."""
        return t_s + self.offset_s - (self.began_s or 0.0)

    def add(self, entry: e.Entry) -> None:
        summary = self.summary
        self.viewer.add(entry)
        if self.began_s is None:
            self.began_s = entry.t_s
            summary.job, summary.submitted_wall_s = entry.job, entry.wall_s
        if isinstance(entry.event, e.ControllerStarted) and self.last is not None:
            self._align(entry, self.last)
        self.last = entry
        summary.wall_s = max(summary.wall_s, self.at(entry.t_s))
        match entry.event:
            case e.JobSubmitted(spec):
                summary.script = spec.script
            case e.ControllerStarted(term):
                summary.controller_lives = term
            case e.StageChanged(_, new):
                summary.stage = new
            case e.NodeJoined(node):
                summary.nodes[node] = ""
            case e.NodeLost(node, _, how):
                summary.nodes[node] = how.value
            case e.EpochFormed(plan):
                nodes = tuple(m.node for m in plan.members)
                epoch = EpochSummary(plan.epoch, plan.world_size, nodes, self.at(entry.t_s))
                self.epochs[plan.epoch] = epoch
                summary.epochs.append(epoch)
            case e.StepsSeen():
                self._steps(entry.event)
            case e.StateRestored(_, step, _, lost):
                self._restored(step, lost)
            case e.SaveDurable(step):
                summary.last_save_step = max(summary.last_save_step, step)
            case e.Alert():
                self._alert(entry.event, entry.epoch)
            case e.JobEnded(code, why):
                summary.exit_code, summary.why = code, why
            case _:
                self._incident(entry)

    def _align(self, entry: e.Entry, last: e.Entry) -> None:
        """A new controller may run on another machine: its monotonic clock then means something else."""
        apart = entry.t_s + self.offset_s - (last.t_s + self.offset_s)
        wall = entry.wall_s - last.wall_s
        if apart < 0 or (wall >= 0 and abs(apart - wall) > CLOCK_JUMP_S):
            self.offset_s += last.t_s + max(0.0, wall) - entry.t_s

    # Steps ----------------------------------------------------------------------------------------------

    def _steps(self, seen: e.StepsSeen) -> None:
        epoch = self.epochs.get(seen.epoch)
        if epoch is None or seen.step < 1:
            return
        seen = msgspec.structs.replace(seen, step=seen.step - epoch.began)
        if seen.step < 1:
            return
        now = self.at(seen.step_at_s)
        if epoch.steps == 0:
            epoch.first_step_s = self.at(seen.first_step_at_s) if seen.first_step_at_s >= 0 else now
            self._first_steps(epoch, seen)
        elif seen.step > epoch.steps:
            made = seen.step - epoch.steps
            self.intervals.append(((now - epoch.last_step_s) / made, made))
        self.summary.steps += max(0, seen.step - epoch.steps)
        epoch.steps, epoch.last_step_s = max(epoch.steps, seen.step), now
        epoch.last_total = epoch.first_total + epoch.steps - 1
        epoch.saves, epoch.rss_bytes = max(epoch.saves, seen.saves), max(epoch.rss_bytes, seen.rss_bytes)
        self.summary.total_step = max(self.summary.total_step, epoch.last_total)
        if seen.saved_step >= 0:
            saved = epoch.first_total - 1 + seen.saved_step
            self.summary.last_save_step = max(self.summary.last_save_step, saved)

    def _first_steps(self, epoch: EpochSummary, seen: e.StepsSeen) -> None:
        """Where the epoch took up the job: by the optimizer's count, else right after what was done before."""
        best = max(0, self.summary.total_step)
        if seen.total_step >= 0:
            epoch.first_total = seen.total_step - seen.step + 1
        else:
            epoch.first_total = best + 1
        epoch.redone_steps = max(0, best - epoch.first_total + 1)

    def _restored(self, step: int, lost: int) -> None:
        """At its begin an epoch takes up the job at that step; later on, what it made since is made again."""
        epoch = self.summary.epochs[-1] if self.summary.epochs else None
        if epoch is not None and epoch.steps:
            epoch.redone_steps += lost
        elif epoch is not None:
            epoch.began = step

    def _alert(self, alert: e.Alert, epoch_number: int) -> None:
        self.summary.alerts.append(alert)
        epoch = self.epochs.get(epoch_number)
        if alert.kind == "step-fell-back" and epoch is not None:
            self._from_scratch(epoch)

    def _from_scratch(self, epoch: EpochSummary) -> None:
        """The epoch began anew. Only needed where the optimizer keeps no count: it was taken to go on."""
        before = max((x.last_total for x in self.summary.epochs if x.epoch < epoch.epoch), default=0)
        if epoch.first_total <= 1:
            return
        epoch.first_total, epoch.redone_steps = 1, max(0, before)
        epoch.last_total = epoch.steps or -1
        self.summary.total_step = max(before, epoch.last_total)

    # Incidents ------------------------------------------------------------------------------------------

    def _incident(self, entry: e.Entry) -> None:
        event = entry.event
        if isinstance(event, e.IncidentOpened):
            item = IncidentSummary(
                event.incident, event.kind, entry.epoch, self.at(entry.t_s), event.culprits, event.why
            )
            self.incidents[event.incident] = item
            self.summary.incidents.append(item)
            return
        known = self.incidents.get(getattr(event, "incident", ""))
        if known is None:
            return
        match event:
            case e.IncidentUpdated(_, culprits, collateral, why):
                known.culprits = culprits or known.culprits
                known.collateral = collateral or known.collateral
                known.why = why or known.why
            case e.EvidenceSaved(_, files):
                known.files = (*known.files, *(f for f in files if f not in known.files))
            case e.CauseFound(_, verdict):
                known.cause = verdict
            case e.Decided(_, decision):
                known.answer = f"{decision.action.value}, {decision.why}"
            case e.SurvivorsTold(_, after_s):
                known.told_s = after_s
            case e.IncidentClosed(_, outcome, downtime_s, phases, redone):
                known.outcome, known.downtime_s, known.phases = outcome, downtime_s, phases
                known.redone_steps = redone

    def _last_step(self, incident: IncidentSummary) -> None:
        """The epoch's last progress is written down after the incident that ended it."""
        epoch = self.epochs.get(incident.epoch)
        if epoch is not None and epoch.steps:
            incident.last_step_s, incident.step = epoch.last_step_s, epoch.last_total

    # The end --------------------------------------------------------------------------------------------

    def finish(self) -> Summary:
        summary = self.summary
        for epoch in summary.epochs:
            epoch.redone_steps = min(epoch.redone_steps, epoch.steps)
        for incident in summary.incidents:
            self._last_step(incident)
        summary.num_incidents = len(summary.incidents)
        summary.downtime_s = sum(max(0.0, incident.downtime_s) for incident in summary.incidents)
        summary.restarts = max(0, len(summary.epochs) - 1)
        summary.redone_steps = sum(x.redone_steps for x in summary.epochs)
        summary.effective_s = self.viewer.effective_s
        summary.unsaved = unsaved(self.viewer.view)
        summary.step_s = _weighted_median(self.intervals)
        return summary


def _weighted_median(values: list[tuple[float, int]]) -> float:
    """The value that half of the weight does not exceed; 0 without values."""
    half = sum(weight for _, weight in values) / 2
    passed = 0
    for value, weight in sorted(values):
        passed += weight
        if passed >= half:
            return value
    return 0.0

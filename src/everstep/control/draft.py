"""One step of the job's machine under construction: the new state so far, and the commands.

Everything that changes the state in more than one place of the life cycle is here, so that each change is
written once: directives, joins and losses, incidents, the stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from everstep.control import membership
from everstep.control.job import Command, Direct, Incident, Job, NodeState, Note, Outcome, Stage
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.types import Action, Blame, Directive, NodeLoss, NodeReport

BLAMELESS = (NodeLoss.LEFT, NodeLoss.REPLACED)  # losses that say nothing of the hardware
ORPHANS_S = 2.0  # the workers of a dead agent are gone by then


class Draft:
    """Mutable view of a job during one event."""

    def __init__(self, job: Job, now: float) -> None:
        self.job = job
        self.now = now
        self.commands: list[Command] = []

    def set(self, **changes: object) -> None:
        self.job = msgspec.structs.replace(self.job, **changes)

    def note(self, record: e.Record) -> None:
        self.commands.append(Note(record))

    def enter(self, stage: Stage, why: str = "") -> None:
        if stage is not self.job.stage:
            self.note(e.StageChanged(self.job.stage.value, stage.value, why))
            self.set(stage=stage, stage_since_s=self.now)

    def direct(self, node: str, action: Action, **fields: object) -> None:
        """A new desired state for the node, unless it has that already."""
        self._order(node, Directive(term=0, seq=0, action=action, **fields))  # type: ignore[arg-type]

    def remind(self, node: str) -> None:
        """What the node is to do, with what a person wants of it since."""
        known = self.job.directives.get(node)
        if known is not None:
            self._order(node, known)

    def _order(self, node: str, wanted: Directive) -> None:
        leave, vacant = self._drained(node)
        term, seq = self.job.term, self.job.seq + 1
        asked = self.job.save_asked
        exam = self.job.exams.get(node, 0)
        wanted = msgspec.structs.replace(
            wanted, term=term, seq=seq, leave=leave, vacant=vacant, save_asked=asked, exam=exam
        )
        known = self.job.directives.get(node)
        if known is not None and msgspec.structs.replace(known, term=wanted.term, seq=wanted.seq) == wanted:
            return
        self.set(seq=wanted.seq, directives={**self.job.directives, node: wanted})
        self.commands.append(Direct(node, wanted))

    def _drained(self, node: str) -> tuple[bool, tuple[int, ...]]:
        """Whether the node is to leave, and which of its places are to stay empty."""
        drains, known = self.job.drains, self.job.nodes.get(node)
        if not drains or known is None:
            return False, ()
        return node in drains, tuple(k for k in range(known.report.slots) if f"{node}/{k}" in drains)

    # Nodes ----------------------------------------------------------------------------------------------

    def put(self, node: NodeState) -> None:
        self.set(nodes={**self.job.nodes, node.report.node: node})

    def join(self, report: NodeReport) -> None:
        """Known from now on, and parked. One that was lost and is back has to stop what it runs, or may yet start."""
        job, spec = self.job, self.job.spec
        exams = {name: number for name, number in job.exams.items() if name != report.node}
        if job.latest.get(report.node) == report.incarnation:  # lost, and back: a new agent examines itself unasked
            exams[report.node] = job.exams.get(report.node, 0) + 1
        self.set(
            exams=exams,
            arrivals=job.arrivals + 1,
            last_join_s=self.now,
            latest={**job.latest, report.node: report.incarnation},
            gone_by={i: at for i, at in job.gone_by.items() if i != report.incarnation},
        )
        node = NodeState(report, order=job.arrivals, since_s=self.now, exam=exams.get(report.node, 0))
        back = job.plan is not None and membership.seated(job.plan, report) and not node.stopped(job.plan.epoch)
        due = self.now + spec.grace_s + spec.stop_margin_s if back or not node.at_rest else 0.0
        self.put(msgspec.structs.replace(node, stop_by_s=due))
        self.note(e.NodeJoined(report.node, report.incarnation, report.address, report.slots))
        self.set(directives={n: d for n, d in self.job.directives.items() if n != report.node})
        if back:
            self.direct(report.node, Action.STOP, epoch=job.epoch, reason="was lost", grace_s=spec.grace_s, cut=True)
        else:
            self.direct(report.node, Action.PARK, reason="waiting for a place", grace_s=spec.grace_s)

    def drop(self, name: str, how: NodeLoss) -> None:
        """The node is not here any more. What that means for the epoch is `lost_members`' business."""
        node = self.job.nodes[name]
        record = e.NodeLost(name, node.report.incarnation, how)
        self.set(nodes={n: s for n, s in self.job.nodes.items() if n != name})
        if how is NodeLoss.LEFT and name in self.job.drains:
            self.set(drains=self.job.drains - {name})
        self.note(record)
        if how not in BLAMELESS:
            self.blame([name])
        plan = self.job.plan
        member = plan.member(name) if plan else None
        if plan is None or member is None or member.incarnation != node.report.incarnation:
            if plan is not None and not node.at_rest:  # its place was given away, and it may not have heard of it
                self.gone(record.incarnation, self.now + self.longest_s())
            return
        if node.stopped(plan.epoch):
            return
        if all(r.incarnation != record.incarnation for r in self.job.lost):
            self.set(lost=(*self.job.lost, record))
        if how is NodeLoss.REPLACED:
            self.gone(record.incarnation, 0.0)
        else:
            self.gone(record.incarnation, self.now + (ORPHANS_S if how is NodeLoss.DIED else self.longest_s()))

    def blame(self, nodes: Iterable[str]) -> None:
        """These failed, or what ran on them hung or was ended from outside. Too often: seated last, for a while."""
        for node in dict.fromkeys(nodes):
            memory = self.job.memory.failed(node, self.now)
            self.set(memory=memory)
            if memory.excluded(node, self.now) and node not in self.job.excluded:
                self.set(excluded=self.job.excluded | {node})
                minutes = (memory.nodes[node].out_until_s - self.now) / 60
                text = f"{node} failed too often: for {minutes:.0f} min it is seated only if no other node is there"
                self.note(e.Alert("node-excluded", text))

    def readmit(self) -> None:
        """Nodes whose time out is over have the same rights as all others."""
        excluded = self.job.excluded
        back = sorted(node for node in excluded if not self.job.memory.excluded(node, self.now))
        if back:
            self.set(excluded=excluded.difference(back))
            for node in back:
                self.note(e.Alert("node-admitted", f"{node} is seated like every other node again"))

    def gone(self, incarnation: str, at_s: float) -> None:
        self.set(gone_by={**self.job.gone_by, incarnation: at_s})

    def longest_s(self) -> float:
        """A node out of sight may run its part of the epoch for this long: it notices, then it fences itself."""
        spec, plan = self.job.spec, self.job.plan
        fence_s = membership.fence_after_s(spec.fence_s, len(plan.members) if plan else 1)
        return spec.lease_s + fence_s + spec.stop_margin_s

    # The epoch ------------------------------------------------------------------------------------------

    def order_stop(self, reason: str, grace_s: float, **fields: object) -> None:
        """Tell every member that is here to stop its part of the epoch."""
        plan = self.job.plan
        assert plan is not None
        for member in plan.members:
            node = self.job.nodes.get(member.node)
            if node is None or node.report.incarnation != member.incarnation:
                continue
            due = self.now + grace_s + self.job.spec.stop_margin_s
            due = min(due, node.stop_by_s or due)  # repeating an order gives nobody more time
            self.put(msgspec.structs.replace(node, stop_by_s=due))
            self.direct(member.node, Action.STOP, epoch=plan.epoch, reason=reason, grace_s=grace_s, **fields)

    def settled(self) -> bool:
        """The epoch can make no step any more, and no member that is here runs a process of it.

        A step takes all workers, so one that is surely gone is enough for the members out of sight.
        """
        job, plan = self.job, self.job.plan
        assert plan is not None
        sure = bool(job.ended)
        for member in plan.members:
            node = job.nodes.get(member.node)
            if node is not None and node.report.incarnation == member.incarnation:
                if not node.stopped(plan.epoch):
                    return False
                sure = True
            else:
                sure = sure or self.now >= job.gone_by.get(member.incarnation, 0.0)
        return sure

    # Incidents and the end ------------------------------------------------------------------------------

    def open_incident(self, kind: str, culprits: Sequence[Blame], why: str, counts: bool) -> None:
        number = self.job.incidents + 1
        incident = Incident(f"I{number:03d}", kind, tuple(culprits), why, self.now, counts)
        self.set(incident=incident, incidents=number)
        self.note(e.IncidentOpened(incident.id, kind, incident.culprits, why))

    def tell(self, kind: str, why: str, redone: int = 0) -> None:
        """An incident which is over as it is told, beside the one that is open."""
        number = self.job.incidents + 1
        self.set(incidents=number)
        self.note(e.IncidentOpened(f"I{number:03d}", kind, (), why))
        self.note(e.IncidentClosed(f"I{number:03d}", "recovered" if redone else "told", redone_steps=redone))

    def complete(self, why: str) -> None:
        """The work is done; but not well if its last save failed."""
        saves = self.job.saves
        if saves.failed_step > saves.durable:
            what = f"the save of step {saves.failed_step} failed: {saves.failed}"
            self.tell("save-failed", what)
            self.end(ExitCode.SAVE_FAILED, f"{why}, but {what}")
        else:
            self.end(ExitCode.OK, why)

    def end(self, code: int, why: str) -> None:
        self.enter(Stage.FINISHED if code == ExitCode.OK else Stage.FAILED, why)
        self.set(outcome=Outcome(int(code), why))
        self.note(e.JobEnded(int(code), why))
        for name in self.job.nodes:
            self.direct(name, Action.LEAVE, reason=why, grace_s=self.job.spec.grace_s, exit_code=int(code))

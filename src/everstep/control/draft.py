"""One step of the job's machine under construction: the new state so far, and the commands.

Everything that changes the state in more than one place of the life cycle is here, so that each change is
written once: directives, joins and losses, incidents, the stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everstep.control.job import Command, Direct, Incident, Job, NodeState, Note, Outcome, Stage
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.types import Action, Blame, Directive, NodeLoss, NodeReport


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
        wanted = Directive(term=self.job.term, seq=self.job.seq + 1, action=action, **fields)  # type: ignore[arg-type]
        known = self.job.directives.get(node)
        if known is not None and msgspec.structs.replace(known, term=wanted.term, seq=wanted.seq) == wanted:
            return
        self.set(seq=wanted.seq, directives={**self.job.directives, node: wanted})
        self.commands.append(Direct(node, wanted))

    # Nodes ----------------------------------------------------------------------------------------------

    def put(self, node: NodeState) -> None:
        self.set(nodes={**self.job.nodes, node.report.node: node})

    def join(self, report: NodeReport) -> None:
        job = self.job
        self.set(arrivals=job.arrivals + 1, last_join_s=self.now)
        self.put(NodeState(report, order=job.arrivals, since_s=self.now))
        self.note(e.NodeJoined(report.node, report.incarnation, report.address, report.slots))
        self.set(directives={n: d for n, d in self.job.directives.items() if n != report.node})
        self.direct(report.node, Action.PARK, reason="waiting for a place")

    def drop(self, name: str, how: NodeLoss) -> None:
        """The node is not here any more. What that means for the epoch is `lost_members`' business."""
        node = self.job.nodes[name]
        record = e.NodeLost(name, node.report.incarnation, how)
        self.set(nodes={n: s for n, s in self.job.nodes.items() if n != name})
        self.note(record)
        plan = self.job.plan
        member = plan.member(name) if plan else None
        if plan is None or member is None or member.incarnation != node.report.incarnation:
            return
        if node.stopped(plan.epoch):
            return
        self.set(lost=(*self.job.lost, record))
        if how in (NodeLoss.SILENT, NodeLoss.STUCK) and len(plan.members) == 1:
            self.set(hold_until_s=self.now + self.job.spec.fence_s)

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
            self.put(msgspec.structs.replace(node, stop_by_s=due))
            self.direct(member.node, Action.STOP, epoch=plan.epoch, reason=reason, grace_s=grace_s, **fields)

    def settled(self) -> bool:
        """No process of the epoch can be running: each member confirmed it or was lost, and no hold is left."""
        job = self.job
        assert job.plan is not None
        lost = {record.incarnation for record in job.lost}
        for member in job.plan.members:
            node = job.nodes.get(member.node)
            here = node is not None and node.report.incarnation == member.incarnation
            if here and node is not None and node.stopped(job.plan.epoch):
                continue
            if member.incarnation not in lost and here:
                return False
            if self.now < job.hold_until_s and member.incarnation in lost:
                return False
        return True

    # Incidents and the end ------------------------------------------------------------------------------

    def open_incident(self, kind: str, culprits: Sequence[Blame], why: str, counts: bool) -> None:
        number = self.job.incidents + 1
        incident = Incident(f"I{number:03d}", kind, tuple(culprits), why, self.now, counts)
        self.set(incident=incident, incidents=number)
        self.note(e.IncidentOpened(incident.id, kind, incident.culprits, why))

    def end(self, code: int, why: str) -> None:
        self.enter(Stage.FINISHED if code == ExitCode.OK else Stage.FAILED, why)
        self.set(outcome=Outcome(int(code), why))
        self.note(e.JobEnded(int(code), why))
        for name in self.job.nodes:
            self.direct(name, Action.LEAVE, reason=why, grace_s=self.job.spec.grace_s)

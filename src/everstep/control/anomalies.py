"""Anomalies of metrics in the controller's hands: what the session of the first role tells becomes incidents.

An incident of kind "anomaly" is open from the step at which a metric left its usual range until it is back; one that
is more than chance is an alert besides, for a person. Nothing is done to the job. The journal has all that is needed
to go on after a controller was replaced.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.control.job import Job
from everstep.core import events as e
from everstep.core.anomaly import Anomaly
from everstep.core.types import Blame, NodeReport, Verdict

KIND = "anomaly"


class AnomalyWatch:
    """Feed it the reports of nodes, once the machine has seen them."""

    def __init__(self) -> None:
        self._epoch = 0
        self._leader = ""
        self._open: dict[int, tuple[str, Anomaly]] = {}  # of the leader: number -> incident, what was told last
        self._newest: dict[str, int] = {}  # by worker of this epoch: numbers up to here were told
        self._incidents = 0

    def adopt(self, entries: Iterable[e.Entry], job: Job) -> list[e.Record]:
        """An earlier controller's journal."""
        for entry in entries:
            match entry.event:
                case e.AnomalyJudged(incident, _, worker, anomaly):
                    self._follow(entry.epoch, worker)
                    self._incidents = max(self._incidents, int(incident[1:]))
                    self._note(incident, anomaly)
                case e.IncidentClosed(incident):
                    self._open = {n: known for n, known in self._open.items() if known[0] != incident}
        return [] if job.epoch == self._epoch else self.end("the job began anew")

    def saw(self, report: NodeReport, job: Job) -> list[e.Record]:
        """Whoever has the first role tells of metrics; what another one told of, nobody will say the end of."""
        if report.epoch != job.epoch:
            return []
        leader = job.formation.seats[0].worker if job.formation is not None else ""
        records: list[e.Record] = []
        if (job.epoch, leader) != (self._epoch, self._leader):
            records += self.end("another member tells of metrics from here on")
            self._follow(job.epoch, leader)
        for worker in report.workers:
            if worker.session is not None and worker.session.worker == leader:
                for anomaly in worker.session.anomalies:
                    records += self._told(anomaly)
        return records

    def end(self, why: str = "out of line to the end of the job") -> list[e.Record]:
        """Close what is open."""
        closed, self._open = self._open, {}
        return [e.IncidentClosed(incident, why) for incident, _ in closed.values()]

    def _follow(self, epoch: int, leader: str) -> None:
        if epoch != self._epoch:  # workers' names come again
            self._newest.clear()
        self._epoch, self._leader = epoch, leader

    def _note(self, incident: str, anomaly: Anomaly) -> None:
        self._open[anomaly.number] = incident, anomaly
        self._newest[self._leader] = max(self._newest.get(self._leader, 0), anomaly.number)

    def _told(self, now: Anomaly) -> list[e.Record]:
        known = self._open.get(now.number)
        if known is None and now.number <= self._newest.get(self._leader, 0):
            return []
        if known is None:
            self._incidents += 1
        incident, before = known or (f"A{self._incidents:03d}", None)
        records: list[e.Record] = []
        if before is None or before.cause != now.cause:
            self._note(incident, now)
            records.append(e.AnomalyJudged(incident, _verdict(now), self._leader, now))
            change = e.IncidentOpened(incident, KIND, (), now.why)
            records.append(change if before is None else e.IncidentUpdated(incident, (), why=now.why))
            if now.lasting:
                records.append(e.Alert(KIND, f"{now.metric}: {now.cause} (incident {incident}): a person should look"))
        if now.over:
            del self._open[now.number]
            records.append(e.IncidentClosed(incident, _outcome(now)))
        return records


def _verdict(anomaly: Anomaly) -> Verdict:
    """Nobody is named: metrics are the whole job's."""
    return Verdict(KIND, (Blame(-1, "", anomaly.cause, anomaly.why),), anomaly.why, anomaly.confidence)


def _outcome(anomaly: Anomaly) -> str:
    if anomaly.cause == "shift":
        return f"{anomaly.metric} stays where it is: taken for its usual level from step {anomaly.over} on"
    return f"{anomaly.metric} is as usual again at step {anomaly.over}"

"""What several detectors found about one incident, as one verdict: what, who, how sure, why.

A fold over the journal's records. Log causes come from `control.causes`; slow workers, replicas that differ, metrics
out of line and nodes that fail their examination are remembered for a while. When an incident is over, those of its
time and its nodes are fused with it (`detect.fuse`). What is found later (a log, an examination) may better it.

A metric names nobody. So it is joined only with what can bend a metric, or ends a job while the metric is out of line:
a worker that was slow in the same minute did not make the loss jump.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from everstep.control.causes import KEPT, Causes
from everstep.core import events as e
from everstep.core.types import Blame, StacksTaken, Verdict

WINDOW_S = 600.0  # what was over so long before an incident has nothing to do with it
REMEMBERED = 64
CONFIDENCE = {"hang": 0.9, "corrupt": 0.98, "corrupt?": 0.5}  # of what is told without one
BENT_BY = ("corrupt", "check")  # what makes a metric leave its range
NAMES_NODES = ("slow", "hang", "corrupt")


class Found(msgspec.Struct):
    """What one detector says, and from when to when it was so."""

    verdict: Verdict
    from_s: float
    to_s: float = math.inf


class Case(msgspec.Struct):
    """One incident."""

    kind: str
    culprits: tuple[Blame, ...]
    why: str
    opened_s: float
    closed_s: float = math.inf
    log: Verdict | None = None
    told: Verdict | None = None


class Findings:
    """Feed it every record, and every answer with evidence; it returns what is to be recorded."""

    def __init__(self) -> None:
        self._causes = Causes()
        self._found: dict[str, Found] = {}  # by incident, or by node for examinations
        self._cases: dict[str, Case] = {}

    def saw(self, record: e.Record, now: float) -> list[e.CauseFound]:
        logs = self._causes.saw(record)
        match record:
            case e.SlowJudged(incident, verdict) | e.AnomalyJudged(incident, verdict):
                self._remember(incident, verdict, now)
            case e.IncidentOpened(incident, kind, culprits, why):
                self._cases[incident] = Case(kind, culprits, why, now)
                for old in list(self._cases)[:-KEPT]:
                    del self._cases[old]
                self._as_told(incident, now)
            case e.IncidentUpdated(incident, culprits, _, why) if incident in self._cases:
                case = self._cases[incident]
                case.culprits, case.why = culprits or case.culprits, why or case.why
                self._as_told(incident, now)
            case e.Alert("check-failed", text, node) if node:
                blame = Blame(-1, node, "check-failed", text)
                self._remember(node, Verdict("check", (blame,), text, 1.0), now)
                return [each for name in list(self._cases) for each in self._judge(name, [])]
            case e.IncidentClosed(incident):
                if incident in self._found:
                    self._found[incident].to_s = now
                if incident in self._cases:
                    self._cases[incident].closed_s = now
                    return self._judge(incident, logs)
        return logs

    def read(self, taken: StacksTaken) -> list[e.CauseFound]:
        """Last log lines of workers, and what their kernel said."""
        logs = self._causes.read(taken)
        return self._judge(taken.incident, logs) if logs and taken.incident in self._cases else logs

    def _remember(self, key: str, verdict: Verdict, now: float) -> None:
        if key in self._found and verdict.kind != "check":
            self._found[key].verdict = verdict
            return
        self._found[key] = Found(verdict, now)
        for old in list(self._found)[:-REMEMBERED]:
            del self._found[old]

    def _as_told(self, incident: str, now: float) -> None:
        """Hangs and replicas that differ are told as incidents only."""
        case = self._cases[incident]
        if case.kind in ("hang", "corrupt"):
            cause = case.culprits[0].cause if case.culprits else case.kind
            sure = CONFIDENCE.get(cause, CONFIDENCE[case.kind])
            self._remember(incident, Verdict(case.kind, case.culprits, case.why, sure), now)

    def _judge(self, incident: str, logs: list[e.CauseFound]) -> list[e.CauseFound]:
        """The fused verdict; with one part there is nothing to fuse, and what logs say stands alone."""
        case = self._cases[incident]
        case.log = logs[-1].verdict if logs else case.log
        parts = self._parts(incident, case)
        if math.isinf(case.closed_s) or len(parts) < 2:
            return logs
        from everstep.detect.fuse import Part, fuse  # with the table of signatures: see control.causes

        fused = fuse([Part(found.verdict, found.from_s) for found in parts])
        assert fused is not None
        if case.told is not None and _alike(fused.verdict, case.told):
            return []
        case.told = fused.verdict
        return [e.CauseFound(incident, fused.verdict, tuple((x.role, x.part.verdict) for x in fused.evidence))]

    def _parts(self, incident: str, case: Case) -> Sequence[Found]:
        own = self._found.get(incident)
        nodes = {blame.node for blame in case.culprits if blame.node}
        others = [found for key, found in self._found.items() if key != incident and _joins(found, case, nodes)]
        log = [Found(case.log, case.opened_s)] if case.log is not None else []
        return [*([own] if own is not None else []), *log, *others]


def _alike(one: Verdict, other: Verdict) -> bool:
    """But for the words, in which times may stand."""
    return (one.kind, one.culprits, one.confidence) == (other.kind, other.culprits, other.confidence)


def _joins(found: Found, case: Case, nodes: set[str]) -> bool:
    """Whether it is about this incident: at its time, and at its place where both have one."""
    kind = found.verdict.kind
    checked = kind == "check"
    if found.to_s < case.opened_s - WINDOW_S or found.from_s > case.closed_s + (WINDOW_S if checked else 0):
        return False
    if checked and found.from_s < case.opened_s:
        return False  # of what was before it, and it was used again since
    if kind == "anomaly":
        return case.kind == "corrupt" or (case.kind not in (*e.WATCHED, "hang") and found.to_s >= case.opened_s)
    if case.kind == "anomaly":
        return kind in BENT_BY
    places = {blame.node for blame in found.verdict.culprits if blame.node}
    return bool(places & nodes) if nodes else kind in NAMES_NODES and case.kind == "hang"

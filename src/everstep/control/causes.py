"""What the culprits of an incident wrote, classified: "disk-space", "device-memory", ... beside who and how.

A fold over the journal's records and the evidence that arrives; the verdict is given when the incident is over, since
the first cause is known by then, and nobody waits for it any more. Log lines that come later may still better it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everstep.core import events as e
from everstep.core.types import Blame, StacksTaken, Verdict

KEPT = 8  # incidents whose late evidence still counts
SURE = 0.5  # below this confidence nothing is said


class Case(msgspec.Struct):
    """One incident: whom it blames, and what is known of their last words."""

    kind: str
    culprits: tuple[Blame, ...]
    messages: dict[int, str]  # by rank
    tails: dict[int, str]
    kernels: dict[str, str]  # by node
    closed: bool = False
    told: Verdict | None = None


class Causes:
    """Feed it every record and every answer with evidence; it returns what is to be recorded."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}
        self.ended: dict[int, str] = {}  # failures that belong to no closed incident: rank -> message

    def saw(self, record: e.Record) -> list[e.CauseFound]:
        match record:
            case e.WorkerEnded(rank, _, exit) if exit.failed:
                self.ended[rank] = exit.message
                for case in self.cases.values():
                    if not case.closed and case.kind not in e.WATCHED:
                        case.messages[rank] = exit.message
            case e.IncidentOpened(incident, kind, culprits):
                self.cases[incident] = Case(kind, culprits, {} if kind in e.WATCHED else dict(self.ended), {}, {})
                for old in list(self.cases)[:-KEPT]:
                    del self.cases[old]
            case e.IncidentUpdated(incident, culprits) if culprits and incident in self.cases:
                self.cases[incident].culprits = culprits
            case e.IncidentClosed(incident) if incident in self.cases:
                self.cases[incident].closed = True
                if self.cases[incident].kind not in e.WATCHED:
                    self.ended.clear()
                return self._judge(incident)
        return []

    def read(self, taken: StacksTaken) -> list[e.CauseFound]:
        """Last log lines of workers of a known incident, and of their kernels."""
        case = self.cases.get(taken.incident)
        if case is None:
            return []
        case.tails |= {rank: text for rank, text in taken.log_tails.items() if rank >= 0}
        if -1 in taken.log_tails:
            case.kernels[taken.node] = taken.log_tails[-1]
        return self._judge(taken.incident) if case.closed else []

    def _judge(self, incident: str) -> list[e.CauseFound]:
        case = self.cases[incident]
        verdict = _classified(case)
        if verdict is None or verdict == case.told:
            return []
        case.told = verdict
        return [e.CauseFound(incident, verdict)]


def _classified(case: Case) -> Verdict | None:
    """None where the culprits' words have no known meaning, or say no more than the incident's kind."""
    words = _words(case)
    if not words:
        return None
    # Its table of patterns takes 20 ms to compile: no controller pays for it before something happened.
    from everstep.detect.logs import WorkerLog, classify

    verdict = classify([WorkerLog(rank, node, text) for rank, node, text in words])
    new = bool(verdict.culprits) and verdict.culprits[0].cause != case.kind
    return verdict if new and verdict.confidence >= SURE else None


def _words(case: Case) -> Sequence[tuple[int, str, str]]:
    """Rank, node, and last lines of each culprit, its error message last; rank -1: what its node's kernel said."""
    ranks = {b.rank: b.node for b in case.culprits if b.rank >= 0}
    texts = {rank: f"{case.tails.get(rank, '')}\n{case.messages.get(rank, '')}".strip() for rank in ranks}
    kernels = [(-1, node, text) for node, text in case.kernels.items() if node in {b.node for b in case.culprits}]
    return [*((rank, node, texts[rank]) for rank, node in ranks.items() if texts[rank]), *kernels]

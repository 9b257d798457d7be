"""Which changes of a node's report may wait a moment for others of the same node: what no recovery waits for.

A save is told by each session of a node within milliseconds, and so is each phase of a formation's begin. What all
members have to reach, the controller acts on when the last one has: of a node that is its last one, which is told at
once. All else is told at once as well: ends, stages, failures, rollbacks, what was found corrupt.
"""

from __future__ import annotations

from everstep.core.formation import Formation, SessionReport
from everstep.core.types import NodeReport, WorkerReport

MERGE_S = 0.02  # a report that may wait waits so long at most
OF_NODE = tuple(name for name in NodeReport.__struct_fields__ if name not in ("seq", "sent_s", "workers"))
OF_WORKER = tuple(name for name in WorkerReport.__struct_fields__ if name != "session")
ROUTINE = frozenset({"committed", "saves", "anomalies", "dealt", "gap_s"})
PHASES = frozenset({"prepared", "epoch", "resumed"})  # of a formation's begin, in this order
OF_SESSION = tuple(name for name in SessionReport.__struct_fields__ if name not in ROUTINE | PHASES)


def may_wait(before: NodeReport, now: NodeReport, formation: Formation | None) -> bool:
    """Whether this change of a node's report may be sent with a later one. `formation`: the newest it was told of."""
    if len(before.workers) != len(now.workers) or _differs(before, now, OF_NODE):
        return False
    changed = [pair for pair in zip(before.workers, now.workers, strict=True) if pair[0] != pair[1]]
    return bool(changed) and all(_is_routine(*pair, now, formation) for pair in changed)  # none: it is said again


def _is_routine(was: WorkerReport, now: WorkerReport, report: NodeReport, formation: Formation | None) -> bool:
    said, says = was.session, now.session
    if said is None or says is None or _differs(was, now, OF_WORKER) or _differs(said, says, OF_SESSION):
        return False
    if said.committed < 0 <= says.committed:
        return False  # it holds state now: a formation without it could lose that
    return _phase(said) == _phase(says) or _is_ahead(says, report, formation)


def _is_ahead(session: SessionReport, report: NodeReport, formation: Formation | None) -> bool:
    """Somebody else of this node has a seat and is not as far: the others cannot be done with this phase yet."""
    if formation is None:
        return False
    others = (w.session for w in report.workers if w.session is not None and w.exit is None and not w.gone)
    return any(_phase(o) < _phase(session) and formation.role_of(o.worker) is not None for o in others)


def _phase(session: SessionReport) -> tuple[int, int, bool]:
    return session.prepared, session.epoch, session.resumed


def _differs(before: object, now: object, names: tuple[str, ...]) -> bool:
    return any(getattr(before, name) != getattr(now, name) for name in names)

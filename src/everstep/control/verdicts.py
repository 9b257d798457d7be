"""What an incident leads to once its epoch is settled: first cause, restart budget, crash loop, next stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from everstep.control import deciding
from everstep.control.draft import Draft
from everstep.control.job import Incident, Stage
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.types import ExitCause
from everstep.detect.blame import first_cause
from everstep.detect.repeat import repeats, signature

REMEMBERED = 16  # signatures kept; far more than any crash-loop limit


def conclude(draft: Draft) -> None:
    """Every process of the epoch is gone: name the first cause, then re-form or give up."""
    if charge(draft):
        draft.enter(Stage.REFORMING)


def charge(draft: Draft, raised: Sequence[e.WorkerEnded] = ()) -> bool:
    """Name the first cause of the open incident and count it. False: the job ends, it must not be tried again.

    `raised`: functions that ended by an exception, in processes which live on.
    """
    job = draft.job
    incident = job.incident
    assert incident is not None
    counted = incident.counts
    if incident.kind in ("crash", "node-lost"):
        counted = _name_cause(draft, incident)
    steps = [max(w.exit.total_step, w.exit.step) for w in job.ended.values()]
    draft.set(best_step=max([job.best_step, *steps]))
    draft.blame(_failed_nodes(draft))
    if counted:
        _remember(draft, {**job.ended, **{end.rank: end for end in raised}})
        if _give_up(draft):
            return False
        draft.set(restarts=draft.job.restarts + 1)
    return True


def _failed_nodes(draft: Draft) -> list[str]:
    """Where something hung or was ended from outside: the script's own errors are nobody's hardware."""
    incident = draft.job.incident
    assert incident is not None
    hung = incident.kind == "hang"
    return [c.node for c in incident.culprits if c.rank >= 0 and (hung or c.cause == ExitCause.SIGNAL.value)]


def _name_cause(draft: Draft, incident: Incident) -> bool:
    """Tell culprits from collateral. Returns whether a worker is to blame (a lost node costs no restart)."""
    job = draft.job
    culprits, collateral, why = first_cause(tuple(job.ended.values()), job.lost)
    if not culprits:
        return incident.counts
    draft.note(e.IncidentUpdated(incident.id, culprits, collateral, why))
    draft.set(incident=msgspec.structs.replace(incident, culprits=culprits, why=why))
    return any(c.rank >= 0 for c in culprits)


def _remember(draft: Draft, ended: Mapping[int, e.WorkerEnded]) -> None:
    incident = draft.job.incident
    assert incident is not None
    first = next((ended[c.rank] for c in incident.culprits if c.rank in ended), None)
    kind = "crash" if incident.kind == "exception" else incident.kind  # the same error, whatever it ended
    made = signature(kind, incident.why, first)
    draft.set(signatures=(*draft.job.signatures, made)[-REMEMBERED:])


def _give_up(draft: Draft) -> bool:
    job = draft.job
    incident = job.incident
    assert incident is not None
    looped = repeats(job.signatures, job.spec.crash_loop)
    if looped or job.restarts >= job.spec.max_restarts:
        deciding.give_up(draft)
    if looped:
        step = job.signatures[-1].step
        why = f"the same failure {job.spec.crash_loop} times at step {step}: {incident.why}"
        draft.end(ExitCode.CRASH_LOOP, why)
    elif job.restarts >= job.spec.max_restarts:
        code = ExitCode.HUNG if incident.kind == "hang" else ExitCode.FAILED
        draft.end(code, f"{incident.why}; no restart left of {job.spec.max_restarts}")
    return draft.job.stage is Stage.FAILED

"""Restartable functions that raised: whose fault it is, and who has to get a new process for it.

Such a process lives on and waits for the next formation; what it reports is an incident like the end of a process.
"""

from __future__ import annotations

from everstep.control import seats
from everstep.control.draft import Draft
from everstep.control.job import Job
from everstep.core import events as e
from everstep.core.formation import Formation, SessionReport
from everstep.core.types import Blame, EpochPlan, Exit, ExitCause
from everstep.detect.blame import BROKEN_BY_PEER, LATE_S

CAUSE = "exception"


def as_end(plan: EpochPlan, said: SessionReport, now: float) -> e.WorkerEnded:
    """What the exception would have been as the end of its process."""
    rank = seats.rank_of(plan, said.worker)
    assert rank is not None
    exit = Exit(ExitCause.ERROR, now, message=said.failure, step=max(0, said.committed))
    return e.WorkerEnded(rank, seats.place(said.worker)[0], exit, now)


def may_be_collateral(draft: Draft, failed: list[SessionReport]) -> bool:
    """A peer's death explains it, and word of that may be under way: the death is to be counted, not this."""
    job, formation = draft.job, draft.job.formation
    assert formation is not None
    since_s = job.raised_s or draft.now
    nodes = [job.nodes.get(seat.node) for seat in seats.holders(job, formation)]
    unlinked = any(node is not None and node.lost_at_s for node in nodes)
    broken = all(BROKEN_BY_PEER.search(said.failure) for said in failed)
    if not unlinked and not (broken and draft.now < since_s + LATE_S):
        return False
    draft.set(raised_s=since_s)
    return True


def first_to_blame(failed: list[SessionReport]) -> list[SessionReport]:
    """Those whose failure no peer explains; where there is none, all."""
    own = [said for said in failed if not BROKEN_BY_PEER.search(said.failure)]
    return own or failed


def again(job: Job, formation: Formation, blames: list[Blame]) -> list[int]:
    """Ranks that raised already since the job last went on; nobody has in this formation either."""
    sessions = (seats.sessions_of(job).get(seat.worker) for seat in formation.seats)
    if any(s is not None and s.resumed and s.epoch >= formation.epoch for s in sessions):
        return []
    return [blame.rank for blame in blames if (blame.node, blame.rank) in job.raised]

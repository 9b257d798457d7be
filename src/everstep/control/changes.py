"""Planned changes of a job with a formation: newcomers get places and roles, leavers give theirs up.

One formation at a time, and none while a fault is being dealt with (`control.reform`).
"""

from __future__ import annotations

import msgspec

from everstep.control import refusal, seating, seats
from everstep.control.draft import Draft
from everstep.control.job import NodeState, Stage
from everstep.core import events as e
from everstep.core.formation import Formation
from everstep.core.formation import Stage as SessionStage
from everstep.core.types import Action, EpochPlan, WorkerReport


def make(draft: Draft) -> None:
    """Newcomers and leavers, one change at a time."""
    job, formation, plan = draft.job, draft.job.formation, draft.job.plan
    assert formation is not None and plan is not None
    adopted = seats.adopted(job, formation)
    if adopted:
        draft.set(before=None, superseded=())
    elif job.before is not None and not job.vacant:  # the places of leavers are theirs until the change is through
        return
    _dismiss(draft, formation)
    _vacate(draft, formation)
    _admit(draft, plan)
    job = draft.job
    if not adopted or (job.ended and any(seats.ended_well(job, seat.worker) for seat in formation.seats)):
        return
    if job.stage is Stage.RESEATING:  # the incident ends with a step of this formation, not of the next one
        return
    following = seats.changed(job, formation, job.formed + 1)
    if following is not None:
        seating.issue(draft, following)


def _dismiss(draft: Draft, formation: Formation) -> None:
    """Nodes that leave and hold no role any more: their standbys, which nobody else would end, are stopped."""
    job = draft.job
    if not any(node.report.leaving for node in job.nodes.values()):
        return
    busy = {seat.node for seat in formation.seats if seat.worker not in job.vacant}
    for name, node in job.nodes.items():
        if node.report.leaving and name not in busy and not node.at_rest:
            due = draft.now + job.spec.grace_s + job.spec.stop_margin_s
            draft.put(msgspec.structs.replace(node, stop_by_s=node.stop_by_s or due))
            if not any(_on_its_way_out(worker) for worker in node.report.workers):
                draft.direct(name, Action.STOP, epoch=job.epoch, reason="it leaves", grace_s=job.spec.grace_s)


def _vacate(draft: Draft, formation: Formation) -> None:
    """Drained places that hold no role: what runs there and waits for one is ended, and nothing follows it."""
    job, plan = draft.job, draft.job.plan
    assert plan is not None
    if not job.drains:
        return
    idle = [
        seats.rank_of(plan, worker)
        for worker, report in seats.present(job).items()
        if seats.drained(job, worker) and formation.role_of(worker) is None
        if not report.gone and not _on_its_way_out(report)
    ]
    if idle:
        seating.next_life(draft, [rank for rank in idle if rank is not None])
        seating.direct_all(draft)


def refill(draft: Draft, place: str) -> None:
    """A place that was drained gets a new process, unless nobody has left it yet."""
    job, plan = draft.job, draft.job.plan
    node, _, local_rank = place.rpartition("/")
    member = plan.member(node) if plan is not None and job.formation is not None else None
    if member is None:
        return
    rank = member.first_rank + int(local_rank)
    worker = seats.present(job).get(seats.name(node, int(local_rank), job.lives.get(rank, 0)))
    if worker is None or worker.gone:
        seating.next_life(draft, [rank])
        seating.direct_all(draft)


def _on_its_way_out(worker: WorkerReport) -> bool:
    """It held a role, and ends by itself."""
    held = worker.session is not None and worker.session.stage in (SessionStage.MEMBER, SessionStage.LEFT)
    return held and not worker.gone and worker.exit is None


def _admit(draft: Draft, plan: EpochPlan) -> None:
    """Nodes without a place in the plan get one: their workers warm up and wait for a role."""
    job = draft.job
    free = [n for n in job.nodes.values() if n.free and _needs_place(plan, n, draft)]
    free = refusal.fit_newcomers(draft, free) if free else []
    if not free:
        return
    here = {m.node for m in plan.members if seating.here(job.nodes.get(m.node), m.incarnation)}
    for node in sorted(free, key=lambda n: n.order):
        report = node.report
        own = plan.member(report.node) is not None
        plan = seats.amend(plan, report.node, report.incarnation, report.address, report.slots, here)
        here.add(report.node)
        ranks = [plan.rank(report.node, local_rank) for local_rank in range(report.slots)]
        seating.next_life(draft, [rank for rank in ranks if rank in draft.job.ended])
        if not own and draft.job.lives:  # a node may have had another place before, which was given away
            unused = max(draft.job.lives.values()) + 1
            draft.set(lives={**draft.job.lives, **dict.fromkeys(ranks, unused)})
        draft.put(msgspec.structs.replace(draft.job.nodes[report.node], stop_by_s=0.0))
    draft.set(plan=plan)
    draft.note(e.PlanAmended(plan))
    seating.direct_all(draft)


def _needs_place(plan: EpochPlan, node: NodeState, draft: Draft) -> bool:
    """Not in the plan; or in it, but stopped, because it had been lost, and not told to run again yet."""
    former = plan.member(node.report.node)
    fits = former is None or former.slots == node.report.slots
    return fits and not seating.told(draft, node.report.node, Action.RUN)

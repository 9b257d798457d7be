"""What follows from a decision about seats: a formation is issued, nodes are told, places get new processes."""

from __future__ import annotations

from everstep.control import seats
from everstep.control.draft import Draft
from everstep.control.job import NodeState, Stage
from everstep.core import events as e
from everstep.core.formation import Formation
from everstep.core.types import Action


def issue(draft: Draft, formation: Formation) -> None:
    job = draft.job
    overtaken = tuple(former for former in (job.before, job.formation) if formation.abort and former is not None)
    superseded = seats.not_left(job, (*job.superseded, *overtaken))
    draft.set(superseded=superseded, before=None if formation.abort else job.formation)
    draft.set(formation=formation, formed=formation.epoch, vacant=frozenset(), raised_s=0.0)
    draft.note(e.FormationMade(formation))
    if formation.abort:
        draft.enter(Stage.RESEATING, f"formation {formation.epoch} of {len(formation.seats)} workers")
    direct_all(draft)


def direct_all(draft: Draft) -> None:
    """Every member's node is told the formation and which lives its places must have."""
    job, plan = draft.job, draft.job.plan
    assert plan is not None
    for member in plan.members:
        node = job.nodes.get(member.node)
        if node is None or node.report.incarnation != member.incarnation or _dismissed(draft, node):
            continue
        if node.stop_by_s and told(draft, member.node, Action.STOP):
            continue  # it was lost and is back: it stops first, then it gets its place again
        lives = tuple(job.lives.get(member.first_rank + k, 0) for k in range(member.slots))
        draft.direct(member.node, Action.RUN, epoch=plan.epoch, plan=plan, formation=draft.job.formation, lives=lives)


def next_life(draft: Draft, ranks: list[int]) -> None:
    """These places get new processes; what is said about the old ones from now on is history."""
    job = draft.job
    lives = {**job.lives, **{rank: job.lives.get(rank, 0) + 1 for rank in ranks}}
    ended = {rank: end for rank, end in job.ended.items() if rank not in ranks}
    departed = {**job.departed, **{rank: job.ended[rank].exit for rank in ranks if rank in job.ended}}
    draft.set(lives=lives, ended=ended, departed=departed, lost=())


def told(draft: Draft, node: str, action: Action) -> bool:
    directive = draft.job.directives.get(node)
    return directive is not None and directive.action is action and directive.epoch == draft.job.epoch


def _dismissed(draft: Draft, node: NodeState | None) -> bool:
    """It leaves, and what it still ran without a role is being stopped."""
    return node is not None and node.report.leaving and told(draft, node.report.node, Action.STOP)


def here(node: NodeState | None, incarnation: str) -> bool:
    return node is not None and node.report.incarnation == incarnation

"""Step-level recovery in the life cycle: survivors keep their processes and go on in a new formation.

Once every worker of a plan has a session that waits ready, the job has a formation, and a fault leads to the next one
instead of an eviction: the dead lose their seats, and their places on the nodes get new processes (the next `life`),
which are seated again when they are ready. Where the number of members may not change (`control.roles`) the survivors
wait for them first. Only when no survivor holds the state, or nobody comes, is the plan evicted as without sessions.
Who is seated is decided by `control.seats`.
"""

from __future__ import annotations

import msgspec

from everstep.control import changes, corrupted, deciding, raised, roles, seating, seats, verdicts
from everstep.control.draft import Draft
from everstep.control.job import ENDED, Job, NodeState, Stage
from everstep.core import events as e
from everstep.core.formation import Formation, Seat
from everstep.core.types import Action, Blame, Exit, ExitCause, NodeReport, Verdict
from everstep.detect.blame import sentence

FINISH_GRACE_S = 5.0  # a standby has nothing to save when the job is done
LEAVE_S = 60.0  # between the first and the last of those who leave the loop together: one of them still evaluates
DONE = "the job is done"
FAULTS = ("crash", "node-lost", "hang", "exception")  # further deaths before the job went on belong to these


def begin(draft: Draft) -> None:
    """The first formation, when every worker waits for it."""
    job = draft.job
    if job.formation is None and job.plan is not None and not job.ended:
        formation = seats.first(job, job.formed + 1)
        if formation is not None:
            draft.set(founders=frozenset(seat.worker for seat in formation.seats))
            seating.issue(draft, formation)
            react(draft)


def over(draft: Draft) -> bool:
    """No formation can commit any more: of each somebody is surely gone.

    That some node of the plan has stopped tells nothing: it may have held no role, while those out of sight have all.
    """
    job = draft.job
    issued = [formation for formation in (job.formation, job.before, *job.superseded) if formation is not None]
    return all(any(_surely_gone(draft, seat) for seat in formation.seats) for formation in issued)


def returned(draft: Draft, report: NodeReport) -> None:
    """A new agent of a member's name came: the lives that the former one was told to run are used up."""
    job, plan = draft.job, draft.job.plan
    member = plan.member(report.node) if plan is not None and job.formation is not None else None
    if plan is None or member is None or member.incarnation == report.incarnation:
        return
    order = job.directives.get(report.node)
    told = order.lives if order is not None and order.action is Action.RUN else ()
    ranks = range(member.first_rank, member.first_rank + member.slots)
    used = [rank for k, rank in enumerate(ranks) if k >= len(told) or told[k] >= job.lives.get(rank, 0)]
    draft.set(lives={**job.lives, **{rank: job.lives.get(rank, 0) + 1 for rank in used}})


def _surely_gone(draft: Draft, seat: Seat) -> bool:
    """Its place may have been given away since; a newer agent of its node has ended it before it reported."""
    job = draft.job
    assert job.plan is not None
    if seats.rank_of(job.plan, seat.worker) in job.ended:
        return True
    node = job.nodes.get(seat.node)
    return node.at_rest if node is not None else draft.now >= job.gone_by.get(job.latest[seat.node], 0.0)


def react(draft: Draft) -> bool:
    """What follows for a job with a formation. False: sessions cannot go on, evict as without them."""
    job, formation = draft.job, draft.job.formation
    assert formation is not None and job.plan is not None
    if job.superseded:
        draft.set(superseded=seats.not_left(job, job.superseded))
        job = draft.job
    if not job.fixed and seats.fixed(job, formation):
        draft.set(fixed=True)
        job = draft.job
    if seats.complete(job, formation) or _finishing(draft):
        _finish(draft)
        return True
    gone = seats.dead(job, formation)
    doubted = corrupted.react(draft)
    if _failures(draft) or job.lost or not job.vacant.issuperset(gone):
        if not _recover(draft):
            return False
    elif not (_go_on(draft) if gone or doubted else _anew(draft)):
        return False
    if draft.job.stage in ENDED:
        return True
    if seats.all_leave(draft.job):
        return False
    if draft.job.stage is Stage.RESEATING:
        _check_resumed(draft)
    if draft.job.stage not in ENDED:
        changes.make(draft)
    return not _overdue(draft)


def why_over(job: Job) -> str:
    """Why `react` told to evict: whoever survives has waited for the others in vain, or holds no state."""
    if job.short_since_s and job.formation is not None and seats.survivors(job, job.formation):
        return f"waited {job.spec.join_timeout_s:.0f} s for {roles.waits_for(job)}"
    if job.formation is not None and seats.living(job, job.formation):
        return "who is left may have missed steps of members that are out of sight"
    return "nobody who holds the state is left"


def hung(draft: Draft, verdict: Verdict) -> bool:
    """Fence who hangs and go on without them. False: it is not known who, or nobody else is left."""
    job, formation = draft.job, draft.job.formation
    ranks = [blame.rank for blame in verdict.culprits if blame.rank >= 0]
    if formation is None or job.plan is None:
        return False
    if job.vacant:  # members wait for those who are to come: only these can hang
        ranks = _not_waiting(job, formation, ranks)
        if not ranks:
            return True
    if not ranks or not seats.survivors(job, formation, without=ranks):
        return False
    draft.open_incident(verdict.kind, verdict.culprits, verdict.why, counts=True)
    verdicts.charge(draft)
    seating.next_life(draft, ranks)
    return _reseat(draft)


def _not_waiting(job: Job, formation: Formation, ranks: list[int]) -> list[int]:
    assert job.plan is not None
    waiting = {seats.rank_of(job.plan, seat.worker) for seat in formation.seats if seats.alive(job, seat.worker)}
    return [rank for rank in ranks or sorted(roles.acting(job)) if rank not in waiting]


def learn(draft: Draft, rank: int, node: str, before: Exit) -> None:
    """More is known about how the former process of a place ended: its status came after its seat was given away."""
    job = draft.job
    if job.departed.get(rank, before) == before:
        return
    draft.set(departed={**job.departed, rank: before})
    draft.note(e.WorkerEnded(rank, node, before, draft.now))
    incident = job.incident
    if incident is not None and any(c.rank == rank for c in incident.culprits) and incident.kind == "crash":
        better = Blame(rank, node, before.cause.value, before.message)
        culprits = tuple(better if c.rank == rank else c for c in incident.culprits)
        why = f"rank {rank} on {node} {sentence(before)}" if len(culprits) == 1 else incident.why
        draft.set(incident=msgspec.structs.replace(incident, culprits=culprits, why=why))
        draft.note(e.IncidentUpdated(incident.id, culprits, why=why))


def _failures(draft: Draft) -> list[e.WorkerEnded]:
    """Ends of processes that are wanted again."""
    job = draft.job
    ends = [end for end in job.ended.values() if end.exit.cause is not ExitCause.OK]
    dismissed = {end.node for end in ends if seating.told(draft, end.node, Action.STOP)}
    return [end for end in ends if end.node not in dismissed or not _leaves(job.nodes.get(end.node))]


def _leaves(node: NodeState | None) -> bool:
    return node is None or node.report.leaving


def _recover(draft: Draft) -> bool:
    """The dead lose their seats and their places get new processes. Who only left, or was through with its script
    before it heard of this formation, is nobody's fault: the others go on without it."""
    job, formation, plan = draft.job, draft.job.formation, draft.job.plan
    assert formation is not None and plan is not None
    if not seats.survivors(job, formation):
        return False
    lost = {record.node for record in job.lost}
    ranks = {m.first_rank + k for m in plan.members if m.node in lost for k in range(m.slots)}
    ends = _failures(draft)
    new = [worker for worker in seats.dead(job, formation) if worker not in job.vacant]
    dead = {seats.rank_of(plan, worker) for worker in new if not seats.parted(job, worker)}
    ranks |= {end.rank for end in ends} | {rank for rank in dead if rank is not None}
    if ranks:
        blames = [Blame(-1, record.node, f"node lost: {record.how.value}") for record in job.lost]
        blames += [Blame(w.rank, w.node, w.exit.cause.value, w.exit.message) for w in ends if w.node not in lost]
        if not _extends(draft, blames):
            failed = any(end.exit.failed and end.exit.cause is not ExitCause.GRACE for end in ends)
            _open(draft, blames, failed)
            if failed:
                verdicts.charge(draft)
        seating.next_life(draft, sorted(ranks))
    return _reseat(draft)


def _open(draft: Draft, blames: list[Blame], failed: bool) -> None:
    if any(blame.rank < 0 for blame in blames):
        why = f"lost {', '.join(blame.node for blame in blames if blame.rank < 0)}"
        draft.open_incident("node-lost", blames, why, counts=False)
    elif failed:
        first = blames[0]
        draft.open_incident("crash", blames, f"rank {first.rank} on {first.node}: {first.detail}", counts=True)
    else:  # no order of ours: their node fenced itself while there was no controller
        draft.open_incident("interrupted", blames, "members were stopped without an order", counts=False)


def _extends(draft: Draft, blames: list[Blame]) -> bool:
    """More deaths before the job went on are one incident: a rack that burns is no crash loop.

    But a place that dies a second time in it is a new fault: otherwise a sample that kills whoever computes it would
    never be counted.
    """
    incident = draft.job.incident
    if incident is None or incident.kind not in FAULTS or draft.job.stage is not Stage.RESEATING:
        return False
    known = {(blame.node, blame.rank) for blame in incident.culprits}
    if any((blame.node, blame.rank) in known for blame in blames):
        return False
    culprits = (*incident.culprits, *blames)
    draft.set(incident=msgspec.structs.replace(incident, culprits=culprits))
    draft.note(e.IncidentUpdated(incident.id, culprits, why=incident.why))
    return True


def _anew(draft: Draft) -> bool:
    """A function raised, and nobody is dead: all act anew, the failed one too, whose process lives.

    One that does so again before anybody went on gets a new process: what is wrong may be in the old one.
    """
    job, formation, plan = draft.job, draft.job.formation, draft.job.plan
    assert formation is not None and plan is not None
    failed = seats.raised(job, formation)
    if not failed and job.raised_s:
        draft.set(raised_s=0.0)
    if not failed or raised.may_be_collateral(draft, failed):
        return True
    ends = [raised.as_end(plan, said, draft.now) for said in raised.first_to_blame(failed)]
    blames = [Blame(end.rank, end.node, raised.CAUSE, end.exit.message) for end in ends]
    again = raised.again(job, formation, blames)
    if not _extends(draft, blames):
        first = ends[0]
        why = f"rank {first.rank} on {first.node} {sentence(first.exit)}"
        draft.open_incident(raised.CAUSE, blames, why, counts=True)
        if not verdicts.charge(draft, ends):
            return True
    draft.set(raised=draft.job.raised | {(blame.node, blame.rank) for blame in blames})
    deciding.raised(draft, formation, again)
    if again:
        seating.next_life(draft, again)
    return _go_on(draft)


def _reseat(draft: Draft) -> bool:
    job, formation = draft.job, draft.job.formation
    assert formation is not None
    if job.stage in ENDED:  # the restart budget is spent
        return True
    if seats.dead(job, formation):
        return _go_on(draft)
    seating.direct_all(draft)
    if job.stage is not Stage.RESEATING:
        _spare_lost(draft, formation)
    return True


def _go_on(draft: Draft) -> bool:
    """Abort the formation for the next one, or wait until there is somebody for each of its roles."""
    job, formation = draft.job, draft.job.formation
    assert formation is not None
    if not seats.survivors(job, formation):
        return False
    if job.fixed and _may_be_all(draft, formation):
        return True
    if job.fixed:
        following = roles.refilled(job, formation, job.formed + 1)
        if following is None:
            _wait(draft, formation)  # first: it may have more of them replaced
        deciding.without_standby(draft, formation)
    else:
        alone = deciding.without_standby(draft, formation)
        following = seats.without_dead(job, formation, job.formed + 1, fill=not alone)
    if following is not None:
        _stop_leavers(draft, following)
        seating.issue(draft, following)
    return True


def _may_be_all(draft: Draft, formation: Formation) -> bool:
    """Nobody died, but some left the loop before its end, a moment ago: the others may be about to, at the same step.

    Where the number of members may change they go on without those who left, or end; here they can only wait.
    """
    job, plan = draft.job, draft.job.plan
    assert plan is not None
    gone = seats.dead(job, formation)
    if not gone or not all(seats.early(job, worker) for worker in gone):
        return False
    ends_s = [job.ended[rank].seen_s for w in gone if (rank := seats.rank_of(plan, w)) is not None]
    return draft.now < max(ends_s) + LEAVE_S


def _wait(draft: Draft, formation: Formation) -> None:
    """Who was through with the script is needed once more: what the dead were in the midst of takes all of them."""
    _replace(draft, [seat.worker for seat in formation.seats if seats.ended_well(draft.job, seat.worker)])
    job = draft.job
    vacant = frozenset(seat.worker for seat in seats.holders(job, formation) if not seats.alive(job, seat.worker))
    if vacant != job.vacant:
        draft.set(vacant=vacant)
        draft.enter(Stage.RESEATING, f"waits for {roles.waits_for(draft.job)}")
    seating.direct_all(draft)


def _stop_leavers(draft: Draft, following: Formation) -> None:
    """Their roles are given to others, in a change which is now withdrawn: nobody waits for them to step aside."""
    job = draft.job
    former = job.before.seats if job.before is not None else ()
    _replace(draft, [s.worker for s in former if following.role_of(s.worker) is None and seats.alive(job, s.worker)])


def _replace(draft: Draft, workers: list[str]) -> None:
    """Their places get new processes, through nobody's fault."""
    assert draft.job.plan is not None
    ranks = (seats.rank_of(draft.job.plan, worker) for worker in workers)
    known = [rank for rank in ranks if rank is not None]
    if known:
        seating.next_life(draft, known)


def _spare_lost(draft: Draft, formation: Formation) -> None:
    """Who died held no role: nobody has to move, and no time is lost."""
    deciding.beside(draft, "it held no role")
    draft.note(e.StepResumed(formation.epoch, draft.job.floor, 0.0))
    draft.set(incident=None)
    draft.enter(Stage.RUNNING)


def _check_resumed(draft: Draft) -> None:
    """Every member committed a step in the new formation: the incident is over."""
    job, formation = draft.job, draft.job.formation
    assert formation is not None
    sessions = seats.sessions_of(job)
    members = [sessions.get(seat.worker) for seat in formation.seats]
    done = seats.finished(job, formation)
    for seat, session in zip(formation.seats, members, strict=True):
        if seat.worker not in done and (session is None or session.epoch < formation.epoch or not session.resumed):
            return
    known = [session for session in members if session is not None]
    gap_s = max((session.gap_s for session in known), default=-1.0)
    committed = max((s.committed for s in known), default=-1)
    _replace_early(draft, committed)
    if draft.job.stage in ENDED:
        return
    corrupted.resumed(draft)
    draft.note(e.StepResumed(formation.epoch, committed, gap_s))
    draft.set(incident=None, raised=frozenset())
    draft.enter(Stage.RUNNING)


def _replace_early(draft: Draft, committed: int) -> None:
    """The others went on to `committed` steps. Whose script had ended before failed, whatever its exit status says.

    Not sooner: when all leave the loop at the same step, that is the end of the job.
    """
    job, plan = draft.job, draft.job.plan
    assert plan is not None
    blames = []
    for worker in seats.left_behind(job, committed):
        node, rank = seats.place(worker)[0], seats.rank_of(plan, worker)
        assert rank is not None
        blames.append(Blame(rank, node, "left-early", f"ended (exit 0) at step {seats.steps_of(job, worker)}"))
    if not blames:
        return
    if job.incident is None:
        why = f"rank {blames[0].rank} on {blames[0].node} {blames[0].detail} while the others went on"
        draft.open_incident("left-early", blames, why, counts=True)
        verdicts.charge(draft)
    if draft.job.stage not in ENDED:
        deciding.beside(draft, "the others went on")
    seating.next_life(draft, [blame.rank for blame in blames])
    if draft.job.stage not in ENDED:
        seating.direct_all(draft)


def _overdue(draft: Draft) -> bool:
    """A role that nobody can take is waited for as long as the job waits for nodes where nothing runs."""
    job, formation = draft.job, draft.job.formation
    assert formation is not None
    since_s = (job.short_since_s or draft.now) if job.fixed and roles.short(job, formation) else 0.0
    if since_s != job.short_since_s:
        draft.set(short_since_s=since_s)
    return since_s > 0.0 and draft.now >= since_s + job.spec.join_timeout_s


def _finishing(draft: Draft) -> bool:
    """Standbys are being stopped; what they still report does not count any more."""
    return any(order.reason == DONE and order.epoch == draft.job.epoch for order in draft.job.directives.values())


def _finish(draft: Draft) -> None:
    """Every member's script ran to its end. Standbys are stopped; then the job is complete."""
    job, plan = draft.job, draft.job.plan
    assert plan is not None
    nodes = [job.nodes[m.node] for m in plan.members if seating.here(job.nodes.get(m.node), m.incarnation)]
    if all(node.stopped(plan.epoch) for node in nodes):
        draft.complete("every member ran to its end")
    elif job.stage is not Stage.FORMING:
        draft.order_stop(DONE, FINISH_GRACE_S)

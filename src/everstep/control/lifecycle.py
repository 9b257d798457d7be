"""The life cycle of a job (TRANSOM's TOL): a pure machine `(job, event, now) -> (job, commands)`.

    CHECKING -> FORMING -> RUNNING <-> SUSPECT -> EVICTING -> REFORMING -> FORMING ...
                                  any -> STOPPING -> FINISHED | FAILED

A fault opens an incident and evicts: every member is told to stop its part of the epoch. Only when each
one confirmed, or cannot be running any more, is the next epoch dealt. So at most one epoch is ever active.
State is a fold over the events; a restarted controller replays them and asks its nodes where they stand.
"""

from __future__ import annotations

import msgspec

from everstep.control import changes, dealings, deciding, membership, reform, refusal, saved, seats
from everstep.control.draft import ORPHANS_S, Draft
from everstep.control.job import ACTIVE, ENDED, WAITING, Command, Job, NodeState, Stage
from everstep.control.verdicts import conclude
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.types import Action, Blame, EpochPlan, ExitCause, NodeLoss, NodeReport, Verdict


def step(job: Job, event: e.Input, now: float) -> tuple[Job, list[Command]]:
    """Advance by one event. Nothing here reads a clock, a file or a random number."""
    draft = Draft(job, now)
    match event:
        case e.JobSubmitted(spec):
            draft.set(spec=spec, stage_since_s=now)
        case e.ControllerStarted(term):
            _restarted(draft, term)
        case e.NodeReported(report):
            _reported(draft, report)
        case e.NodeGone(name, incarnation, how):
            _gone(draft, name, incarnation, how)
        case e.HangSuspected(epoch, why):
            if epoch == job.epoch and job.stage in (Stage.RUNNING, Stage.SUSPECT):
                draft.enter(Stage.SUSPECT if why else Stage.RUNNING, why)
        case e.HangJudged(epoch, verdict):
            if epoch == job.epoch and job.stage in ACTIVE:
                _hung(draft, verdict)
        case e.StopAsked():
            _stop(draft, event)
        case e.DrainAsked(target, undo):
            draft.set(drains=job.drains - {target} if undo else job.drains | {target})
            if undo:
                changes.refill(draft, target)
            draft.remind(target if target in job.nodes else target.rpartition("/")[0])
        case e.SaveAsked(number):
            draft.set(save_asked=number)
            for name in job.nodes:
                draft.remind(name)
        case e.CostLearned(what, seconds):
            draft.set(costs=job.costs.saw(what, seconds))
        case e.Ticked():
            pass
    _react(draft)
    return draft.job, draft.commands


# What each event means --------------------------------------------------------------------------------


def _restarted(draft: Draft, term: int) -> None:
    """A new life of the controller: every node has `recover_s` to come back, every deadline starts anew."""
    job, now = draft.job, draft.now
    draft.set(term=term)
    if job.stage in ENDED:
        return
    due = now + job.spec.recover_s
    for node in job.nodes.values():
        stop_by = now + job.spec.grace_s + job.spec.stop_margin_s if node.stop_by_s else 0.0
        draft.put(msgspec.structs.replace(node, lost_at_s=due, stop_by_s=stop_by))
    short_since_s = now if job.short_since_s else 0.0
    draft.set(stage_since_s=now, last_join_s=now, grow_at_s=0.0, patient_until_s=0.0, memory=job.memory.rebased(now))
    draft.set(short_since_s=short_since_s, raised_s=0.0)
    draft.set(gone_by={i: now + draft.longest_s() if at else 0.0 for i, at in job.gone_by.items()})


def _reported(draft: Draft, report: NodeReport) -> None:
    job = draft.job
    if report.incarnation in job.replaced:
        return
    latest = job.latest.get(report.node, report.incarnation)
    if latest != report.incarnation:
        _replaced(draft, report.node, latest)
    known = draft.job.nodes.get(report.node)
    if known is None:
        reform.returned(draft, report)
        draft.join(report)
        dealings.heard(draft, report)
        saved.heard(draft, report)
        _collect_ends(draft, report)
        if job.stage in ENDED:
            code = job.outcome.exit_code if job.outcome else 0
            grace = job.spec.grace_s
            draft.direct(report.node, Action.LEAVE, reason="the job has ended", grace_s=grace, exit_code=code)
        return
    if report.seq <= known.report.seq:
        return
    draft.put(msgspec.structs.replace(known, report=report, lost_at_s=0.0))
    dealings.heard(draft, report)
    saved.heard(draft, report)
    _collect_ends(draft, report)


def _replaced(draft: Draft, name: str, incarnation: str) -> None:
    """A new agent of this name came. It has ended all processes of the old one before it reported."""
    if name in draft.job.nodes:
        draft.drop(name, NodeLoss.REPLACED)
    elif incarnation in draft.job.gone_by:
        draft.gone(incarnation, 0.0)
    draft.set(replaced=(*draft.job.replaced, incarnation)[-256:])


def _collect_ends(draft: Draft, report: NodeReport) -> None:
    """Note each worker's end once, and again when more is known (it failed first, the status came later).

    What is still said about a process that was replaced since is history.
    """
    job, plan = draft.job, draft.job.plan
    member = plan.member(report.node) if plan else None
    if plan is None or member is None or report.epoch != plan.epoch or report.incarnation != member.incarnation:
        return
    for worker in report.workers:
        rank = plan.rank(report.node, worker.local_rank)
        if worker.before is not None and worker.life == job.lives.get(rank, 0):  # else it is about an older life
            reform.learn(draft, rank, report.node, worker.before)
        if worker.exit is None:
            continue
        if worker.life < job.lives.get(rank, 0):
            continue
        known = job.ended.get(rank)
        if known is not None and known.exit == worker.exit:
            continue
        seen = known.seen_s if known else draft.now - max(0.0, report.sent_s - worker.exit.at_s)
        record = e.WorkerEnded(rank, report.node, worker.exit, seen)
        draft.set(ended={**draft.job.ended, rank: record})
        saved.ended(draft, worker.session, worker.exit)
        draft.note(record)


def _gone(draft: Draft, name: str, incarnation: str, how: NodeLoss) -> None:
    job = draft.job
    node = job.nodes.get(name)
    if node is None or node.report.incarnation != incarnation:
        if how is NodeLoss.DIED and job.gone_by.get(incarnation, 0.0) > draft.now + ORPHANS_S:
            draft.gone(incarnation, draft.now + ORPHANS_S)
        return
    if job.stage in ENDED or (node.report.leaving and node.at_rest):
        draft.drop(name, NodeLoss.LEFT)
    elif how is NodeLoss.CLOSED and not node.lost_at_s:
        draft.put(msgspec.structs.replace(node, lost_at_s=draft.now + job.spec.reconnect_s))
    elif how is not NodeLoss.CLOSED:
        draft.drop(name, how)


def _hung(draft: Draft, verdict: Verdict) -> None:
    if reform.hung(draft, verdict):
        return
    draft.open_incident(verdict.kind, verdict.culprits, verdict.why, counts=True)
    ranks = tuple(c.rank for c in verdict.culprits if c.rank >= 0)
    _evict(draft, cut=True, kill_ranks=ranks)


def _stop(draft: Draft, asked: e.StopAsked) -> None:
    """The first wish opens the stop; a later one can only make it quicker."""
    job = draft.job
    if job.stage in ENDED:
        return
    first = job.stop is None
    grace = asked.grace_s if first or job.stop is None else min(asked.grace_s, job.stop.grace_s)
    draft.set(stop=msgspec.structs.replace(asked, grace_s=grace))
    if first:
        draft.open_incident("stop", (), asked.why, counts=False)
    if job.stage in WAITING:
        draft.end(128 + asked.signal, asked.why)
        return
    draft.enter(Stage.STOPPING, asked.why)
    draft.order_stop(asked.why, grace, stop_at_step=asked.stop_at_step if first else 0, cut=bool(job.vacant))


# What follows from the state --------------------------------------------------------------------------


def _react(draft: Draft) -> None:
    """Let time and the new state have their consequences; each rule may open the way for the next."""
    if draft.job.stage in ENDED:
        return
    draft.readmit()
    _expire(draft)
    if draft.job.stage in ACTIVE:
        _check_epoch(draft)
    if draft.job.stage is Stage.EVICTING and draft.settled() and reform.over(draft):
        conclude(draft)
    if draft.job.stage is Stage.STOPPING:
        _check_stopping(draft)
    if draft.job.stage in WAITING:
        _try_form(draft)


def _expire(draft: Draft) -> None:
    epoch = draft.job.epoch
    for name, node in draft.job.nodes.items():
        if node.lost_at_s and draft.now >= node.lost_at_s:
            draft.drop(name, NodeLoss.CLOSED)
        elif node.stop_by_s and draft.now >= node.stop_by_s:
            if node.stopped(epoch):
                draft.put(msgspec.structs.replace(node, stop_by_s=0.0))
            else:
                draft.drop(name, NodeLoss.STUCK)


def _check_epoch(draft: Draft) -> None:
    job, plan = draft.job, draft.job.plan
    assert plan is not None
    if job.formation is not None:
        if reform.react(draft):
            return
        job = draft.job
    stopped = [w for w in job.ended.values() if w.exit.cause in (ExitCause.STOPPED, ExitCause.GRACE)]
    failed = [w for w in job.ended.values() if w.exit.failed and w not in stopped]
    nodes = [job.nodes.get(m.node) for m in plan.members]
    if job.lost:
        gone = [Blame(-1, r.node, f"node lost: {r.how.value}") for r in job.lost]
        draft.open_incident("node-lost", gone, f"lost {', '.join(r.node for r in job.lost)}", counts=False)
        _evict(draft, cut=True)
    elif failed:
        blames = [Blame(w.rank, w.node, w.exit.cause.value, w.exit.message) for w in failed]
        first = blames[0]
        draft.open_incident("crash", blames, f"rank {first.rank} on {first.node}: {first.detail}", counts=True)
        _evict(draft, cut=True)
    elif not stopped and _all_through(draft, plan):
        _complete(draft)
    elif any(n is not None and n.report.leaving for n in nodes):
        leaving = [n.report.node for n in nodes if n is not None and n.report.leaving]
        draft.open_incident("drain", [Blame(-1, n, "leaves") for n in leaving], "a node leaves", counts=False)
        _evict(draft, cut=bool(job.vacant))
    elif stopped:  # no order of ours: their node fenced itself while there was no controller
        blames = [Blame(w.rank, w.node, "stopped on its own") for w in stopped]
        draft.open_incident("interrupted", blames, "workers were stopped without an order", counts=False)
        _evict(draft, cut=True)
    elif job.formation is not None:
        draft.open_incident("interrupted", (), reform.why_over(job), counts=False)
        _evict(draft, cut=True)
    else:
        if job.stage is Stage.FORMING and all(n is None or n.report.epoch == plan.epoch for n in nodes):
            draft.enter(Stage.RUNNING)
        if draft.job.stage is not Stage.FORMING:
            reform.begin(draft)
            if draft.job.formation is None:
                _check_growth(draft)


def _all_through(draft: Draft, plan: EpochPlan) -> bool:
    """Every worker ended, and no member that is here has a process of this epoch left."""
    job = draft.job
    here = [(job.nodes.get(member.node), member.incarnation) for member in plan.members]
    # A new agent under a member's name has ended what the old one ran, and knows nothing of this epoch.
    nodes = [node for node, incarnation in here if node is not None and node.report.incarnation == incarnation]
    return len(job.ended) == seats.num_places(job) and all(node.stopped(plan.epoch) for node in nodes)


def _complete(draft: Draft) -> None:
    job = draft.job
    steps = max([job.best_step, *(max(w.exit.total_step, w.exit.step) for w in job.ended.values())])
    if steps < job.spec.expect_steps:
        why = f"every worker exited 0 at step {steps} of {job.spec.expect_steps}"
        draft.open_incident("incomplete", (), why, counts=False)
        draft.end(ExitCode.INCOMPLETE, why)
    else:
        draft.complete("every worker ran to its end")


def _check_growth(draft: Draft) -> None:
    """A newcomer and a free place: re-form, a little later, so that several newcomers cost one restart."""
    job, plan = draft.job, draft.job.plan
    assert plan is not None
    full = len(plan.members) >= job.spec.max_nodes or len(job.nodes) <= len(plan.members)
    spares = [] if full else [n for n in _candidates(draft) if plan.member(n.report.node) is None]
    if not spares:
        if job.grow_at_s:
            draft.set(grow_at_s=0.0)
    elif not job.grow_at_s:
        draft.set(grow_at_s=draft.now + job.spec.last_call_s)
    elif draft.now >= job.grow_at_s:
        draft.set(grow_at_s=0.0)
        names = ", ".join(n.report.node for n in spares)
        draft.open_incident("grow", (), f"{names} can fill a free place", counts=False)
        _evict(draft, cut=False)


def _evict(draft: Draft, *, cut: bool, kill_ranks: tuple[int, ...] = ()) -> None:
    incident = draft.job.incident
    assert incident is not None
    deciding.evict(draft)
    draft.enter(Stage.EVICTING, incident.why)
    draft.order_stop(incident.why, draft.job.spec.grace_s, cut=cut, kill_ranks=kill_ranks)


def _check_stopping(draft: Draft) -> None:
    job = draft.job
    assert job.stop is not None
    if draft.settled():
        done = len(job.ended) and all(not w.exit.failed for w in job.ended.values())
        how = "the workers left on their own" if done else "not every worker ended cleanly"
        draft.end(128 + job.stop.signal, f"{job.stop.why}; {how}")
    elif any(w.exit.failed for w in job.ended.values()) or job.lost:
        draft.order_stop(job.stop.why, job.stop.grace_s, cut=True)  # the rest waits for somebody who is gone


def _candidates(draft: Draft) -> list[NodeState]:
    """Nodes that can be in the next epoch, in order of arrival."""
    job = draft.job
    free = sorted((n for n in job.nodes.values() if n.free), key=lambda n: n.order)
    return refusal.fit(draft, free)


def _try_form(draft: Draft) -> None:
    job, now = draft.job, draft.now
    candidates = _candidates(draft)
    count, spec = len(candidates), job.spec
    pending = any(not n.free for n in job.nodes.values() if not n.report.leaving)
    last_call = job.stage is Stage.CHECKING and now < job.last_join_s + spec.last_call_s
    waits = now < job.patient_until_s  # for the successor of a lost node
    overdue = now >= job.stage_since_s + spec.join_timeout_s
    if any(not n.at_rest for n in job.nodes.values()):
        return  # back from a cut and still stopping: what its workers save must not meet what new ones load
    if count >= spec.max_nodes or (count >= spec.min_nodes and (overdue or not (pending or last_call or waits))):
        _form(draft, [n.report for n in candidates])
    elif overdue:
        why = f"{count} of at least {spec.min_nodes} nodes after {spec.join_timeout_s:.0f} s"
        draft.end(ExitCode.TOO_FEW_NODES, why)


def _form(draft: Draft, present: list[NodeReport]) -> None:
    job = draft.job
    previous = job.plan.members if job.plan else ()
    deciding.dealt(draft)
    plan = membership.deal(job.epoch + 1, previous, present, job.spec.max_nodes, job.restarts, job.excluded)
    draft.set(epoch=plan.epoch, plan=plan, ended={}, lost=(), gone_by={}, grow_at_s=0.0, incident=None)
    draft.set(formation=None, before=None, superseded=(), founders=frozenset(), lives={}, departed={})
    draft.set(fixed=False, vacant=frozenset(), short_since_s=0.0, raised=frozenset(), raised_s=0.0)
    draft.note(e.EpochFormed(plan))
    draft.enter(Stage.FORMING)
    for report in present:
        node = draft.job.nodes[report.node]
        draft.put(msgspec.structs.replace(node, stop_by_s=0.0))  # it is at rest, or would not be here
        if plan.member(report.node):
            draft.direct(report.node, Action.RUN, epoch=plan.epoch, plan=plan)
        else:
            draft.direct(report.node, Action.PARK, reason="spare")

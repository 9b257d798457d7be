"""What the policy is asked when something fails, and its answer in the journal: `Decided`, with what else was weighed.

It chooses where the machine can do one thing or another. What the machine cannot do, or need not, is barred with the
reason, so that the journal shows it among the alternatives. What is learned from nodes that fail is here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everstep.control import seats
from everstep.control.draft import Draft
from everstep.control.job import Incident, Job
from everstep.core import events as e
from everstep.core.decisions import Action, Decision
from everstep.core.formation import Formation
from everstep.plan.barred import HELD, LIVES, of_corrupt, of_dead
from everstep.plan.costs import NODE
from everstep.plan.policy import KEPT, Situation, Tier, decide

IN_VAIN = 3.0  # a wait for a node that nobody ended is thought of as having taken so many times as long


def without_standby(draft: Draft, formation: Formation) -> bool:
    """Members are dead, others hold the state: whether these are to go on alone although somebody waits ready.

    Decided once for the same dead of one incident.
    """
    job, incident = draft.job, draft.job.incident
    dead = seats.dead(job, formation)
    if incident is None or not dead:
        return False
    ready = len(seats.ready_ones(job, formation))
    decision = incident.decision
    if decision is None or incident.about != tuple(dead):
        decision = _reseat(draft, incident, formation, dead, ready)
    return decision.action is Action.SHRINK and ready >= len(dead)


def _reseat(draft: Draft, incident: Incident, formation: Formation, dead: list[str], ready: int) -> Decision:
    job = draft.job
    situation = _situation(
        job,
        incident,
        target=", ".join(dead),
        workers=len(formation.seats),
        failed=len(dead),
        in_steps=True,
        fixed=job.fixed,
        standbys=ready,
        places=sum(seats.place(worker)[0] in job.nodes and not seats.leaving(job, worker) for worker in dead),
        barred=of_dead(fixed=job.fixed, filled=ready >= len(dead)),
    )
    return _note(draft, decide(situation, job.costs), about=dead)


def raised(draft: Draft, formation: Formation, again: Sequence[int]) -> None:
    """Functions raised, in processes that live on. `again`: ranks that did so before, and get new ones."""
    incident = draft.job.incident
    assert incident is not None
    barred = dict.fromkeys((Action.PROMOTE, Action.SHRINK, Action.RESCHEDULE), LIVES)
    barred |= {Action.RESTART: HELD, Action.ROLL_BACK: HELD}
    failed = len(again) or 1
    situation = _situation(
        draft.job,
        incident,
        workers=len(formation.seats),
        failed=failed,
        places=failed,
        gone=False,
        in_steps=True,
        tried=(Action.RETRY,) if again else (),
        barred=barred,
    )
    _note(draft, decide(situation, draft.job.costs))


def corrupt(draft: Draft, formation: Formation, lost_steps: int, failed: int) -> None:
    """Replicas differ. `lost_steps`: since they were alike; negative: no state is known of then, or kept."""
    job, incident = draft.job, draft.job.incident
    assert incident is not None
    kept = lost_steps >= 0
    situation = _situation(
        job,
        incident,
        workers=len(formation.seats),
        failed=failed,
        places=failed,
        gone=False,
        in_steps=True,
        fixed=job.fixed,
        tiers=(Tier(KEPT, lost_steps),) if kept else (),
        barred=of_corrupt(kept=kept),
    )
    _note(draft, decide(situation, job.costs))


def beside(draft: Draft, why: str) -> None:
    """Nobody waits for the new process."""
    if draft.job.incident is not None:
        _note(draft, Decision(Action.RESPAWN, 0.0, why))


def evict(draft: Draft) -> None:
    """All workers stop and start again: at once with whoever is here, or when a lost node has a successor."""
    job, plan, incident = draft.job, draft.job.plan, draft.job.incident
    assert plan is not None and incident is not None
    here = [m for m in plan.members if m.node in job.nodes and not job.nodes[m.node].report.leaving]
    missing = plan.world_size - sum(member.slots for member in here)
    failed = max(1, missing, len(incident.culprits))
    spares = [n.report.slots for n in job.nodes.values() if n.free and plan.member(n.report.node) is None]
    situation = _situation(
        job,
        incident,
        workers=plan.world_size,
        failed=failed,
        places=failed - missing,
        spares=sum(spares),
        least=min(plan.world_size, job.spec.min_nodes * max(member.slots for member in plan.members)),
    )
    decision = _note(draft, decide(situation, job.costs))
    smaller = next((a for a in decision.alternatives if a.action is Action.RESTART and a.feasible), None)
    if decision.action is Action.RESCHEDULE and smaller is not None:
        # As in ski-rental: it waits no longer than going on at once would have cost.
        patience_s = min(job.spec.join_timeout_s, smaller.loss_s / plan.world_size)
        draft.set(patient_until_s=draft.now + patience_s)


def give_up(draft: Draft) -> None:
    """No restart is left, or none would help."""
    job, incident = draft.job, draft.job.incident
    assert incident is not None
    workers = job.plan.world_size if job.plan is not None else 1
    situation = _situation(job, incident, workers=workers, restarts_left=job.spec.max_restarts - job.restarts)
    _note(draft, decide(situation, job.costs))


def dealt(draft: Draft) -> None:
    """The next epoch is dealt. If it was waited for a node in vain, the next wait is thought of as longer."""
    job = draft.job
    if not job.patient_until_s:
        return
    if draft.now >= job.patient_until_s and job.plan is not None:
        expected_s = job.costs.seconds(NODE, job.plan.world_size)
        draft.set(costs=job.costs.saw(NODE, IN_VAIN * expected_s))
    draft.set(patient_until_s=0.0)


def _situation(job: Job, incident: Incident, **facts: object) -> Situation:
    repeats = _run_length(job)
    facts = {"target": ", ".join(sorted({blame.node for blame in incident.culprits})), **facts}
    made = Situation(kind=incident.kind, repeats=repeats, crash_loop=job.spec.crash_loop)
    return msgspec.structs.replace(made, **facts)


def _run_length(job: Job) -> int:
    """How often the last failure came in a row."""
    signatures = job.signatures
    count = 0
    while count < len(signatures) and signatures[-1 - count] == signatures[-1]:
        count += 1
    return count


def _note(draft: Draft, decision: Decision, about: Sequence[str] = ()) -> Decision:
    incident = draft.job.incident
    assert incident is not None
    draft.note(e.Decided(incident.id, decision))
    draft.set(incident=msgspec.structs.replace(incident, about=tuple(about), decision=decision))
    return decision

"""Jobs whose number of members may not change: each role is filled, or everybody waits until it can be.

A session says so whose model is sharded over the members, and so does a restartable function. The survivors keep their
roles and may be left waiting in their collectives; a dead member's role goes to the next life of its place or, when
one is ready, to a standby. Pure functions over the job's state, as in `control.seats`.
"""

from __future__ import annotations

from everstep.control import seats
from everstep.control.job import Job
from everstep.core.formation import Formation, Seat, Stage
from everstep.core.types import Activity


def refilled(job: Job, formation: Formation, epoch: int) -> Formation | None:
    """Who is left, in the same roles, and for each of the others somebody who waits ready. None: too few do."""
    ready = {seats.place(s.worker)[:2]: seats.seat_of(s) for s in seats.ready_ones(job, formation)}
    found = [
        _keeper(job, formation, role) or ready.pop(seats.place(seat.worker)[:2], None)  # the same place, if it can
        for role, seat in enumerate(formation.seats)
    ]
    if found.count(None) > len(ready):
        return None
    others = iter(ready.values())
    filled = tuple(seat or next(others) for seat in found)
    return seats.form(job, epoch, filled, abort=True)


def _keeper(job: Job, formation: Formation, role: int) -> Seat | None:
    """Who has this role and lives; or who was yet to leave it, when the one that was to follow is dead."""
    candidates = [formation.seats[role]]
    if job.before is not None and role < len(job.before.seats):
        former = job.before.seats[role]
        candidates += [former] if formation.role_of(former.worker) is None else []
    return next((seat for seat in candidates if seats.alive(job, seat.worker)), None)


def vacant(job: Job, formation: Formation) -> list[str]:
    """Roles that nobody holds any more, as people read them."""
    return [
        f"role {role} (of {seat.worker})"
        for role, seat in enumerate(formation.seats)
        if seat.worker in job.vacant and _keeper(job, formation, role) is None
    ]


def given_up(job: Job, formation: Formation) -> list[str]:
    """Roles whose holder's node leaves, as people read them. Once scripts come to their end nobody follows them.

    A drained place is no such one: it stays until somebody can take its role, however long that is.
    """
    if not job.fixed or any(seats.ended_well(job, seat.worker) for seat in formation.seats):
        return []
    return [
        f"role {role} (of {seat.worker}, which leaves)"
        for role, seat in enumerate(formation.seats)
        if seats.on_leaver(job, seat.worker) and seat.worker not in job.vacant
    ]


def followers(job: Job, formation: Formation) -> list[str]:
    """Workers that can take a role now or once they are warm."""
    return [
        worker
        for worker in seats.present(job)
        if formation.role_of(worker) is None and seats.alive(job, worker) and not seats.leaving(job, worker)
    ]


def short(job: Job, formation: Formation) -> bool:
    """Whether there is a role which nobody who is here can take over."""
    needed = len(vacant(job, formation)) + len(given_up(job, formation))
    return needed > 0 and needed > len(followers(job, formation))


def waits_for(job: Job) -> str:
    """What keeps the job, or a node that leaves, from going on; empty: nothing does."""
    formation = job.formation
    if formation is None or not job.fixed:
        return ""
    roles = vacant(job, formation) + given_up(job, formation)
    if not roles:
        return ""
    text = f"a worker in {', '.join(roles)}"
    return f"{text}; there is none: a node has to come" if short(job, formation) else text


def stopped(job: Job) -> bool:
    """Whether no node of this epoch has workers that nobody has told of its end."""
    if job.plan is None:
        return False
    members = [job.nodes.get(member.node) for member in job.plan.members]
    told = (Activity.STOPPING, Activity.STOPPED)
    return all(n is None or n.report.epoch < job.epoch or n.report.activity in told for n in members)


def acting(job: Job) -> frozenset[int]:
    """Ranks that can hold the job up. While roles are vacant these are who warms up for them: the members wait."""
    if job.formation is None or not job.vacant or job.plan is None:
        return seats.acting(job)
    sessions = seats.sessions_of(job)
    cold = [w for w in followers(job, job.formation) if w not in sessions or sessions[w].stage is Stage.WARMING]
    ranks = (seats.rank_of(job.plan, worker) for worker in cold)
    return frozenset(rank for rank in ranks if rank is not None)

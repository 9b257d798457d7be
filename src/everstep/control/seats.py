"""Who holds which role in the next formation: pure functions over the job's state.

A formation seats workers of the present plan whose scripts have a session (`core.formation` tells what the sessions
rely on). A dead member's role goes to a worker that waits ready, else the roles behind it move up. Newcomers and
leavers change the seats as planned, one formation at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from everstep.control.job import Job, NodeState
from everstep.core.corruption import Corruption
from everstep.core.formation import Formation, Seat, SessionReport, Stage
from everstep.core.types import EpochPlan, ExitCause, Member, NodeReport, WorkerReport


def name(node: str, local_rank: int, life: int) -> str:
    """How a worker is called in a formation."""
    return f"{node}/{local_rank}#{life}"


@functools.lru_cache(maxsize=1 << 16)
def place(worker: str) -> tuple[str, int, int]:
    """Node, local rank and life of a worker's name."""
    node, _, rest = worker.rpartition("/")
    local_rank, _, life = rest.partition("#")
    return node, int(local_rank), int(life)


def rank_of(plan: EpochPlan, worker: str) -> int | None:
    """Its rank in the plan; None when its node is not in it any more."""
    node, local_rank, _ = place(worker)
    member = plan.member(node)
    return member.first_rank + local_rank if member is not None else None


class _Part(msgspec.Struct):
    """What one node of a plan told, as long as `report` is its last."""

    report: NodeReport
    workers: dict[str, WorkerReport]
    sessions: dict[str, SessionReport]
    alive: frozenset[str]
    failing: bool
    fixed: bool
    corrupt: Corruption | None


class _Here(msgspec.Struct):
    """What `present` and `sessions_of` found, and in what."""

    plan: EpochPlan | None
    nodes: Mapping[str, NodeState]
    lives: Mapping[int, int]
    parts: dict[str, _Part] = {}
    workers: dict[str, WorkerReport] = {}
    sessions: dict[str, SessionReport] = {}
    alive: frozenset[str] = frozenset()
    failing: bool = False  # a session's function raised
    fixed: bool = False  # a session, seated or not, says that the number of members may not change
    corrupt: Corruption | None = None  # the newest that a session found


_last = [_Here(None, {}, {})]  # one event asks many times, about each of many workers: the same state, the same answer


def _here(job: Job) -> _Here:
    last = _last[0]
    if last.plan is not job.plan or last.nodes is not job.nodes or last.lives is not job.lives:
        _last[0] = last = _found(job, last.parts if last.plan is job.plan and last.lives is job.lives else {})
    return last


def _found(job: Job, before: dict[str, _Part]) -> _Here:
    """`before`: what was found of the same plan and lives. One report of a thousand nodes' is read, not all of them."""
    plan, here = job.plan, _Here(job.plan, job.nodes, job.lives)
    assert plan is not None
    for member in plan.members:
        node = job.nodes.get(member.node)
        if node is None or node.report.incarnation != member.incarnation or node.report.epoch != plan.epoch:
            continue
        part = before.get(member.node)
        if part is None or part.report is not node.report:
            part = _part(job, member, node.report)
        here.parts[member.node] = part
        here.workers.update(part.workers)
        here.sessions.update(part.sessions)
    parts = here.parts.values()
    here.alive = frozenset().union(*(part.alive for part in parts))
    here.failing, here.fixed = any(part.failing for part in parts), any(part.fixed for part in parts)
    here.corrupt = _newest(part.corrupt for part in parts)
    return here


def _part(job: Job, member: Member, report: NodeReport) -> _Part:
    workers = {
        name(member.node, worker.local_rank, worker.life): worker
        for worker in report.workers
        if worker.life == job.lives.get(member.first_rank + worker.local_rank, 0)
    }
    sessions = {worker: said.session for worker, said in workers.items() if said.session is not None}
    alive = (w for w, said in workers.items() if said.exit is None and not said.gone and not _left(said.session))
    return _Part(
        report,
        workers,
        sessions,
        frozenset(alive),
        any(said.failure for said in sessions.values()),
        any(said.fixed for said in sessions.values()),
        _newest(said.corrupt for said in sessions.values()),
    )


def _newest(found: Iterable[Corruption | None]) -> Corruption | None:
    known = (each for each in found if each is not None)
    return max(known, key=lambda each: (each.epoch, each.sure, each.parts), default=None)


def present(job: Job) -> Mapping[str, WorkerReport]:
    """Workers of the plan that may run: of the wanted life, on nodes that are here. By name."""
    return _here(job).workers


def ended_well(job: Job, worker: str) -> bool:
    """Its script ran to its end: of the job, or of this worker's part in it (a leaver)."""
    assert job.plan is not None
    rank = rank_of(job.plan, worker) if job.ended else None
    if rank is None or place(worker)[2] != job.lives.get(rank, 0):  # what is known of its place is another one's end
        return False
    end = job.ended.get(rank)
    return end is not None and end.exit.cause is ExitCause.OK


def finished(job: Job, formation: Formation) -> set[str]:
    """Members which came to the end of their scripts in this formation."""
    if not job.ended:
        return set()
    sessions = sessions_of(job)
    done = [seat.worker for seat in formation.seats if ended_well(job, seat.worker) and not early(job, seat.worker)]
    return {w for w in done if w in sessions and sessions[w].epoch >= formation.epoch and not _left(sessions[w])}


def early(job: Job, worker: str) -> bool:
    """Its script ended well before the last step of the longest loop: those who go on must not wait for it."""
    sessions = sessions_of(job)
    goal = max((session.goal for session in sessions.values()), default=0)
    return goal > 0 and ended_well(job, worker) and steps_of(job, worker) < goal


def steps_of(job: Job, worker: str) -> int:
    """Committed steps that a worker whose script ended had seen."""
    assert job.plan is not None
    session = sessions_of(job).get(worker)
    return max(job.ended[rank_of(job.plan, worker) or 0].exit.step, session.committed if session is not None else -1)


def left_behind(job: Job, committed: int) -> list[str]:
    """Whose script ended well although others went on from there, to `committed` steps. A leaver is asked to do so."""
    over = [worker for worker in present(job) if early(job, worker) and steps_of(job, worker) < committed]
    return [worker for worker in over if not _left(sessions_of(job).get(worker)) and not leaving(job, worker)]


def complete(job: Job, formation: Formation) -> bool:
    """Everybody who may hold the state came to the end of the script. Who was yet to join them does not matter."""
    if not job.ended:
        return False
    sessions = sessions_of(job)
    former = formation.seats if job.before is None else job.before.seats
    stay = [s.worker for s in former if formation.role_of(s.worker) is not None or not parted(job, s.worker)]
    stay = [worker for worker in stay if not _left(sessions.get(worker))]
    unfinished = [worker for worker in stay if not ended_well(job, worker)]
    stateless = [w for w in unfinished if w in sessions and not may_hold(job, w) and not job.fixed]
    return len(unfinished) < len(stay) and len(stateless) == len(unfinished)


def parted(job: Job, worker: str) -> bool:
    """It gave its seat up, or is through with its script."""
    return _left(sessions_of(job).get(worker)) or ended_well(job, worker)


def may_hold(job: Job, worker: str) -> bool:
    """It may hold the state: it said so, or no step can have been committed without it.

    A newcomer, or a standby in a role that it just got, may not have fetched anything yet.
    """
    session = sessions_of(job).get(worker)
    return worker in job.founders or (session is not None and session.committed >= 0)


def survivors(job: Job, formation: Formation) -> list[str]:
    """Members of the newest formation which can go on. Who was yet to leave may have missed steps of it."""
    return [s.worker for s in formation.seats if alive(job, s.worker) and may_hold(job, s.worker)]


def first(job: Job, epoch: int) -> Formation | None:
    """The job's first formation: when every place of the plan that is not drained has a worker which waits ready."""
    plan = job.plan
    assert plan is not None
    workers = present(job)
    ready = {n: w.session for n, w in workers.items() if w.session and w.session.stage is Stage.READY and not w.exit}
    if len(ready) < num_places(job):
        return None
    order = sorted(ready, key=lambda worker: rank_of(plan, worker) or 0)
    return form(job, epoch, [seat_of(ready[worker]) for worker in order], abort=False)


def holders(job: Job, formation: Formation) -> tuple[Seat, ...]:
    """Everybody who may hold the state: the members and, while a planned change is under way, who is yet to leave."""
    if job.before is None:
        return formation.seats
    seated = {seat.worker for seat in formation.seats}
    staying = [seat for seat in job.before.seats if seat.worker not in seated]
    return (*formation.seats, *(s for s in staying if not parted(job, s.worker)))


def _left(session: SessionReport | None) -> bool:
    return session is not None and session.stage is Stage.LEFT


def target(job: Job) -> int:
    """How many roles there are, if enough workers are there."""
    assert job.plan is not None
    return sum(member.slots for member in job.plan.members if member.group_rank < job.spec.max_nodes)


def without_dead(job: Job, formation: Formation, epoch: int, *, fill: bool = True) -> Formation | None:
    """The survivors and, in the roles of the dead, whoever waits ready (with `fill`). None: nobody has the state."""
    if not survivors(job, formation):
        return None
    former = holders(job, formation)
    living = [seat for seat in former if alive(job, seat.worker)]
    waiting = ready_ones(job, formation)[: max(0, target(job) - len(living))] if fill else []
    seats = []
    for seat in former:
        if seat in living:
            seats.append(seat)
        elif waiting:
            seats.append(seat_of(waiting.pop(0)))
    return form(job, epoch, seats, abort=True)


def changed(job: Job, formation: Formation, epoch: int) -> Formation | None:
    """A planned change: leavers go, ready workers take their roles, or one that is free. None: no change.

    A drained place waits until somebody else is there to go on; a node that leaves does not. Where the number of
    members may not change, a leaver stays until somebody can take its role.
    """
    some = bool(job.drains) or any(node.report.leaving for node in job.nodes.values())
    goes = {seat.worker for seat in formation.seats if leaving(job, seat.worker)} if some else set()
    waiting = ready_ones(job, formation)
    if not goes and not waiting:
        return None
    if len(goes) == len(formation.seats) and not waiting:
        goes = {worker for worker in goes if on_leaver(job, worker)}
    if not job.fixed:
        waiting = waiting[: max(0, target(job) - len(formation.seats) + len(goes))]
    seats = []
    for seat in formation.seats:
        if seat.worker not in goes:
            seats.append(seat)
        elif waiting:
            seats.append(seat_of(waiting.pop(0)))
        elif job.fixed:
            seats.append(seat)
    if not job.fixed:
        seats += [seat_of(report) for report in waiting]
    if not seats or tuple(seats) == formation.seats:
        return None
    return form(job, epoch, seats, abort=False)


def acting(job: Job) -> frozenset[int]:
    """Ranks that hold a role; without sessions all of the plan."""
    if job.plan is None:
        return frozenset()
    if job.formation is None:
        return frozenset(range(job.plan.world_size))
    ranks = (rank_of(job.plan, seat.worker) for seat in job.formation.seats)
    return frozenset(rank for rank in ranks if rank is not None)


def adopted(job: Job, formation: Formation) -> bool:
    """Every member said that it acts in this formation, or has finished."""
    sessions = sessions_of(job)
    done = finished(job, formation)
    return all(
        seat.worker in done or (seat.worker in sessions and sessions[seat.worker].epoch >= formation.epoch)
        for seat in formation.seats
    )


def not_left(job: Job, formations: tuple[Formation, ...]) -> tuple[Formation, ...]:
    """Those of which no member said yet that it acts in a later one."""
    sessions = sessions_of(job)
    return tuple(
        formation
        for formation in formations
        if not any(s.worker in sessions and sessions[s.worker].epoch > formation.epoch for s in formation.seats)
    )


def sessions_of(job: Job) -> Mapping[str, SessionReport]:
    return _here(job).sessions


def fixed(job: Job, formation: Formation) -> bool:
    """Whether a seated session says that the number of members may not change."""
    if not _here(job).fixed:
        return False
    members = (sessions_of(job).get(seat.worker) for seat in formation.seats)
    return any(said is not None and said.fixed for said in members)


def raised(job: Job, formation: Formation) -> list[SessionReport]:
    """Members whose function raised in it, or in the one that it follows as planned, and who wait for the next."""
    if not _here(job).failing:
        return []
    epochs = (formation.epoch, job.before.epoch if job.before is not None else 0)
    members = [sessions_of(job).get(seat.worker) for seat in holders(job, formation)]
    return [s for s in members if s is not None and s.failure and s.stage is Stage.READY and s.epoch in epochs]


def corrupt(job: Job) -> Corruption | None:
    """The newest corruption that a session of the plan found."""
    return _here(job).corrupt if job.plan is not None else None


def alive(job: Job, worker: str) -> bool:
    """It is here, and has neither ended nor given its seat up."""
    return worker in _here(job).alive


def dead(job: Job, formation: Formation) -> list[str]:
    """Members, and who was yet to leave, that are gone without having finished in this formation."""
    living, done = _here(job).alive, finished(job, formation)
    return [s.worker for s in holders(job, formation) if s.worker not in living and s.worker not in done]


def leaving(job: Job, worker: str) -> bool:
    """Its node leaves, or its place was drained."""
    return on_leaver(job, worker) or drained(job, worker)


def drained(job: Job, worker: str) -> bool:
    """A person wants its place empty."""
    return bool(job.drains) and worker.partition("#")[0] in job.drains


def num_places(job: Job) -> int:
    """Places of the plan that are to be filled."""
    assert job.plan is not None
    places = (f"{member.node}/{k}" for member in job.plan.members for k in range(member.slots) if job.drains)
    return job.plan.world_size - sum(place in job.drains for place in places)


def on_leaver(job: Job, worker: str) -> bool:
    node = job.nodes.get(place(worker)[0])
    return node is not None and node.report.leaving


def all_leave(job: Job) -> bool:
    """Nobody stays who could go on; but where somebody came to the end of the script, so will the leavers."""
    assert job.formation is not None
    if not all(on_leaver(job, seat.worker) for seat in job.formation.seats):
        return False
    through = [job.nodes.get(end.node) for end in job.ended.values() if end.exit.cause is ExitCause.OK]
    return all(node is None or node.report.leaving for node in through)


def ready_ones(job: Job, formation: Formation) -> list[SessionReport]:
    """Sessions that wait for a role, by rank, on excluded nodes last. Who had one before: in its next life only."""
    plan = job.plan
    assert plan is not None
    seated = {seat.worker for seat in formation.seats}
    waiting = [
        (rank_of(plan, worker) or 0, session)
        for worker, session in sessions_of(job).items()
        if session.stage is Stage.READY and session.epoch == 0 and worker not in seated
        if alive(job, worker) and not leaving(job, worker)
    ]
    waiting.sort(key=lambda pair: (place(pair[1].worker)[0] in job.excluded, pair[0]))
    return [session for _, session in waiting]


def form(job: Job, epoch: int, seats: Sequence[Seat], abort: bool) -> Formation:
    """With what is known of the state. A job that was never to be saved to disk starts over when it lost it all."""
    scratch = job.floor > 0 and not job.saved_once
    return Formation(epoch, tuple(seats), abort, job.floor, rollbacks=job.rollbacks, scratch=scratch)


def seat_of(session: SessionReport) -> Seat:
    node, _, _ = place(session.worker)
    return Seat(session.worker, node, session.host, session.endpoint, session.store, session.vault)


def amend(plan: EpochPlan, node: str, incarnation: str, address: str, slots: int, here: set[str]) -> EpochPlan:
    """The plan with one more node: in its own place, or in that of a member which is not `here` any more and had as
    many slots, or in a new one."""
    members = list(plan.members)
    own = [i for i, m in enumerate(members) if m.node == node]
    vacant = [i for i, m in enumerate(members) if m.node not in here and m.slots == slots]
    at = next(iter(own or vacant), len(members))
    if at == len(members):
        members.append(Member(node, incarnation, address, at, plan.world_size, slots))
    else:
        members[at] = msgspec.structs.replace(members[at], node=node, incarnation=incarnation, address=address)
    return msgspec.structs.replace(plan, members=tuple(members), world_size=sum(m.slots for m in members))

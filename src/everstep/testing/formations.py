"""What must hold in a job whose scripts have sessions, checked against the simulated processes after every event.

The rules that `core.formation` gives to whoever issues formations; that steps are committed once, by one formation,
and never lost unless everybody who held the state is gone; that who is healthy keeps its process and its role.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.control import seats
from everstep.control.job import Job, Stage
from everstep.core import events as e
from everstep.core.formation import Formation, Rollback
from everstep.core.formation import Stage as Session
from everstep.core.types import ExitCause
from everstep.testing.claims import require
from everstep.testing.sessions import COLLATERAL
from everstep.train import commit

if TYPE_CHECKING:
    from everstep.testing.cluster import Cluster
    from everstep.testing.sessions import SimSession
    from everstep.testing.workers import SimWorker

ACTING = (commit.Phase.READY, commit.Phase.COMPUTING, commit.Phase.VOTING, commit.Phase.APPLYING)


class Formations:
    """Told of every change of the job, and of every commit."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.newest = 0
        self.issued: dict[int, list[Formation]] = {}  # by the epoch of their plan
        self.log: dict[int, list[int]] = {}  # plan's epoch -> for each committed step the epoch of its gradients
        self.made: dict[tuple[int, int], int] = {}  # step, epoch of its gradients -> the first epoch that committed it
        self.begun: dict[tuple[int, int], int] = {}  # plan's epoch, formation's -> fewest steps somebody went on with
        self.rollbacks: dict[int, int] = {}  # formation's epoch -> the step that all went back to in it
        self.history: list[int] = []  # the job's steps, by the epoch of their gradients
        self.most = 0  # steps that were ever committed
        self.floor, self.known = 0, tuple[Rollback, ...]()  # of the newest formation
        self.left_out: set[tuple[int, str]] = set()  # plan's epoch, worker
        self.roles: dict[tuple[int, str], int] = {}  # of jobs whose number of members may not change
        self.raised: set[str] = set()  # places where a function raised in the present incident
        self.raised_alone: set[tuple[int, str]] = set()  # epoch that followed, worker: by itself, its peers all lived

    # Sessions -------------------------------------------------------------------------------------------

    def committed(self, session: SimSession) -> None:
        log = self.log.setdefault(session.worker.epoch, [])
        made_in, step = session.history[-1], len(session.history) - 1
        name = session.worker.name
        self._made(session, step, made_in)
        if step < len(log):
            require(log[step] == made_in, f"step {step} of {log[step]} is committed again in {made_in} by {name}")
            return
        newest = self.cluster.truth.launched_epoch
        require(step == len(log), f"{name} commits step {step} after {len(log)}")
        require(session.worker.epoch == newest, f"{name} commits step {step} while epoch {newest} was launched")
        log.append(made_in)
        self.history = log
        self.most = max(self.most, len(log))

    def _made(self, session: SimSession, step: int, made_in: int) -> None:
        """Who goes on in a later formation has what was committed in this one, also when that is through late."""
        epoch = session.entered  # an apply that is through late may lead to the next one at once
        self.made[step, made_in] = min(epoch, self.made.get((step, made_in), epoch))
        begun = [f for (p, f), fewest in self.begun.items() if p == session.worker.epoch and fewest <= step]
        without = [later for later in begun if later > epoch]
        require(not without, f"{session.worker.name} commits step {step} in {epoch}, {without} went on without it")

    def founded(self, session: SimSession) -> None:
        log = self.log.get(session.worker.epoch, [])
        name, formation = session.worker.name, session.member.formation
        require(not log, f"{name} begins anew, though {len(log)} steps are committed")
        require(formation is not None and not formation.floor, f"{name} begins anew, and nobody says so")

    def restored(self, session: SimSession) -> None:
        """A member has the state that all went back to, and knows that the others have it."""
        stand, name, plan_epoch = session.member.stand, session.worker.name, session.worker.epoch
        epoch, step = stand.rollbacks[-1].epoch, stand.rollbacks[-1].step
        require(step == stand.committed == len(session.history), f"{name} went back to {step}, and holds {stand}")
        if epoch in self.rollbacks:
            log = self.log[plan_epoch]
            require(self.rollbacks[epoch] == step, f"{name} went back to {step}, others to {self.rollbacks[epoch]}")
            require(list(session.history) == log[:step], f"{name} went back to {session.history} of {log}")
            return
        former = self.history
        unheard = [e for e in self.rollbacks if e not in {back.epoch for back in stand.rollbacks}]
        same = list(session.history) == former[:step]
        require(same or unheard, f"{name} went back to {session.history}, which is not of {former}")
        self.rollbacks[epoch] = step
        self.history = self.log[plan_epoch] = list(session.history)

    def ready(self, session: SimSession, step: int) -> None:
        log, history = self.log.get(session.worker.epoch, []), session.history
        name, epoch = session.worker.name, session.member.epoch
        require(len(history) == step and list(history) == log[:step], f"{name} at step {step} holds {history}")
        before = [n for n, made_in in enumerate(log) if n >= step and self.made.get((n, made_in), made_in) < epoch]
        require(not before, f"{name} is at step {step} in formation {epoch}: steps {before} were committed before")
        if step < len(log):  # in a later formation: one who is in that can take no part in this one any more
            assert session.member.formation is not None
            stale = not self.can_commit(session.worker.epoch, session.member.formation)
            require(stale, f"{name} is at step {step} of {len(log)} in formation {epoch}, which can commit")
        key = session.worker.epoch, epoch
        self.begun[key] = min(step, self.begun.get(key, step))

    # The job --------------------------------------------------------------------------------------------

    def job_changed(self, before: Job, job: Job, event: e.Input) -> None:
        if before.stage is Stage.RESEATING and job.stage is Stage.RUNNING:
            self.raised.clear()
        if job.epoch == before.epoch and job.lives != before.lives:
            self._replaced(before, job, event)
        if job.vacant is not before.vacant:
            self._vacated(job)
        through = job.epoch == before.epoch and job.before is not before.before and not _withdrawn(before, job)
        if before.before is not None and through:
            self._left(job, before.before, before.formation)
        if job.formation is not None and job.formation is not before.formation:
            self._issued(before, job, job.formation)
        if before.formation is not None and job.stage is Stage.EVICTING and before.stage is not Stage.EVICTING:
            self._evicted(before, job, event)

    def _issued(self, before: Job, job: Job, new: Formation) -> None:
        number, names = new.epoch, [seat.worker for seat in new.seats]
        require(number > self.newest, f"formation {number} after {self.newest}")
        self.newest = number
        require(names and len(set(names)) == len(names), f"formation {number} seats {names}")
        knows = bool(new.rollbacks) and new.rollbacks[-1].epoch == max(self.rollbacks, default=0)
        made = len(self.history) if knows or not self.rollbacks else self.most
        require(new.floor <= made, f"formation {number}: floor {new.floor}, {made} steps were committed")
        lower = new.floor < self.floor and new.rollbacks == self.known
        require(not lower, f"formation {number}: the floor falls from {self.floor} to {new.floor}, and nobody says so")
        self.floor, self.known = new.floor, new.rollbacks
        old = before.formation if before.epoch == job.epoch else None
        if old is None:
            require(not new.abort, "the first formation aborts")
        holders = _holders(before) if old is not None else []
        for name in names:
            self._seated(job, new, name, name in holders)
        if self.cluster.fixed:
            self._as_before(job, new, old)
        if old is not None and new.abort:
            self._aborts(job, new, holders, [f for f in (before.before, old) if f is not None])
        elif old is not None:
            self._planned(before, job, old, new)
        for former in self.issued.setdefault(job.epoch, []):
            both = {seat.worker for seat in former.seats} & set(names)
            require(both or not self.can_commit(job.epoch, former), f"{former.epoch} and {number} can commit both")
        self.issued[job.epoch].append(new)

    def _seated(self, job: Job, new: Formation, name: str, was: bool) -> None:
        assert job.plan is not None
        rank = seats.rank_of(job.plan, name)
        session = self.cluster.rounds.sessions.get((job.epoch, name))
        require(rank is not None and session is not None, f"formation {new.epoch} seats {name}: there is none")
        assert rank is not None and session is not None
        life = job.lives.get(rank, 0)
        require(session.worker.life == life, f"formation {new.epoch} seats {name}, life {life} is wanted")
        out = (job.epoch, name) in self.left_out
        require(not out, f"formation {new.epoch} seats {name} again, which was left out")
        if not was:
            require(session.stage is not Session.WARMING, f"formation {new.epoch} seats {name}, which warms up")
            node = job.nodes.get(session.worker.agent.name)
            leaving = node is not None and node.report.leaving
            require(not leaving, f"formation {new.epoch} gives a role to {name}, whose node leaves")

    def _as_before(self, job: Job, new: Formation, old: Formation | None) -> None:
        """The same number of roles, and who has one keeps it."""
        num = len(new.seats) if old is None else len(old.seats)
        require(len(new.seats) == num, f"formation {new.epoch} has {len(new.seats)} seats, not {num}")
        for role, seat in enumerate(new.seats):
            had = self.roles.setdefault((job.epoch, seat.worker), role)
            require(had == role, f"formation {new.epoch} moves {seat.worker} from role {had} to {role}")

    def _failed(self, job: Job, new: Formation, former: list[Formation]) -> bool:
        """Whether a function raised in what this formation follows; one that did so twice gets another process."""
        epochs = {formation.epoch for formation in former}
        members = [self.cluster.rounds.session(job.epoch, seat.worker) for f in former for seat in f.seats]
        failed = [s for s in members if s.failure and s.entered in epochs]
        own = [s.worker.name for s in failed if s.failure != COLLATERAL and _heard(job, s)]
        others = [s for s in members if s.worker.name not in own and s.stage is not Session.LEFT]
        alone = all(s.worker.can_step for s in members) and all(new.role_of(s.worker.name) is not None for s in others)
        if alone and not any(s.resumed and s.entered in epochs for s in members):
            again = [name for name in own if any((epoch, name) in self.raised_alone for epoch in epochs)]
            kept = [name for name in again if new.role_of(name) is not None]
            require(not kept, f"formation {new.epoch} seats {kept}, whose functions raised twice and nobody went on")
        self.raised |= {s.worker.name.partition("#")[0] for s in failed}
        if alone:
            self.raised_alone |= {(new.epoch, name) for name in own}
        return bool(failed)

    def _aborts(self, job: Job, new: Formation, holders: list[str], former: list[Formation]) -> None:
        names = {seat.worker for seat in new.seats}
        for name in holders:
            if name in names:
                continue
            self._leave_out(job, name)
            session = self.cluster.rounds.session(job.epoch, name)
            fenced = self._life(job, name) > session.worker.life
            gone = not session.worker.can_step or session.stage is Session.LEFT or session.completed
            require(fenced or gone, f"formation {new.epoch} leaves {name} out, which lives")
        cause = any(name not in names or not self._alive(job.epoch, name) for name in holders)
        cause = cause or self._differ(job, former)
        require(self._failed(job, new, former) or cause, f"formation {new.epoch} aborts without a cause")
        kept = [name for name in holders if name in names]
        require(kept, f"formation {new.epoch} seats nobody who was in it before")

    def _differ(self, job: Job, former: list[Formation]) -> bool:
        """Whether replicas were found to, in what this formation follows."""
        members = [self.cluster.rounds.session(job.epoch, seat.worker) for f in former for seat in f.seats]
        found = [session.corrupt.epoch for session in members if session.corrupt is not None]
        return any(formation.epoch in found for formation in former)

    def _planned(self, before: Job, job: Job, old: Formation, new: Formation) -> None:
        for seat in old.seats:
            session = self.cluster.rounds.session(job.epoch, seat.worker)
            acts = session.member.epoch >= old.epoch or session.worker.dead
            require(acts, f"formation {new.epoch} is planned before {seat.worker} acts in {old.epoch}")
        stay = {seat.worker for seat in old.seats} & {seat.worker for seat in new.seats}
        require(stay, f"formation {new.epoch} keeps no member of {old.epoch}")
        if self.cluster.breaks_change:
            self.cluster.breaks_change = False
            leavers = [seat for seat in old.seats if new.role_of(seat.worker) is None]
            seat = self.cluster.rng.choice(leavers if leavers and self.cluster.rng.random() < 0.5 else new.seats)
            victim = self.cluster.rounds.session(job.epoch, seat.worker)
            victim.after(0.01, 0.3, victim.worker.die, ExitCause.SIGNAL, 9)

    def _left(self, job: Job, old: Formation, new: Formation | None) -> None:
        """A planned change is through: its leavers have no way back."""
        assert new is not None
        for seat in old.seats:
            if new.role_of(seat.worker) is None:
                self._leave_out(job, seat.worker)

    def _leave_out(self, job: Job, name: str) -> None:
        self.left_out.add((job.epoch, name))

    def _replaced(self, before: Job, job: Job, event: e.Input) -> None:
        assert before.plan is not None
        for rank, life in job.lives.items():
            former = before.lives.get(rank, 0)
            if life == former:
                continue
            require(life > former, f"rank {rank} goes from life {former} to {life}")
            member = next((m for m in before.plan.members if m.first_rank <= rank < m.first_rank + m.slots), None)
            if member is None:  # a new place
                continue
            name = seats.name(member.node, rank - member.first_rank, former)
            session = self.cluster.rounds.sessions.get((before.epoch, name))
            if session is not None and session.worker.can_step and not _hung(event, session.worker):
                seen = sees(job, session.worker) and not _stopping(job, session.worker)
                seen = seen and not _yields(before, job, name) and not self._raised_again(before, name)
                seen = seen and not _may_hang_in_its_warm_up(before, event, name)
                require(not seen, f"{name} is healthy and gets a next life: {event}")

    def _raised_again(self, job: Job, name: str) -> bool:
        session = self.cluster.rounds.session(job.epoch, name)
        return bool(session.failure) and name.partition("#")[0] in self.raised

    def _vacated(self, job: Job) -> None:
        """Whoever has to be replaced is, also who came to the end of the script just before."""
        for name in job.vacant:
            left = self.cluster.rounds.session(job.epoch, name).stage is Session.LEFT
            require(
                left or self._life(job, name) > seats.place(name)[2], f"{name} is waited for, and nobody follows it"
            )

    def _evicted(self, before: Job, job: Job, event: e.Input) -> None:
        """Nobody whom the controller sees is known to hold the state, or it is not known who hangs, or all leave."""
        assert before.formation is not None
        members = [seat.worker for seat in before.formation.seats]  # who was yet to leave may have missed steps
        living = [self.cluster.rounds.session(before.epoch, name) for name in members]
        living = [s for s in living if s.worker.name in self._founders(before) or _reported(job, s.worker) >= 0]
        living = [s for s in living if s.worker.can_step and s.stage is not Session.LEFT]
        living = [s for s in living if s.worker.life == self._life(before, s.worker.name)]  # the others are fenced
        living = [s for s in living if sees(job, s.worker) and not _stopping(before, s.worker)]
        living = [s for s in living if s.member.stand.committed >= 0 and not _hung(event, s.worker)]
        living = [s for s in living if not (s.failure and self._raised_again(before, s.worker.name))]
        waited_s = self.cluster.clock.now_s - (before.short_since_s or self.cluster.clock.now_s)
        if self.cluster.fixed and waited_s >= before.spec.join_timeout_s:
            return
        if all(seats.leaving(job, s.worker.name) for s in living):
            return
        if any(all(former.role_of(s.worker.name) is None for s in living) for former in job.superseded):
            return  # they may have missed steps of those who were in it
        unknown = isinstance(event, e.HangJudged) and not any(c.rank >= 0 for c in event.verdict.culprits)
        require(unknown or not living, f"evicted, though {[s.worker.name for s in living]} hold the state")

    def _founders(self, job: Job) -> set[str]:
        """Members of the first formation. Nothing is committed without those who still are."""
        return {seat.worker for seat in self.issued[job.epoch][0].seats}

    # What is true ---------------------------------------------------------------------------------------

    def _life(self, job: Job, name: str) -> int:
        assert job.plan is not None
        rank = seats.rank_of(job.plan, name)
        return job.lives.get(rank, 0) if rank is not None else seats.place(name)[2] + 1

    def _alive(self, plan_epoch: int, name: str) -> bool:
        return self.cluster.rounds.session(plan_epoch, name).worker.can_step

    def can_commit(self, plan_epoch: int, formation: Formation) -> bool:
        """Every member of it lives, and is in it or on its way."""
        for seat in formation.seats:
            session = self.cluster.rounds.session(plan_epoch, seat.worker)
            member = session.member
            here = commit.acts_in(member, formation.epoch) or formation in (member.entering, member.planned)
            if not session.worker.can_step or member.phase in commit.FINAL or not here:
                return False
        return True

    def any_can_commit(self, plan_epoch: int) -> bool:
        return any(self.can_commit(plan_epoch, formation) for formation in self.issued.get(plan_epoch, ()))

    def runs(self, job: Job) -> str:
        """Why the job, left alone, does not yet run as it should; empty: it does."""
        formation = job.formation
        if formation is None:
            return "no formation"
        if job.stage is not Stage.RUNNING:
            return f"it is {job.stage.value}"
        for seat in formation.seats:
            session = self.cluster.rounds.session(job.epoch, seat.worker)
            member = session.member
            if not session.worker.can_step or session.worker.hung or not commit.acts_in(member, formation.epoch):
                return f"{seat.worker} is not in formation {formation.epoch}"
            if member.phase not in ACTING or session.completed or session.failure:
                return f"{seat.worker} is {member.phase.value} {session.failure}"
            if member.stand.rollbacks != job.rollbacks:
                return f"{seat.worker} knows of {member.stand.rollbacks}, the controller of {job.rollbacks}"
        return self._places(job, formation)

    def _places(self, job: Job, formation: Formation) -> str:
        here = [node.report for node in job.nodes.values()]
        leaving = [report.node for report in here if report.leaving]
        if leaving:
            return f"{leaving} are yet to leave"
        present = seats.present(job)
        for report in here:
            for local_rank in range(report.slots):
                found = [n for n in present if seats.place(n)[:2] == (report.node, local_rank)]
                if not found or not self._alive(job.epoch, found[0]):
                    return f"no worker at {report.node}/{local_rank}"
        slots = max(report.slots for report in here)
        wanted = min(job.spec.max_nodes, len(here)) * slots
        if self.cluster.fixed:
            wanted = len(self.issued[job.epoch][0].seats)
        if len(formation.seats) != wanted:
            return f"{len(formation.seats)} seats of {wanted}"
        return "" if job.incident is None else f"{job.incident.id} is open"


def sees(job: Job, worker: SimWorker) -> bool:
    """Whether the controller counts the worker's node as here, with this process in its place."""
    node = job.nodes.get(worker.agent.name)
    member = job.plan.member(worker.agent.name) if job.plan else None
    incarnation = worker.agent.node.report.incarnation
    return (
        node is not None
        and member is not None
        and node.report.incarnation == member.incarnation == incarnation
        and node.report.epoch == worker.epoch == job.epoch
    )


def _reported(job: Job, worker: SimWorker) -> int:
    """Steps that the controller knows it has; -1: none, as far as is known."""
    node = job.nodes.get(worker.agent.name)
    said = [w.session for w in node.report.workers if w.session is not None] if node is not None else []
    return next((s.committed for s in said if s.worker == worker.name), -1)


def _heard(job: Job, session: SimSession) -> bool:
    """Whether the controller knows what the session's function raised."""
    node = job.nodes.get(session.worker.agent.name)
    said = [w.session for w in node.report.workers if w.session is not None] if node is not None else []
    return any(s.worker == session.worker.name and s.failure and s.epoch == session.entered for s in said)


def _stopping(job: Job, worker: SimWorker) -> bool:
    """It was told to stop what it runs: it had been lost, or leaves."""
    node = job.nodes.get(worker.agent.name)
    return node is not None and node.stop_by_s > 0.0


def _holders(job: Job) -> list[str]:
    """Members, and who is yet to leave."""
    assert job.formation is not None
    both = (*job.formation.seats, *(job.before.seats if job.before is not None else ()))
    return list(dict.fromkeys(seat.worker for seat in both))


def _withdrawn(before: Job, job: Job) -> bool:
    return job.formation is not None and job.formation is not before.formation and job.formation.abort


def _yields(before: Job, job: Job, name: str) -> bool:
    """It was about to leave, and its follower goes on without it: the change was withdrawn."""
    if before.before is None or before.formation is None or not _withdrawn(before, job):
        return False
    return job.fixed and before.before.role_of(name) is not None and before.formation.role_of(name) is None


def _may_hang_in_its_warm_up(job: Job, event: e.Input, name: str) -> bool:
    """The detector cannot tell which of those that roles wait for it is."""
    unnamed = isinstance(event, e.HangJudged) and not event.verdict.culprits
    return unnamed and bool(job.vacant) and job.formation is not None and job.formation.role_of(name) is None


def _hung(event: e.Input, worker: SimWorker) -> bool:
    judged = isinstance(event, e.HangJudged) and any(c.rank == worker.rank for c in event.verdict.culprits)
    return judged and worker.hung

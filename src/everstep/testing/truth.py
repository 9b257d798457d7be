"""What is true in a simulated cluster, whatever the machines believe, and the invariants that compare the two.

1. At most one epoch can make a step: all workers of an epoch are needed for one, and no epoch is whole once a newer
   one was launched. A new epoch is dealt only when no node that is here still runs an older one.
2. Epochs only grow, and each has one plan everywhere.
3. A plan's ranks are 0..world-1, its members distinct and as many as allowed, and who stays keeps its group rank.
4. A node never runs workers of two epochs.
5. Restarts stay in their budget and are counted for workers, not for nodes; who is said to have ended has; a job is
   finished only if all workers of one epoch exited 0, or all members of its last formation came to their end.
6. A replay of the journal gives the same job.
8. A repeated message changes nothing. (7, liveness, is the schedule's business.)
9. Processes are killed by their node alone when they are replaced; a place never has two. What holds for formations is
   in testing.formations.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from everstep.control import lifecycle
from everstep.control import node as n
from everstep.control.job import ENDED, Job, Stage
from everstep.core import events as e
from everstep.core.types import Activity, Directive, EpochPlan, ExitCause, Member
from everstep.detect.blame import LATE_S
from everstep.testing.claims import require
from everstep.testing.formations import Formations, sees
from everstep.testing.sessions import COLLATERAL, SimSession

if TYPE_CHECKING:
    from everstep.testing.actors import SimAgent
    from everstep.testing.cluster import Cluster
    from everstep.testing.workers import SimWorker


class Truth:
    """Told of every change of a machine or a process; raises Violation."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.formations = Formations(cluster)
        self.plans: dict[int, list[EpochPlan]] = {}  # by epoch: as it was dealt, and amended
        self.launched_epoch = 0
        self.steppable: Counter[int] = Counter()
        self.ended_ok: Counter[int] = Counter()
        self.failed: set[int] = set()  # epochs of which a worker failed by itself
        self.faults = 0  # ends that a worker can be blamed for, and hangs
        self.over: set[tuple[int, int, int]] = set()  # (epoch, rank, life) of workers that make no more steps
        self.names: set[tuple[int, str]] = set()  # epoch and name of every worker there was
        self.alive: dict[str, list[SimWorker]] = {}  # by node name, whichever agent's

    # Processes ------------------------------------------------------------------------------------------

    def alive_of(self, epoch: int) -> list[SimWorker]:
        return [w for workers in self.alive.values() for w in workers if w.epoch == epoch]

    def any_alive(self) -> bool:
        return any(self.alive.values())

    def whole(self, epoch: int) -> bool:
        """Whether it can make a step."""
        if self.cluster.with_sessions:
            return self.formations.any_can_commit(epoch)
        return epoch in self.plans and self.steppable[epoch] == self.plans[epoch][-1].world_size

    def born(self, worker: SimWorker) -> None:
        known = (worker.epoch, worker.name)
        require(known not in self.names, f"a second worker is called {worker.name} in epoch {worker.epoch}")
        self.names.add(known)
        if worker.session is not None:
            self.cluster.rounds.sessions[known] = worker.session

    def launched(self, agent: SimAgent, plan: EpochPlan) -> None:
        require(
            plan in self.plans.get(plan.epoch, ()), f"{agent.name} launches a plan of epoch {plan.epoch} never dealt"
        )
        left = [w.epoch for w in self.alive.get(agent.name, ()) if not w.dead]
        require(not left, f"{agent.name} launches epoch {plan.epoch} while it runs workers of {left}")
        self.launched_epoch = max(self.launched_epoch, plan.epoch)
        for epoch in self.plans:
            if epoch < self.launched_epoch:
                require(not self.whole(epoch), f"epoch {epoch} can step while {self.launched_epoch} is launched")

    def started(self, worker: SimWorker) -> bool:
        """Whether its epoch, of a job without sessions, is whole now."""
        epoch = worker.epoch
        self.steppable[epoch] += 1
        self.alive.setdefault(worker.agent.name, []).append(worker)
        whole = not self.cluster.with_sessions and self.whole(epoch)
        if whole:
            require(epoch == self.launched_epoch, f"epoch {epoch} is whole, but {self.launched_epoch} was launched")
        return whole

    def broken(self, worker: SimWorker) -> None:
        self.steppable[worker.epoch] -= 1
        if worker.failure is not None and worker.failure.failed:
            self.failed.add(worker.epoch)
            self.faults += 1
        self.over.add((worker.epoch, worker.rank, worker.life))

    def ended(self, worker: SimWorker, cause: ExitCause) -> None:
        if worker in self.alive.get(worker.agent.name, ()):
            self.alive[worker.agent.name].remove(worker)
        if cause is ExitCause.OK:
            self.ended_ok[worker.epoch] += 1
        elif cause not in (ExitCause.STOPPED, ExitCause.GRACE):
            self.failed.add(worker.epoch)
            self.faults += worker.failure is None
        self.over.add((worker.epoch, worker.rank, worker.life))

    def raised(self, session: SimSession) -> None:
        """A function raised in a process that lives."""
        if session.failure != COLLATERAL:
            self.faults += 1
            self.failed.add(session.worker.epoch)
            self.cluster.break_collectives(session.worker)

    def quits(self, agent: SimAgent) -> None:
        left = [w for w in agent.workers if not w.dead]
        require(not left, f"{agent.name} quits and leaves workers behind")

    def signalled(self, agent: SimAgent, local_ranks: tuple[int, ...]) -> None:
        node = agent.node
        if node.report.activity is not Activity.RUNNING:
            return  # its part of the epoch is over
        for local_rank in local_ranks:
            worker = agent.workers[local_rank]
            wanted = node.directive.lives[local_rank] if local_rank < len(node.directive.lives) else 0
            require(wanted > worker.life, f"{worker.name} is killed, and nobody wants it replaced")

    def respawned(self, former: SimWorker, plan: EpochPlan) -> None:
        require(former.dead and former.reaped, f"{former.name} is replaced while it lives")
        require(former.epoch == plan.epoch, f"{former.name} is replaced by a worker of epoch {plan.epoch}")
        require(not former.agent.node.report.leaving, f"{former.name} is replaced on a node that leaves")

    # The nodes' machines --------------------------------------------------------------------------------

    def node_changed(self, before: n.Node, node: n.Node) -> None:
        old, new = before.report, node.report
        if new is not old and new != old:
            require(new.seq > old.seq, f"{new.node} changed its report and kept its number")
            require(new.epoch >= old.epoch, f"{new.node} went from epoch {old.epoch} back to {new.epoch}")

    def repeat_directive(self, agent: SimAgent, directive: Directive) -> None:
        node, commands = n.step(agent.node, n.Directed(directive), agent.now())
        require(node == agent.node and not commands, f"{agent.name} acts on a repeated directive: {commands}")

    # The job's machine ----------------------------------------------------------------------------------

    def repeat_input(self, job: Job, event: e.Input) -> None:
        again, commands = lifecycle.step(job, event, self.cluster.clock.now_s)
        require(again == job and not commands, f"a repeated {type(event).__name__} has an effect: {commands}")

    def same_job(self, job: Job, replayed: Job) -> None:
        require(job == replayed, f"replay differs: {replayed} instead of {job}")

    def job_changed(self, before: Job, job: Job, event: e.Input) -> None:
        require(before.stage not in ENDED or before.stage is job.stage, f"an ended job went on: {job.stage}")
        require(job.restarts <= job.spec.max_restarts, f"{job.restarts} restarts")
        if job.restarts != before.restarts:
            self._counted(before, job, event)
        if job.ended is not before.ended and job.epoch == before.epoch:
            new = [rank for rank, end in job.ended.items() if before.ended.get(rank) is not end]
            wrong = [rank for rank in new if (job.epoch, rank, job.lives.get(rank, 0)) not in self.over]
            require(not wrong, f"ranks {wrong} of epoch {job.epoch} have not ended")
        if job.epoch != before.epoch:
            self._dealt(before, job)
        elif job.plan is not before.plan:
            self._amended(before, job)
        if job.incidents > before.incidents and job.incident is not None and job.incident.kind == "exception":
            require(job.restarts > before.restarts or job.stage in ENDED, f"{job.incident.why} is not counted")
        self.formations.job_changed(before, job, event)
        if job.stage is Stage.FINISHED and before.stage is not Stage.FINISHED:
            self._finished(job)
        if isinstance(event, e.ControllerStarted | e.StopAsked):
            return
        if self.cluster.rng.random() < 0.02:
            self.repeat_input(job, e.Ticked())

    def _finished(self, job: Job) -> None:
        assert job.plan is not None
        if job.formation is not None:
            sessions = [self.cluster.rounds.session(job.epoch, seat.worker) for seat in job.formation.seats]
            # A newcomer whose node did not stop it in time is not waited for: it holds nothing.
            runs = [s for s in sessions if not s.worker.dead and sees(job, s.worker)]
            early = [s.worker.name for s in sessions if (s.made and not s.completed) or s in runs]
            require(not early, f"finished, but {early} did not come to their end")
            require(any(s.completed for s in sessions), "finished, but nobody came to the end")
            require(not self.formations.any_can_commit(job.epoch), "finished, but a formation can still commit")
            return
        whole = self.ended_ok[job.epoch] == job.plan.world_size
        require(whole, f"finished, but only {self.ended_ok[job.epoch]} workers of epoch {job.epoch} exited 0")

    def _amended(self, before: Job, job: Job) -> None:
        """A node got a place; nobody who is here lost theirs, and nobody's ranks moved."""
        old, new = before.plan, job.plan
        assert old is not None and new is not None
        require(job.formation is not None, f"the plan of epoch {new.epoch} changed")
        require(old.master_addr == new.master_addr and old.master_port == new.master_port, "the store moved")
        require(len({m.node for m in new.members}) == len(new.members), f"members {[m.node for m in new.members]}")
        first = 0
        for k, member in enumerate(new.members):
            require(member.group_rank == k and member.first_rank == first, f"ranks of {member.node}")
            first += member.slots
            former = old.members[k] if k < len(old.members) else None
            if former != member:
                self._fit(member, job)
                node = job.nodes.get(former.node) if former is not None else None
                here = former is not None and node is not None and node.report.incarnation == former.incarnation
                require(not here, f"{former and former.node} lost its place to {member.node}")
        require(new.world_size == first and len(new.members) >= len(old.members), f"world size {new.world_size}")
        self.plans[new.epoch].append(new)

    def _counted(self, before: Job, job: Job, event: e.Input) -> None:
        require(job.restarts == before.restarts + 1, "restarts counted twice")
        hang = before.incident is not None and before.incident.kind == "hang"
        hang = hang or isinstance(event, e.HangJudged)
        self._collateral(before, job)
        require(hang or before.epoch in self.failed, "a restart is counted although no worker failed")
        require(job.restarts <= self.faults, f"{job.restarts} restarts are counted for {self.faults} faults")

    def _collateral(self, before: Job, job: Job) -> None:
        """What raised because a peer died is counted only where nothing was heard of that death in time."""
        incident = job.incident if job.incident is not before.incident else None
        if incident is None or incident.kind != "exception" or incident.culprits[0].detail != COLLATERAL:
            return
        failed = [s for s in self.cluster.rounds.sessions.values() if s.failure == COLLATERAL and not s.worker.dead]
        since_s = min((s.failed_s for s in failed), default=0.0)
        late = self.cluster.clock.now_s >= since_s + LATE_S
        require(late, f"collateral is counted: {incident.why}")
        self.faults += 1
        self.failed.add(job.epoch)

    def _dealt(self, before: Job, job: Job) -> None:
        plan = job.plan
        assert plan is not None
        require(plan.epoch == job.epoch == before.epoch + 1, f"epoch {before.epoch} is followed by {job.epoch}")
        require(plan.epoch not in self.plans, f"epoch {plan.epoch} is used twice")
        self.plans[plan.epoch] = [plan]
        spec, names = job.spec, [m.node for m in plan.members]
        require(spec.min_nodes <= len(names) <= spec.max_nodes, f"{len(names)} members")
        require(len(set(names)) == len(names), f"members {names}")
        require([m.group_rank for m in plan.members] == list(range(len(names))), "group ranks")
        first = 0
        for member in plan.members:
            require(member.first_rank == first, f"ranks of {member.node} begin at {member.first_rank}, not {first}")
            first += member.slots
            self._fit(member, job)
        require(plan.world_size == first, f"world size {plan.world_size} of {first} ranks")
        if before.plan is not None:
            self._stayers_keep_ranks(before.plan, plan)
        self._nobody_left(job)

    def _fit(self, member: Member, job: Job) -> None:
        node = job.nodes.get(member.node)
        require(node is not None and node.report.incarnation == member.incarnation, f"{member.node} is not here")

    def _stayers_keep_ranks(self, old: EpochPlan, new: EpochPlan) -> None:
        for member in new.members:
            former = old.member(member.node)
            if former is not None and former.group_rank < len(new.members):
                moved = f"{member.node} moved from group rank {former.group_rank} to {member.group_rank}"
                require(member.group_rank == former.group_rank, moved)

    def _nobody_left(self, job: Job) -> None:
        """Who still runs workers is cut off (or dead): no node that the controller sees runs any."""
        for name, workers in self.alive.items():
            node = job.nodes.get(name)
            if workers and node is not None:
                same = any(w.agent.node.report.incarnation == node.report.incarnation for w in workers)
                require(not same, f"epoch {job.epoch} is dealt while {name}, which is here, runs {workers[0].epoch}")

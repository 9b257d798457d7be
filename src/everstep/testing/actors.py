"""Simulated agents and workers: they carry out what control.node decides, as the real shells do, on a virtual clock.

A worker takes time to start, to fail and to die. Some handle SIGTERM and take their time, some ignore it.
"""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING

import msgspec

from everstep.control import node as n
from everstep.core.types import Activity, Directive, EpochPlan, Exit, ExitCause, NodeReport
from everstep.testing import trace
from everstep.testing.network import DOWN, UP, Connection, Message

if TYPE_CHECKING:
    from everstep.testing.cluster import Cluster

ORPHANS_S = 2.0  # a dead agent's workers are gone by then
REFRESH_S = 5.0  # an agent repeats its newest report this often
TICK_S = 0.1


class SimWorker:
    """One process. It can step from `started` until it failed or died."""

    __slots__ = (
        "agent",
        "dead",
        "epoch",
        "failed",
        "failure",
        "hung",
        "judged",
        "local_rank",
        "manner",
        "rank",
        "started",
        "step",
        "termed",
    )

    def __init__(self, agent: SimAgent, plan: EpochPlan, local_rank: int) -> None:
        self.agent = agent
        self.epoch = plan.epoch
        self.local_rank = local_rank
        self.rank = plan.rank(agent.name, local_rank)
        self.failure: Exit | None = None
        self.started = self.failed = self.dead = self.hung = self.judged = self.termed = False
        rng = agent.cluster.rng
        self.manner = rng.choices(("default", "handles", "ignores"), (6, 3, 1))[0]
        self.step = 7 if agent.cluster.one_bug else rng.randrange(1_000_000)  # where it is when it ends
        slow = rng.random() < 0.15
        agent.cluster.clock.after(rng.uniform(0.02, 5.0 if slow else 0.2), self.start)

    @property
    def can_step(self) -> bool:
        return self.started and not self.failed and not self.dead

    def start(self) -> None:
        if self.dead or not self.agent.alive:
            return
        self.started = True
        self.agent.cluster.started(self)
        self.agent.feed(n.WorkerStarted(self.epoch, self.local_rank, 1000 + self.rank))

    def signal(self, signum: int) -> None:
        """A process that is not forked yet cannot be signalled."""
        if self.dead or not self.started:
            return
        rng, plan = self.agent.cluster.rng, self.agent.cluster.clock.after
        if signum == signal.SIGKILL:
            self.judged = not self.agent.node.killed
            plan(rng.uniform(0.001, 0.03), self.die, ExitCause.SIGNAL if self.judged else ExitCause.GRACE, 9)
        elif not self.hung and not self.termed:
            self.termed = True
            if self.manner == "default":
                plan(rng.uniform(0.001, 0.05), self.die, ExitCause.STOPPED, 15)
            elif self.manner == "handles":
                plan(rng.uniform(0.1, 1.5 * self.agent.cluster.spec.grace_s), self.die, ExitCause.STOPPED, 0)

    def interrupt(self) -> None:
        """Its collective raised: an error escapes the script, unless the script is hung elsewhere."""
        if self.can_step and not self.hung:
            self.fail("connection closed by peer")

    def fail(self, message: str) -> None:
        """An error escaped the script; the process takes a moment to end."""
        if not self.can_step:
            return
        self.failed = True
        cause = ExitCause.STOPPED if self.termed else ExitCause.ERROR
        self.failure = Exit(cause, self.agent.now(), message=message, step=self.step)
        self.agent.cluster.broken(self)
        self.agent.feed(n.WorkerFailed(self.epoch, self.local_rank, self.failure))
        self.agent.cluster.clock.after(self.agent.cluster.rng.uniform(0.005, 0.3), self.die, cause, 1)

    def die(self, cause: ExitCause, status: int) -> None:
        """`status`: a signal's number or an exit status, as the cause has it."""
        if self.dead:
            return
        could_step, self.dead = self.can_step, True
        cluster = self.agent.cluster
        cluster.ended(self, cause, could_step)
        killed = cause in (ExitCause.SIGNAL, ExitCause.GRACE)
        code, signum = (None, status) if killed else (status, None)
        exit = Exit(cause, self.agent.now(), code=code, signal=signum, step=self.step)
        if self.failure is not None:  # the error came first; a signal of ours only shortened its end
            exit = msgspec.structs.replace(self.failure, code=code, signal=signum)
        cluster.clock.after(
            cluster.rng.uniform(0.001, 0.01), self.agent.feed, n.WorkerGone(self.epoch, self.local_rank, exit)
        )


class SimAgent:
    """One agent process and its workers."""

    def __init__(self, cluster: Cluster, name: str, life: int, slots: int) -> None:
        self.cluster = cluster
        self.name = name
        self.skew_s = cluster.rng.uniform(-60.0, 60.0)
        self.alive = True
        self.slots = slots
        self.workers: list[SimWorker] = []
        self.connection: Connection | None = None
        self.connecting = False
        self.sweeping = 0
        self.tick_due_s = math.inf
        self.refresh_due = False
        report = NodeReport(name, f"{name}.{life}", 1, self.now(), slots, f"10.0.0.{name[1:]}", 20_000)
        self.node = n.Node(report, fence_s=cluster.spec.fence_s)
        self.connect_soon(0.3)

    def now(self) -> float:
        return self.cluster.clock.now_s + self.skew_s

    # The machine ----------------------------------------------------------------------------------------

    def feed(self, event: n.NodeEvent) -> None:
        if not self.alive:
            return
        before = self.node
        self.node, commands = n.step(before, event, self.now())
        if self.cluster.tracing and (commands or not isinstance(event, n.Ticked)):
            self.cluster.trace(f"{self.name}: {trace.felt(event)} -> {trace.done(commands)}")
        self.cluster.truth.node_changed(before, self.node)
        for command in commands:
            self._carry_out(command)
        self._plan_tick()

    def _carry_out(self, command: n.Command) -> None:
        rng, plan = self.cluster.rng, self.cluster.clock.after
        match command:
            case n.Launch(epoch_plan):
                self.cluster.truth.launched(self, epoch_plan)
                self.workers = [SimWorker(self, epoch_plan, local_rank) for local_rank in range(self.slots)]
            case n.SignalWorkers(local_ranks, signum):
                for local_rank in local_ranks:
                    self.workers[local_rank].signal(signum)
            case n.CutSockets(local_ranks):
                for local_rank in local_ranks:
                    plan(rng.uniform(0.001, 0.1), self.workers[local_rank].interrupt)
            case n.StopAtStep(local_ranks, _):
                for local_rank in local_ranks:
                    plan(rng.uniform(0.1, 1.0), self.workers[local_rank].signal, signal.SIGTERM)
            case n.Sweep(epoch):
                if self.sweeping != epoch:
                    self.sweeping = epoch
                    plan(rng.uniform(0.005, 0.1), self._swept, epoch)
            case n.Report(report):
                self.send(report)
            case n.Quit():
                self.quit()

    def _swept(self, epoch: int) -> None:
        self.sweeping = 0
        self.feed(n.Swept(epoch))

    def _plan_tick(self) -> None:
        """The real shell ticks ten times a second; here only ticks at which something is due are simulated."""
        node, due = self.node, math.inf
        if node.report.activity is Activity.STOPPING:
            due = node.term_by_s or math.inf
            if not node.killed:
                due = min(due, node.stop_by_s)
        busy = node.report.activity in (Activity.RUNNING, Activity.STOPPING)
        if busy and node.silent_since_s and not node.killed:
            due = min(due, node.silent_since_s + node.fence_after_s)
        due -= self.skew_s
        if due < self.tick_due_s and self.alive:
            self.tick_due_s = due
            late = self.cluster.rng.uniform(0.01, TICK_S)
            self.cluster.clock.at(max(due, self.cluster.clock.now_s) + late, self._tick, due)

    def _tick(self, due_s: float) -> None:
        if due_s == self.tick_due_s:
            self.tick_due_s = math.inf
            self.feed(n.Ticked())

    # The link -------------------------------------------------------------------------------------------

    def send(self, report: NodeReport) -> None:
        if (
            self.connection is not None
            and not self.connection.send(UP, msgspec.structs.replace(report, sent_s=self.now()))
            and not self.refresh_due
        ):
            self.refresh_due = True
            self.cluster.clock.after(REFRESH_S, self._refresh)

    def _refresh(self) -> None:
        self.refresh_due = False
        if self.alive:
            self.send(self.node.report)

    def connect_soon(self, within_s: float) -> None:
        if not self.connecting:
            self.connecting = True
            self.cluster.clock.after(self.cluster.rng.uniform(0.02, within_s), self._connect)

    def _connect(self) -> None:
        """When it fails, the cluster wakes us once it can succeed: back-off without the attempts in vain."""
        self.connecting = False
        if not self.alive or self.connection is not None:
            return
        self.connection = self.cluster.connect(self)
        if self.connection is not None:
            self.feed(n.LinkChanged(True))

    def receive(self, connection: Connection, message: Message) -> None:
        if connection is self.connection and isinstance(message, Directive) and self.alive:
            known = self.node.directive
            if (message.term, message.seq) == (known.term, known.seq):
                self.send(self.node.report)
            self.feed(n.Directed(message))
            if self.cluster.rng.random() < 0.05:
                self.cluster.truth.repeat_directive(self, message)

    def lost(self, connection: Connection) -> None:
        if connection is not self.connection or not self.alive:
            return
        self.connection = None
        connection.close(DOWN)
        self.feed(n.LinkChanged(False))
        self.connect_soon(0.8)

    def lease_over(self, cut_s: float, connection: Connection) -> None:
        if connection is self.connection and self.cluster.wires[self.name].cut_s[DOWN] == cut_s:
            self.lost(connection)

    # Its end --------------------------------------------------------------------------------------------

    def quit(self) -> None:
        if self.alive:
            self.cluster.truth.quits(self)
            self._end()

    def die(self) -> None:
        """SIGKILL: its workers follow within ORPHANS_S, the kernel closes its connection."""
        self._end()
        for worker in self.workers:
            delay = self.cluster.rng.uniform(0.0, 0.05 if self.cluster.rng.random() < 0.7 else ORPHANS_S)
            self.cluster.clock.after(delay, worker.die, ExitCause.SIGNAL, 9)

    def purge(self) -> None:
        """What a new agent of this name does first: nothing of the old one may be left."""
        for worker in self.workers:
            worker.die(ExitCause.SIGNAL, 9)

    def _end(self) -> None:
        self.alive = False
        if self.connection is not None:
            self.connection.close(DOWN)
            self.connection = None

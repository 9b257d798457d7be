"""Simulated agents: they carry out what control.node decides, as the real shell does, on a virtual clock."""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING

import msgspec

from everstep.control import node as n
from everstep.control.urgency import MERGE_S
from everstep.core.formation import Formation, SessionReport
from everstep.core.types import Activity, Directive, Exit, ExitCause, NodeReport
from everstep.testing import trace
from everstep.testing.network import DOWN, UP, Connection, Message
from everstep.testing.workers import SimWorker

if TYPE_CHECKING:
    from everstep.testing.cluster import Cluster

ORPHANS_S = 2.0  # a dead agent's workers are gone by then
REFRESH_S = 5.0  # an agent repeats its newest report this often
TICK_S = 0.1


class SimAgent:
    """One agent process and its workers."""

    def __init__(self, cluster: Cluster, name: str, life: int, slots: int) -> None:
        self.cluster = cluster
        self.name = name
        self.skew_s = cluster.rng.uniform(-60.0, 60.0)
        self.alive = True
        self.slots = slots
        self.workers: list[SimWorker] = []
        self.formation: Formation | None = None  # what sessions are told
        self.connection: Connection | None = None
        self.connecting = False
        self.sweeping = 0
        self.tick_due_s = math.inf
        self.refresh_due = False
        self.held_s = 0.0  # when the report is sent that may wait for later changes; 0: there is none
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
                workers = self.node.report.workers
                self.formation = self.node.directive.formation
                self.workers = [SimWorker(self, epoch_plan, w.local_rank, w.life) for w in workers]
            case n.Respawn(local_rank, life):
                self._respawn(local_rank, life)
            case n.Tell(formation):
                self.formation = formation
                for worker in self.workers:
                    if worker.session is not None and worker.session.speaks:
                        worker.session.hear(formation)
            case n.SignalWorkers(local_ranks, signum):
                self.cluster.truth.signalled(self, local_ranks)
                for local_rank in local_ranks:
                    self.workers[local_rank].signal(signum)
            case n.CutSockets(local_ranks, late) if not late:
                for local_rank in local_ranks:
                    plan(rng.uniform(0.001, 0.1), self.workers[local_rank].interrupt)
            case n.StopAtStep(local_ranks, _):
                for local_rank in local_ranks:
                    plan(rng.uniform(0.1, 1.0), self.workers[local_rank].signal, signal.SIGTERM)
            case n.Examine(number):
                plan(rng.uniform(0.1, 1.0), self._examined, number)
            case n.Sweep(epoch):
                if self.sweeping != epoch:
                    self.sweeping = epoch
                    plan(rng.uniform(0.005, 0.1), self._swept, epoch)
            case n.Report(report, soon):
                self._send_soon() if soon else self.send(report)
            case n.Quit():
                self.quit()

    def _respawn(self, local_rank: int, life: int) -> None:
        plan, former = self.node.plan, self.workers[local_rank]
        assert plan is not None
        self.cluster.truth.respawned(former, plan)
        self.workers[local_rank] = SimWorker(self, plan, local_rank, life)

    def reap(self, worker: SimWorker, exit: Exit) -> None:
        worker.reaped = True
        self.feed(n.WorkerGone(worker.epoch, worker.local_rank, exit))

    def spoke(self, worker: SimWorker, report: SessionReport) -> None:
        """A session's report. What it said last is lost when its process is reaped first."""
        session = worker.session
        if worker.reaped or session is None or not self.alive:
            return
        if not session.speaks and self.formation is not None:
            session.hear(self.formation)
        session.speaks = True
        self.feed(n.SessionSpoke(worker.epoch, worker.local_rank, report))

    def _examined(self, number: int) -> None:
        if self.alive and number > self.node.report.examined:  # a real node makes one after another
            self.feed(n.Examined(number))

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

    def _send_soon(self) -> None:
        if not self.held_s:
            self.held_s = self.cluster.clock.now_s + MERGE_S
            self.cluster.clock.at(self.held_s, self._send_held, self.held_s)

    def _send_held(self, held_s: float) -> None:
        if self.alive and held_s == self.held_s > 0.0:
            self.send(self.node.report)

    def send(self, report: NodeReport) -> None:
        self.held_s = 0.0
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
            self._send_held(self.held_s)
            self._end()

    def die(self) -> None:
        """SIGKILL: its workers follow within ORPHANS_S, the kernel closes its connection."""
        self._end()
        self.cluster.vaults.lose(self.name)
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

"""A whole simulated job: one controller with its journal, its nodes, the wires between them, and their faults.

The controller's shell does what the real one does: it journals an input before it acts on it, repeats directives
that are not followed, ends leases, and is replayed from its journal when it restarts.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

from everstep.control import lifecycle
from everstep.control.following import followed
from everstep.control.job import ACTIVE, ENDED, WAITING, Direct, Job, Stage
from everstep.core import events as e
from everstep.core.types import Blame, Directive, ExitCause, JobSpec, NodeLoss, NodeReport, Verdict
from everstep.core.virtual import VirtualClock
from everstep.detect.blame import LATE_S
from everstep.testing import trace
from everstep.testing.actors import SimAgent
from everstep.testing.network import DOWN, UP, Connection, Message, Wire
from everstep.testing.rounds import Rounds
from everstep.testing.sessions import COLLATERAL
from everstep.testing.truth import Truth
from everstep.testing.vaults import Vaults
from everstep.testing.workers import SimWorker

RESEND_S = 1.0
TICK_S = 0.1


class SimController:
    """Lives of the controller. Between a crash and a restart `up` is False and nothing is heard."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.up = True
        self.dies_acting = False  # crash after the next journalled input, before its commands are carried out
        self.term = 1
        self.job = Job(cluster.spec)
        self.journal: list[tuple[float, e.Input]] = []
        self.read = self.job  # from the journal alone, up to its entry `num_read`
        self.num_read = 0
        self.links: dict[str, Connection] = {}
        self.resending: set[str] = set()
        self.unsent: set[str] = set()  # nodes whose newest directive the network lost
        self.tick_due_s = math.inf
        self.feed(e.JobSubmitted(cluster.spec))
        self.feed(e.ControllerStarted(1))

    # The machine ----------------------------------------------------------------------------------------

    def feed(self, event: e.Input) -> None:
        now, before = self.cluster.clock.now_s, self.job
        job, commands = lifecycle.step(before, event, now)
        if not commands and (job is before or job == before):
            self._plan_tick()
            return
        self.journal.append((now, event))
        if self.cluster.tracing:
            self.cluster.trace(f"controller: {trace.heard(event)} -> {trace.acted(job, commands)}")
        self.job = job
        self.cluster.truth.job_changed(before, job, event)
        if self.dies_acting:
            self.crash()
            return
        for command in commands:
            if isinstance(command, Direct):
                self._send(command.node, command.directive)
            else:
                if isinstance(command.record, e.NodeLost):
                    self._close(command.record)
                if self.cluster.listener is not None:
                    self.cluster.listener(now, command.record)
        if job.stage is not before.stage:
            self.cluster.clock.after(TICK_S, self._tick, 0.0)  # rules that the new stage brings
        self._plan_tick()

    def replayed(self) -> Job:
        """The fold over the journal; each entry is read once, however often this is asked."""
        for now, event in self.journal[self.num_read :]:
            self.read, _ = lifecycle.step(self.read, event, now)
        self.num_read = len(self.journal)
        return self.read

    def _plan_tick(self) -> None:
        """The real shell ticks ten times a second; here only ticks at which something is due are simulated."""
        due = next_deadline(self.job, self.cluster.clock.now_s)
        if due < self.tick_due_s:
            self.tick_due_s = due
            self.cluster.clock.at(due + self.cluster.rng.uniform(0.01, TICK_S), self._tick, due)

    def _tick(self, due_s: float) -> None:
        if not self.up or due_s not in (0.0, self.tick_due_s):
            return
        if due_s:
            self.tick_due_s = math.inf
        self.feed(e.Ticked())

    def crash(self) -> None:
        """What was journalled stays; connections and messages under way are lost."""
        self.up = self.dies_acting = False
        self.tick_due_s = math.inf
        for connection in self.links.values():
            connection.close(UP)
        self.links.clear()
        rng = self.cluster.rng
        outage = rng.uniform(0.1, 3.0) if rng.random() < 0.8 else rng.uniform(3.0, 12.0)
        self.cluster.clock.after(outage, self.restart)

    def restart(self) -> None:
        if self.up:
            return
        self.cluster.truth.same_job(self.job, self.replayed())
        self.up = True
        self.term += 1
        self.feed(e.ControllerStarted(self.term))
        for agent in self.cluster.agents.values():
            agent.connect_soon(1.0)

    # Links ----------------------------------------------------------------------------------------------

    def accept(self, connection: Connection) -> None:
        former = self.links.get(connection.node)
        self.links[connection.node] = connection
        if former is not None:
            former.close(UP)

    def receive(self, connection: Connection, message: Message) -> None:
        if not self.up or not isinstance(message, NodeReport):
            return
        sent = self.job.directives.get(connection.node)
        self.feed(e.NodeReported(message))
        if not self.up:
            return
        if self.cluster.rng.random() < 0.02 and connection.node in self.job.nodes:
            self.cluster.truth.repeat_input(self.job, e.NodeReported(message))
        current = self.job.directives.get(connection.node)
        if not connection.known and current is not None and current is sent:
            self._send(connection.node, current)
        connection.known = True

    def lost(self, connection: Connection) -> None:
        connection.close(UP)
        if self.up and self.links.get(connection.node) is connection:
            del self.links[connection.node]
            self.feed(e.NodeGone(connection.node, connection.incarnation, NodeLoss.CLOSED))

    def lease_over(self, cut_s: float, connection: Connection) -> None:
        name = connection.node
        if self.up and self.links.get(name) is connection and self.cluster.wires[name].cut_s[UP] == cut_s:
            del self.links[name]
            connection.close(UP)
            self.feed(e.NodeGone(name, connection.incarnation, NodeLoss.SILENT))

    def died(self, name: str, incarnation: str) -> None:
        if self.up:
            self.feed(e.NodeGone(name, incarnation, NodeLoss.DIED))

    def _close(self, lost: e.NodeLost) -> None:
        """The machine does not know this agent any more: it has to connect and report again."""
        connection = self.links.get(lost.node)
        if connection is not None and connection.incarnation == lost.incarnation:
            del self.links[lost.node]
            connection.close(UP)

    def _send(self, name: str, directive: Directive) -> None:
        connection = self.links.get(name)
        if connection is not None:
            lost = not connection.send(DOWN, directive)
            self.unsent = self.unsent | {name} if lost else self.unsent - {name}
            if name not in self.resending:
                self.resending.add(name)
                self.cluster.clock.after(RESEND_S, self._resend, name)

    def _resend(self, name: str) -> None:
        self.resending.discard(name)
        node, directive = self.job.nodes.get(name), self.job.directives.get(name)
        if self.up and node is not None and directive is not None:
            if name in self.unsent or not followed(node.report, directive):
                self._send(name, directive)

    # Hangs ----------------------------------------------------------------------------------------------

    def suspect(self, worker: SimWorker) -> None:
        """The detector's part: it sees a worker of the present epoch that makes no step, asks, then judges."""
        if not self.up:
            self.cluster.clock.after(1.0, self.suspect, worker)
        elif worker.epoch == self.job.epoch and self.job.stage in ACTIVE and self._current(worker):
            self.feed(e.HangSuspected(worker.epoch, "no step"))
            self.cluster.clock.after(self.cluster.rng.uniform(0.1, 0.5), self.judge, worker)

    def judge(self, worker: SimWorker) -> None:
        if not self.up:
            self.cluster.clock.after(1.0, self.judge, worker)
        elif self._waits(worker) and worker.epoch == self.job.epoch:
            blame = Blame(worker.rank, worker.agent.name, "hang")  # it was on its way when the vacancy came
            self.feed(e.HangJudged(worker.epoch, Verdict("hang", (blame,), "no step")))
            if worker.hung and self.up:
                self.cluster.clock.after(1.0, self.suspect, worker)
        elif not worker.hung or not self._current(worker):
            self.feed(e.HangSuspected(worker.epoch, ""))
        else:
            self.cluster.truth.faults += 1
            blame = Blame(worker.rank, worker.agent.name, "hang")
            unknown = worker.session is not None and not self.cluster.certain and self.cluster.rng.random() < 0.1
            self.feed(e.HangJudged(worker.epoch, Verdict("hang", () if unknown else (blame,), "no step")))

    def _waits(self, worker: SimWorker) -> bool:
        """Members are not watched while roles are vacant."""
        formation = self.job.formation
        seated = formation is not None and formation.role_of(worker.name) is not None
        return bool(self.job.vacant) and seated and self._current(worker)

    def _current(self, worker: SimWorker) -> bool:
        """The detector starts anew with every formation: it judges nobody for what an earlier process did."""
        return not worker.dead and worker.life == self.job.lives.get(worker.rank, 0)


class Cluster:
    """Everything of one schedule. All chance comes from `rng`, all time from `clock`."""

    def __init__(
        self,
        rng: random.Random,
        spec: JobSpec,
        lines: list[str] | None,
        *,
        with_sessions: bool = False,
        fixed: bool = False,
        restartable: bool = False,
        certain: bool = False,
    ) -> None:
        self.rng = rng
        self.spec = spec
        self.clock = VirtualClock()
        self.lines = lines
        self.certain = certain  # the detector knows who hangs, and nothing was learned before
        self.tracing = lines is not None
        self.with_sessions = with_sessions
        self.fixed = fixed  # the number of members may not change
        self.restartable = restartable  # sessions' functions raise, and are run again
        chance = random.Random(repr(rng.getstate()[1][:4]))
        self.sharded = fixed and not restartable and chance.random() < 0.5  # each role has a part of the state
        self.vaults = Vaults(self, chance, keeps=with_sessions and not restartable and chance.random() < 0.4)
        self.rounds = Rounds(self)
        self.truth = Truth(self)
        self.faults: Counter[str] = Counter()
        self.wires: dict[str, Wire] = {}
        self.agents: dict[str, SimAgent] = {}  # the newest of each name
        self.lives: Counter[str] = Counter()
        self.finish_s = math.inf  # an epoch that is whole then runs to its end
        self.one_bug = False  # every error of the script is the same one
        self.breaks_change = False  # the next planned change of formations costs somebody's life
        self.quiet = False  # no faults any more
        self.compares = False  # replicas compare their states with each vote
        self.listener: Callable[[float, e.Record], None] | None = None  # hears the machine's records
        self.controller = SimController(self)
        self._costs(random.Random(f"costs {rng.getstate()[1][:4]}"))

    def _costs(self, chance: random.Random) -> None:
        """Some jobs have learned costs with which the policy chooses the other way."""
        if not self.certain and chance.random() < 0.3:
            pairs = (("restart-workers", "node"), ("promote-standby", "grow"), ("grow", "process"))
            slow, quick = chance.choice(pairs)
            for what, seconds in ((slow, 1000.0), (quick, 0.0)):
                for _ in range(9):
                    self.controller.feed(e.CostLearned(what, seconds))

    def trace(self, line: str) -> None:
        assert self.lines is not None
        self.lines.append(f"{self.clock.now_s - 1000.0:9.3f} {line}")

    def add_node(self, name: str, slots: int) -> None:
        if name not in self.wires:
            self.wires[name] = Wire(self.clock, self.rng)
        former = self.agents.get(name)
        if former is not None:
            former.purge()
        self.lives[name] += 1
        self.agents[name] = SimAgent(self, name, self.lives[name], slots)

    def connect(self, agent: SimAgent) -> Connection | None:
        wire = self.wires[agent.name]
        if not self.controller.up or not wire.whole:
            return None
        connection = Connection(wire, agent.name, agent.node.report.incarnation, self.controller, agent)
        self.controller.accept(connection)
        return connection

    def cut(self, name: str, directions: tuple[int, ...]) -> None:
        """From now on nothing passes; each side gives up once its lease is over."""
        wire, agent = self.wires[name], self.agents[name]
        for direction in directions:
            if wire.cut_s[direction]:
                continue
            wire.cut(direction)
            late = self.spec.lease_s + self.rng.uniform(0.0, 0.25)
            at_controller = self.controller.links.get(name)
            if direction == UP and at_controller is not None:
                self.clock.after(late, self.controller.lease_over, wire.cut_s[UP], at_controller)
            if direction == DOWN and agent.connection is not None:
                self.clock.after(late, agent.lease_over, wire.cut_s[DOWN], agent.connection)

    def heal(self, name: str) -> None:
        self.wires[name].heal()
        self.agents[name].connect_soon(1.0)

    # What workers do to each other ----------------------------------------------------------------------

    def finish_at(self, moment_s: float) -> None:
        self.finish_s = moment_s
        self.clock.at(moment_s, self.rounds.urge_all)

    def started(self, worker: SimWorker) -> None:
        if self.truth.started(worker) and self.finish_s < math.inf:
            self.clock.at(max(self.finish_s, self.clock.now_s + 0.5), self._finish, worker.epoch)

    def _finish(self, epoch: int) -> None:
        workers = self.truth.alive_of(epoch)
        if self.truth.whole(epoch) and not any(w.hung or w.termed for w in workers):
            for worker in workers:
                self.clock.after(self.rng.uniform(0.0, 0.4), worker.die, ExitCause.OK, 0)

    def broken(self, worker: SimWorker) -> None:
        """A worker makes no more steps. Its peers' collectives fail, or wait for ever."""
        self.truth.broken(worker)
        if self.with_sessions:
            self.break_collectives(worker)
            return
        for peer in self.truth.alive_of(worker.epoch):
            if peer is not worker and self.rng.random() < 0.5:
                self.clock.after(self.rng.uniform(0.02, 0.8), peer.interrupt)

    def break_collectives(self, worker: SimWorker) -> None:
        """Functions of the peers raise as well, or wait."""
        if not self.restartable or worker.session is None or not worker.session.entered:
            return
        for peer in self.truth.alive_of(worker.epoch):
            session = peer.session
            if session is None or session.entered != worker.session.entered:
                continue
            if peer is not worker and self.rng.random() < 0.3:
                session.after(0.001, 0.2, session.main, session.fail, COLLATERAL)

    def ended(self, worker: SimWorker, cause: ExitCause, could_step: bool) -> None:
        self.truth.ended(worker, cause)
        if could_step and cause is not ExitCause.OK:
            self.broken(worker)
        elif could_step:
            self.truth.broken(worker)

    @property
    def settled(self) -> bool:
        """The job runs with a whole epoch, or has ended and left nothing behind."""
        job = self.controller.job
        if job.stage in ENDED:
            return not self.truth.any_alive()
        if self.with_sessions:
            return not self.formations_lack()
        return job.stage in (Stage.RUNNING, Stage.SUSPECT) and self.truth.whole(job.epoch)

    def formations_lack(self) -> str:
        return self.truth.formations.runs(self.controller.job) if self.with_sessions else ""


def next_deadline(job: Job, now: float) -> float:
    """When time alone may next make the machine act; infinity: never."""
    if job.stage in ENDED:
        return math.inf
    moments = [job.grow_at_s, job.patient_until_s]
    for node in job.nodes.values():
        moments += (node.lost_at_s, node.stop_by_s)
    moments += job.gone_by.values()
    if job.short_since_s:
        moments.append(job.short_since_s + job.spec.join_timeout_s)
    if job.raised_s:
        moments.append(job.raised_s + LATE_S)
    if job.stage in WAITING:
        moments += (job.stage_since_s + job.spec.join_timeout_s, job.last_join_s + job.spec.last_call_s)
    return min((m for m in moments if m > now), default=math.inf)

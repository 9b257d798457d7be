"""What goes wrong in a schedule: each fault is a method, drawn by weight, and counted by name."""

from __future__ import annotations

from collections.abc import Callable

from everstep.control import node as n
from everstep.core import events as e
from everstep.core.types import ExitCause
from everstep.testing.actors import SimAgent
from everstep.testing.cluster import Cluster
from everstep.testing.network import DOWN, UP
from everstep.testing.workers import SimWorker
from everstep.train.commit import Phase


class Faults:
    """Draws a fault at a time; those that find no victim do not count."""

    def __init__(self, cluster: Cluster, slots: int) -> None:
        self.cluster = cluster
        self.rng = cluster.rng
        self.slots = slots
        self.names = 0
        self.kinds: dict[Callable[[], bool], int] = {
            self.worker_killed: 8,
            self.worker_error: 5,
            self.worker_hung: 4,
            self.false_alarm: 1,
            self.agent_died: 5,
            self.node_joined: 3,
            self.node_leaves: 2,
            self.partition: 7,
            self.all_cut: 1,
            self.link_reset: 4,
            self.messages_lost: 3,
            self.controller_crashed: 4,
            self.controller_died_acting: 2,
        }
        if cluster.with_sessions:
            self.kinds |= {self.step_broken: 8, self.step_made: 4, self.change_broken: 4}
        if cluster.restartable:
            self.kinds |= {self.function_raised: 12}

    def strike(self) -> None:
        if self.cluster.quiet:
            return
        (fault,) = self.rng.choices(list(self.kinds), list(self.kinds.values()))
        self.count(fault)

    def count(self, fault: Callable[[], bool]) -> None:
        if fault():
            name = fault.__name__
            self.cluster.faults[name] += 1
            if self.cluster.tracing:
                self.cluster.trace(f"*** {name}")

    # Nodes come -----------------------------------------------------------------------------------------

    def node_joined(self) -> bool:
        if self.names >= 6:
            return False
        self.cluster.add_node(f"n{self.names}", self.slots)
        self.names += 1
        return True

    def _restart(self, name: str) -> None:
        if not self.cluster.agents[name].alive:
            self.cluster.add_node(name, self.slots)

    # Workers --------------------------------------------------------------------------------------------

    def _workers(self) -> list[SimWorker]:
        return [w for alive in self.cluster.truth.alive.values() for w in alive if w.can_step]

    def _worker(self) -> SimWorker | None:
        workers = self._workers()
        return self.rng.choice(workers) if workers else None

    def worker_killed(self) -> bool:
        worker = self._worker()
        if worker is not None:
            worker.die(ExitCause.SIGNAL, 9)
        return worker is not None

    def worker_error(self) -> bool:
        worker = self._worker()
        if worker is not None:
            worker.fail("ValueError: bad sample")
        return worker is not None

    def worker_hung(self) -> bool:
        worker = self._worker()
        if worker is None:
            return False
        worker.hung = True
        self.cluster.clock.after(self.rng.uniform(0.5, 3.0), self.cluster.controller.suspect, worker)
        if self.rng.random() < 0.3:
            self.cluster.clock.after(self.rng.uniform(1.0, 10.0), worker.wake)
        return True

    def step_broken(self) -> bool:
        """Somebody dies the moment a round of the next step completes somewhere."""
        rounds = self.cluster.rounds
        rounds.deadly = bool(rounds.computing)
        rounds.urge_all(1)
        return rounds.deadly

    def step_made(self) -> bool:
        """The job goes on for two steps: what strikes next strikes in the midst of one."""
        busy = bool(self.cluster.rounds.computing)
        self.cluster.rounds.urge_all(2)
        return busy

    def function_raised(self) -> bool:
        """In a process that lives on; now and then it is the process that makes it raise."""
        alive = [w.session for w in self._workers() if w.session is not None and not w.hung]
        members = [session for session in alive if session.member.phase is Phase.COMPUTING and not session.failure]
        if not members:
            return False
        session = self.rng.choice(members)
        session.spoiled = self.rng.random() < 0.3
        session.main(session.fail, f"ValueError: bad sample {self.rng.choice('abcdefgh')}")
        return True

    def false_alarm(self) -> bool:
        worker = self._worker()
        if worker is not None:
            self.cluster.controller.suspect(worker)
        return worker is not None

    # Agents ---------------------------------------------------------------------------------------------

    def _agent(self) -> SimAgent | None:
        agents = [a for a in self.cluster.agents.values() if a.alive]
        return self.rng.choice(agents) if agents else None

    def agent_died(self) -> bool:
        agent = self._agent()
        if agent is None:
            return False
        agent.die()
        cluster = self.cluster
        if self.rng.random() < 0.3:  # its launcher is there to see it
            incarnation = agent.node.report.incarnation
            cluster.clock.after(self.rng.uniform(0.005, 0.8), cluster.controller.died, agent.name, incarnation)
        if self.rng.random() < 0.7:
            wait_s = self.rng.uniform(0.02, 0.3) if self.rng.random() < 0.3 else self.rng.uniform(0.3, 8.0)
            cluster.clock.after(wait_s, self._restart, agent.name)  # a quick one comes before the old one is missed
        return True

    def node_leaves(self) -> bool:
        agent = self._agent()
        if agent is not None:
            self._ask_to_leave(agent)
            self.cluster.clock.after(self.rng.uniform(2.0, 20.0), self._restart, agent.name)
        return agent is not None

    def _ask_to_leave(self, agent: SimAgent) -> None:
        """By a signal to its agent, or through the controller."""
        controller = self.cluster.controller
        if controller.up and agent.name in controller.job.nodes and self.rng.random() < 0.5:
            controller.feed(e.DrainAsked(agent.name))
        else:
            agent.feed(n.LeaveAsked())

    def change_broken(self) -> bool:
        """A node leaves, and somebody dies while the others take its roles over."""
        self.cluster.breaks_change = self.node_leaves()
        return self.cluster.breaks_change

    # The network ----------------------------------------------------------------------------------------

    def partition(self) -> bool:
        agent = self._agent()
        if agent is None:
            return False
        directions = self.rng.choice(((UP,), (DOWN,), (UP, DOWN), (UP, DOWN)))
        self.cluster.cut(agent.name, directions)
        lasting = self.rng.uniform(0.2, 4.0) if self.rng.random() < 0.6 else self.rng.uniform(4.0, 60.0)
        self.cluster.clock.after(lasting, self.cluster.heal, agent.name)
        return True

    def all_cut(self) -> bool:
        """The controller is alone with its spares, if it has any."""
        job = self.cluster.controller.job
        names = [m.node for m in job.plan.members] if job.plan else []
        lasting = self.rng.uniform(1.0, 80.0)
        for name in names:
            self.cluster.cut(name, self.rng.choice(((UP,), (DOWN,), (UP, DOWN))))
            self.cluster.clock.after(lasting + self.rng.uniform(0.0, 2.0), self.cluster.heal, name)
        return bool(names)

    def link_reset(self) -> bool:
        agent = self._agent()
        if agent is None or agent.connection is None:
            return False
        agent.connection.reset()
        return True

    def messages_lost(self) -> bool:
        """For a while messages to and from a node get lost, and some come again later."""
        agent = self._agent()
        if agent is None:
            return False
        wire = self.cluster.wires[agent.name]
        wire.loss, wire.repeats = self.rng.uniform(0.0, 0.7), self.rng.uniform(0.0, 0.7)
        self.cluster.clock.after(self.rng.uniform(1.0, 20.0), self._lossless, agent.name)
        return True

    def _lossless(self, name: str) -> None:
        wire = self.cluster.wires[name]
        wire.loss = wire.repeats = 0.0

    # The controller -------------------------------------------------------------------------------------

    def controller_crashed(self) -> bool:
        if self.cluster.controller.up:
            self.cluster.controller.crash()
            return True
        return False

    def controller_died_acting(self) -> bool:
        self.cluster.controller.dies_acting = self.cluster.controller.up
        return self.cluster.controller.up

    def stop_asked(self) -> bool:
        controller = self.cluster.controller
        if not controller.up:
            return False
        grace = self.rng.choice((self.cluster.spec.grace_s, 0.5))
        controller.feed(e.StopAsked("asked", self.rng.choice((2, 15)), grace, self.rng.choice((0, 20))))
        return True

    def silence(self) -> None:
        """No faults any more: links heal, nothing gets lost."""
        self.cluster.quiet = True
        self.cluster.controller.dies_acting = self.cluster.rounds.deadly = self.cluster.breaks_change = False
        for name in self.cluster.wires:
            self._lossless(name)
            self.cluster.heal(name)
        self.cluster.controller.restart()

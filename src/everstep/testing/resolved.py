"""A small scenario at full resolution: the shipped control plane, with simulated agents and workers that report.

Run: everstep sim --full examples/scenarios/faults.toml

`sim.engine` counts nodes, so that a year of 131,072 accelerators takes seconds. Here the faults which a scenario writes
down ([[faults]]) strike the machines themselves: `control.lifecycle` and `control.node` on the virtual clock, as in
`everstep schedules`. So its decisions are those of a live controller, and can be compared with those of the engine and
of real processes. What is known of a slow member is what `sim.sensing` says.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from everstep.control import seats
from everstep.control.job import Job, Stage
from everstep.control.recovery import Recovery
from everstep.control.slowness import Slowness, patience_s, worth
from everstep.core import events as e
from everstep.core.config import Straggler as Settings
from everstep.core.errors import UsageError
from everstep.core.types import Blame, ExitCause, JobSpec, Verdict
from everstep.plan.escalation import LEFT_ROLE
from everstep.sim.scenario import Fault, Scenario
from everstep.sim.sensing import Senses
from everstep.testing.cluster import Cluster
from everstep.testing.workers import SimWorker

MOST_NODES = 256  # the machine looks at every report, so an event costs by the number of nodes
LOOK_S = 0.1  # as often as the controller ticks
MANY = 1000  # steps: the detector has learned what it can


class Told(NamedTuple):
    """A record of the controller, seconds after the job's submission."""

    at_s: float
    record: e.AnyEvent


def play(scenario: Scenario) -> list[Told]:
    """Everything that the controller noted. Raises UsageError for what cannot be played at this resolution."""
    cluster_of, total = scenario.cluster, scenario.cluster.nodes + scenario.cluster.standbys
    if total > MOST_NODES:
        raise UsageError(f"cluster.nodes = {cluster_of.nodes}: at full resolution at most {MOST_NODES}, with standbys")
    spec = JobSpec(
        scenario.job.name,
        min_nodes=max(scenario.job.min_nodes, 1),
        max_nodes=cluster_of.nodes,
        grace_s=1.0,
        last_call_s=1.0,
        lease_s=2.0,
        fence_s=4.0,
        recover_s=2.5,
        stop_margin_s=1.0,
    )
    return Played(scenario, spec).run()


class Played:
    """One run. The shell around the machine is here: what it writes besides the machine's own records."""

    def __init__(self, scenario: Scenario, spec: JobSpec) -> None:
        self.scenario, job = scenario, scenario.job
        rng = random.Random(scenario.seed)
        self.cluster = Cluster(rng, spec, None, with_sessions=job.session, fixed=job.fixed, certain=True)
        self.cluster.vaults.keeps = scenario.saves is not None
        self.cluster.compares = any(fault.kind == "corrupt" for fault in scenario.faults)
        self.cluster.listener = self._heard
        self.recovery = Recovery()
        self.slowness = Slowness(act=True)
        self.senses = Senses(scenario, scenario.cluster.nodes, random.Random(scenario.seed))
        self.slow: dict[str, str] = {}  # incident -> place
        self.num_struck = self.num_opened = self.num_closed = 0
        self.told: list[Told] = []
        self.begin_s = self.cluster.clock.now_s

    def run(self) -> list[Told]:
        clock = self.cluster.clock
        self._add(0, self.scenario.cluster.nodes)
        self._add_standbys()
        for fault in self.scenario.faults:
            clock.at(self.begin_s + fault.at_s, self._strike, fault)
        self._make_steps()
        self._look()
        while clock.step(self.begin_s + self.scenario.until_s):
            pass
        return self.told

    def _add(self, first: int, end: int) -> None:
        for number in range(first, end):
            self.cluster.add_node(f"n{number}", self.scenario.cluster.accelerators_per_node)

    def _add_standbys(self) -> None:
        """Once the others have their roles: who comes first gets one."""
        size = self.scenario.cluster
        if self._num_seated() == size.nodes * size.accelerators_per_node or not self.cluster.with_sessions:
            self._add(size.nodes, size.nodes + size.standbys)
        else:
            self.cluster.clock.after(LOOK_S, self._add_standbys)

    def _num_seated(self) -> int:
        return len(self.job.formation.seats) if self.job.formation is not None else 0

    @property
    def job(self) -> Job:
        return self.cluster.controller.job

    def _heard(self, now: float, record: e.Record) -> None:
        self.told.append(Told(now - self.begin_s, record))
        self.num_opened += isinstance(record, e.IncidentOpened)
        self.num_closed += isinstance(record, e.IncidentClosed)
        self.slowness.saw(record)
        for closed in self.recovery.saw(record, now):
            self._heard(now, closed)

    def _make_steps(self) -> None:
        """Simulated sessions make steps when they are asked to."""
        if self.cluster.with_sessions:
            self.cluster.rounds.urge_all(1)
            self.cluster.clock.after(1.0, self._make_steps)

    def _look(self) -> None:
        """As the controller does with each tick."""
        now, acting = self.cluster.clock.now_s, seats.acting(self.job)
        for incident, place in list(self.slow.items()):
            node, _, local_rank = place.rpartition("/")
            if self.job.plan is not None and self.job.plan.rank(node, int(local_rank)) not in acting:
                del self.slow[incident]
                self._heard(now, e.IncidentClosed(incident, LEFT_ROLE))
        for made in self.slowness.due(self.job, now):
            if isinstance(made, e.Decided):
                self._heard(now, made)
            else:
                self.cluster.controller.feed(made)
        self.cluster.clock.after(LOOK_S, self._look)

    # Faults ---------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        name = f"n{fault.node}"
        agent = self.cluster.agents[name]
        if not agent.alive:
            return
        worker = next((w for w in agent.workers if w.local_rank == fault.local_rank and not w.dead), None)
        steps = worker.session.member.stand.committed if worker is not None and worker.session is not None else 0
        if steps < fault.at_step or (fault.whole and not self._whole()):
            self.cluster.clock.after(LOOK_S, self._strike, fault)
        elif fault.kind == "node-lost":
            self.num_struck += 1
            agent.die()
            self.cluster.clock.after(self.scenario.cluster.repair_s, self.cluster.add_node, name, agent.slots)
        elif worker is not None and worker.can_step:
            self._strike_worker(fault, worker)

    def _strike_worker(self, fault: Fault, worker: SimWorker) -> None:
        clock = self.cluster.clock
        self.num_struck += 1
        match fault.kind:
            case "kill":
                worker.die(ExitCause.SIGNAL, 9)
            case "hang":
                worker.hung = True
                clock.after(1.0, self.cluster.controller.suspect, worker)
            case "slow":
                self._watch(worker, fault)
            case _ if worker.session is not None:
                worker.session.flipped = True

    def _watch(self, worker: SimWorker, fault: Fault) -> None:
        """As in the engine, with steps that take as long as there: a number of the scenario, or the detector."""
        given_s, job = self.scenario.strategy.slow_detect_s, self.scenario.job
        after = self.cluster.clock.after
        if given_s is not None:
            after(given_s, self._judged, worker, fault.slowdown)
            return
        told = self.senses.slow(fault.slowdown, MANY)
        if told is not None and worth(told.slowdown, job.step_s):
            rest_s = max(0.0, patience_s(told.steps - 1 - told.since, job.step_s, Settings().lasts_s))
            after(told.steps * job.step_s * fault.slowdown + rest_s, self._judged, worker, 1.0 + told.slowdown)

    def _judged(self, worker: SimWorker, slowdown: float) -> None:
        """What follows from a verdict."""
        number = len(self.slow) + 1
        incident, name = f"S{number:03d}", worker.agent.name
        why = f"{slowdown:.2f} times slower"
        verdict = Verdict("slow", (Blame(worker.rank, name, "slow"),), why)
        self.slow[incident] = f"{name}/{worker.local_rank}"
        now = self.cluster.clock.now_s
        self._heard(now, e.SlowJudged(incident, verdict, "compute", round(slowdown - 1.0, 4), 0, 0))
        self._heard(now, e.IncidentOpened(incident, "slow", verdict.culprits, why))

    def _whole(self) -> bool:
        """Every role is taken, by whoever made a step in it, and as many wait as the scenario has standbys.

        What struck before is known, and over.
        """
        job, size = self.job, self.scenario.cluster
        if job.formation is None or job.stage is not Stage.RUNNING or self.num_closed < self.num_opened:
            return False
        if self.num_opened < self.num_struck:
            return False
        enough = self._num_seated() == size.nodes * size.accelerators_per_node
        waiting = len(seats.ready_ones(job, job.formation))
        return enough and seats.adopted(job, job.formation) and waiting >= size.standbys * size.accelerators_per_node

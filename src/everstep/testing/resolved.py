"""A small scenario at full resolution: the shipped control plane, with simulated agents and workers that report.

Run: everstep sim --full examples/scenarios/faults.toml

`sim.engine` counts nodes, so that a year of 131,072 accelerators takes seconds. Here the faults which a scenario writes
down ([[faults]]) strike the machines themselves: `control.lifecycle` and `control.node` on the virtual clock, as in
`everstep schedules`. So its decisions are those of a live controller, and can be compared with those of the engine and
of real processes. Slow and corrupt members need a detector that watches steps, which simulated workers have not.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from everstep.core import events as e
from everstep.core.errors import UsageError
from everstep.core.types import ExitCause, JobSpec
from everstep.sim.scenario import Fault, Scenario
from everstep.testing.cluster import Cluster
from everstep.testing.workers import SimWorker

MOST_NODES = 256  # the machine looks at every report, so an event costs by the number of nodes
KINDS = ("kill", "hang", "node-lost")


class Told(NamedTuple):
    """A record of the controller, seconds after the job's submission."""

    at_s: float
    record: e.Record


def play(scenario: Scenario) -> list[Told]:
    """Everything that the controller noted. Raises UsageError for what cannot be played at this resolution."""
    cluster_of, total = scenario.cluster, scenario.cluster.nodes + scenario.cluster.standbys
    if total > MOST_NODES:
        raise UsageError(f"cluster.nodes = {cluster_of.nodes}: at full resolution at most {MOST_NODES}, with standbys")
    for place, fault in enumerate(scenario.faults):
        if fault.kind not in KINDS:
            raise UsageError(f"faults[{place}].kind = {fault.kind!r}: at full resolution there are {', '.join(KINDS)}")
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
    rng = random.Random(scenario.seed)
    cluster = Cluster(rng, spec, None, with_sessions=scenario.job.session, fixed=scenario.job.fixed)
    told: list[Told] = []
    begin_s = cluster.clock.now_s
    cluster.listener = lambda now, record: told.append(Told(now - begin_s, record))
    for number in range(total):
        cluster.add_node(f"n{number}", cluster_of.accelerators_per_node)
    for fault in scenario.faults:
        cluster.clock.at(begin_s + fault.at_s, _strike, cluster, fault, cluster_of.repair_s)
    _make_steps(cluster)
    while cluster.clock.step(begin_s + scenario.until_s):
        pass
    return told


def _make_steps(cluster: Cluster) -> None:
    """Simulated sessions make steps when they are asked to."""
    if cluster.with_sessions:
        cluster.rounds.urge_all(1)
        cluster.clock.after(1.0, _make_steps, cluster)


def _strike(cluster: Cluster, fault: Fault, repair_s: float) -> None:
    name = f"n{fault.node}"
    agent = cluster.agents[name]
    if not agent.alive:
        return
    if fault.kind == "node-lost":
        agent.die()
        cluster.clock.after(repair_s, cluster.add_node, name, agent.slots)
        return
    worker = next((w for w in agent.workers if w.local_rank == fault.local_rank), None)
    if worker is None or not worker.can_step:
        return
    if fault.kind == "kill":
        worker.die(ExitCause.SIGNAL, 9)
    else:
        _hang(cluster, worker)


def _hang(cluster: Cluster, worker: SimWorker) -> None:
    worker.hung = True
    cluster.clock.after(1.0, cluster.controller.suspect, worker)

"""One scenario on real processes and in the simulator: what was decided, in order, and how long each recovery took.

Run: python benchmarks/parity.py examples/scenarios/parity/kill.toml

The scenario's cluster becomes that many nodes of `everstep run` on this machine, its [[faults]] become what the world
does: SIGKILL, SIGSTOP, SIGSTOP and SIGCONT in turn, the end of a node's agent and of all that it started, a flipped bit
in a process's memory. `answers` reads a journal, whoever wrote it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from everstep.core import events as e
from everstep.core.errors import UsageError
from everstep.core.formation import Stage
from everstep.core.types import NodeReport, WorkerReport
from everstep.sim.engine import Engine
from everstep.sim.scenario import Fault, Scenario
from everstep.testing import resolved
from everstep.testing.local import LocalRun
from everstep.testing.resolved import Told

DUTY_S = 0.02  # a slow process runs so long, and then stands still
AFTER = 5  # steps that a job makes after its last incident before it is ended: nothing more may be decided
ASKED = "stop"  # the incident with which a person, here this program, ends a job


class Answer(NamedTuple):
    """One incident, from its first sign to its end. Nodes by the scenario's names."""

    kind: str
    who: tuple[str, ...]
    decisions: tuple[tuple[str, str], ...]  # action and target, in order
    outcome: str
    recovery_s: float  # without a step; where nobody stopped, until it was over

    @property
    def decided(self) -> tuple[object, ...]:
        """What must be the same wherever the scenario is played."""
        return self[:-1]

    def __str__(self) -> str:
        decisions = ", ".join(f"{action} ({target})" for action, target in self.decisions)
        return f"{self.kind} of {' and '.join(self.who)}: {decisions}; {self.outcome}"


class Known(NamedTuple):
    """What a journal says of one incident."""

    opened_s: float
    opened: e.IncidentOpened
    updates: list[e.IncidentUpdated]
    decided: list[e.Decided]
    closed: list[tuple[float, e.IncidentClosed]]


def answers(told: Iterable[Told], names: Mapping[str, str] | None = None) -> list[Answer]:
    """By incident, in the order in which they were opened. `names`: of nodes, in the scenario."""
    found: dict[str, Known] = {}
    for at_s, record in told:
        match record:
            case e.IncidentOpened(incident, kind) if kind != ASKED:
                found[incident] = Known(at_s, record, [], [], [])
            case e.IncidentUpdated(incident) if incident in found:
                found[incident].updates.append(record)
            case e.Decided(incident) if incident in found:
                found[incident].decided.append(record)
            case e.IncidentClosed(incident) if incident in found:
                found[incident].closed.append((at_s, record))
    return [_answer(known, names or {}) for known in found.values()]


def _answer(known: Known, names: Mapping[str, str]) -> Answer:
    culprits = next((each.culprits for each in reversed(known.updates) if each.culprits), known.opened.culprits)
    who = tuple(sorted({names.get(blame.node, blame.node) for blame in culprits}))
    decisions = tuple((d.decision.action.value, _nodes(d.decision.target, names)) for d in known.decided)
    if not known.closed:
        return Answer(known.opened.kind, who, decisions, "open", -1.0)
    closed_s, closed = known.closed[0]
    took_s = closed.downtime_s if closed.downtime_s >= 0 else closed_s - known.opened_s
    return Answer(known.opened.kind, who, decisions, closed.outcome, took_s)


def _nodes(target: str, names: Mapping[str, str]) -> str:
    """Of targets such as node1/0#0, the nodes; the simulator counts in these."""
    nodes = {part.partition("/")[0] for part in target.split(", ")}
    return ", ".join(sorted(names.get(node, node) for node in nodes))


# Where it is played -------------------------------------------------------------------------------------


def simulated(scenario: Scenario) -> list[Told]:
    """By the engine, which counts nodes."""
    told: list[Told] = []
    Engine(scenario, random.Random(scenario.seed), lambda at_s, _, event: told.append(Told(at_s, event))).run()
    return told


def full(scenario: Scenario) -> list[Told]:
    """By the shipped control plane on a virtual clock."""
    return resolved.play(scenario)


def live(scenario: Scenario, folder: Path, script: Path) -> tuple[list[Told], dict[str, str]]:
    """On real processes; what its controller wrote, and the scenario's names of its nodes.

    `script`: benchmarks/scripts/parity_steps.py. Raises UsageError for what cannot be done to processes.
    """
    if scenario.failures:
        raise UsageError("failures: only faults that a scenario writes down strike real processes")
    with LiveJob(scenario, folder, script) as job:
        job.until(job.whole, timeout_s=90)
        job.began_s = time.monotonic()
        for fault in scenario.faults:
            job.strike(fault)
        job.over(len(scenario.faults))
        told = [Told(entry.t_s, entry.event) for entry in job.entries()]
        return told, job.names()


def options(scenario: Scenario) -> list[str]:
    """Of `everstep run`. Who looks for slow workers is on where there is one, and told what to look for."""
    cluster, kinds = scenario.cluster, {fault.kind for fault in scenario.faults}
    slow = [fault.slowdown for fault in scenario.faults if fault.kind == "slow"]
    settings = {"control.heartbeat_s": 0.1, "straggler.enabled": str(bool(slow)).lower()}
    if slow:
        settings |= {"straggler.act": "true", "straggler.threshold": (min(slow) - 1) / 2, "straggler.lasts_s": 0}
    if "hang" in kinds:
        settings["hang.timeout_s"] = scenario.strategy.hang_detect_s
    words = ["--nnodes", f"{scenario.job.min_nodes}:{cluster.nodes}", "--nproc-per-node"]
    words += [str(cluster.accelerators_per_node), "--local-nodes", str(cluster.nodes)]
    words += ["--standbys", str(cluster.standbys)]
    return words + [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


class LiveJob(LocalRun):
    """Its nodes are known by the scenario's names: n0, n1, ... are the first members in the order of their roles."""

    def __init__(self, scenario: Scenario, directory: Path, script: Path) -> None:
        every = scenario.saves.every_steps if scenario.saves is not None else 0
        args = ("--step-s", str(scenario.job.step_s), "--save-every", str(every))
        super().__init__(directory, script, *options(scenario), args=args, OMP_NUM_THREADS="1")
        self.scenario = scenario
        self.num_struck = 0
        self.began_s = 0.0  # when it was whole for the first time

    # What it tells --------------------------------------------------------------------------------------

    def names(self) -> dict[str, str]:
        """Of the nodes, by their own."""
        first = next((made.formation for made in self.events(e.FormationMade)), None)
        if first is None:
            return {}
        members = list(dict.fromkeys(seat.node for seat in first.seats))
        others = sorted({joined.node for joined in self.events(e.NodeJoined)} - set(members))
        return {node: f"n{number}" for number, node in enumerate((*members, *others))}

    def workers(self) -> list[tuple[str, WorkerReport]]:
        """Those that live, with their nodes."""
        last: dict[str, NodeReport] = {}
        for entry in self.entries():
            match entry.event:
                case e.NodeReported(report):
                    last[report.node] = report
                case e.NodeLost(node):
                    last.pop(node, None)
        return [(r.node, w) for r in last.values() for w in r.workers if not w.gone and w.exit is None]

    def whole(self) -> bool:
        """Every role is taken, by whoever made a step in it, and as many wait as the scenario has standbys.

        What struck before is known, and over.
        """
        size, made = self.scenario.cluster, self.events(e.FormationMade)
        if not made or self.num_open() or len(self.events(e.IncidentOpened)) < self.num_struck:
            return False
        epoch = made[-1].formation.epoch
        told = [worker.session for _, worker in self.workers() if worker.session is not None]
        acting = [each for each in told if each.stage is Stage.MEMBER and each.resumed and each.epoch == epoch]
        waiting = [each for each in told if each.stage is Stage.READY and not each.epoch]
        per_node = size.accelerators_per_node
        return len(acting) == size.nodes * per_node and len(waiting) >= size.standbys * per_node

    def num_open(self) -> int:
        """Incidents."""
        return len(self.events(e.IncidentOpened)) - len(self.events(e.IncidentClosed))

    def steps(self) -> int:
        return max((seen.total_step for seen in self.events(e.StepsSeen)), default=0)

    def over(self, faults: int) -> None:
        """Until each fault had its incident, all are closed, and the job goes on; then the job is ended."""
        self.until(lambda: len(self.events(e.IncidentOpened)) >= faults and not self.num_open())
        steps = self.steps() + AFTER
        self.until(lambda: self.steps() >= steps)
        self.signal(signal.SIGTERM)
        self.wait()

    # What the world does to it --------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        """When it is due."""
        self.until(lambda: self.steps() >= fault.at_step and time.monotonic() >= self.began_s + fault.at_s)
        if fault.whole:
            self.until(self.whole)
        self.num_struck += 1
        node = next(node for node, name in self.names().items() if name == f"n{fault.node}")
        if fault.kind == "node-lost":
            self._lose(node)
            return
        pid = next(w.pid for name, w in self.workers() if name == node and w.local_rank == fault.local_rank)
        match fault.kind:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "hang":
                os.kill(pid, signal.SIGSTOP)
            case "corrupt":
                flip(pid, int((self.directory / f"state-{pid}").read_text()))
            case "slow":
                self._slow(pid, fault)

    def _lose(self, node: str) -> None:
        """The agent first, so that nobody there tells of the others' ends."""
        for pid in (self.agent_pid(node), *self.processes(node)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _slow(self, pid: int, fault: Fault) -> None:
        """Until it has ended, or for as long as the scenario says."""
        pauses = threading.Thread(target=pause, args=(pid, fault.slowdown, fault.lasts_s), daemon=True)
        pauses.start()


def flip(pid: int, address: int) -> None:
    """The lowest bit of the byte there."""
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(address)
        (byte,) = memory.read(1)
        memory.seek(address)
        memory.write(bytes([byte ^ 1]))


def pause(pid: int, slowdown: float, lasts_s: float) -> None:
    """Stop a process and let it go on, in turn: everything takes it that many times as long."""
    until_s = time.monotonic() + lasts_s
    ended = threading.Event()
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until_s:
            os.kill(pid, signal.SIGSTOP)
            ended.wait(DUTY_S * (slowdown - 1))
            os.kill(pid, signal.SIGCONT)
            ended.wait(DUTY_S)


def compared(real: Sequence[Answer], modelled: Sequence[Answer]) -> Iterator[tuple[Answer, Answer, float]]:
    """Incidents in pairs, and the factor between their recoveries: real over modelled."""
    for ours, theirs in zip(real, modelled, strict=True):
        yield ours, theirs, ours.recovery_s / theirs.recovery_s if theirs.recovery_s > 0 else float("inf")

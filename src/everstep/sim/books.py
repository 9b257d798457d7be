"""What the job does between two events, and what every accelerator's time is booked as."""

from __future__ import annotations

import enum
import math
from functools import lru_cache
from typing import TYPE_CHECKING

from everstep.core.decisions import Action
from everstep.observe.view import Bucket
from everstep.plan.closed import rerouting_slowdown
from everstep.plan.presets import Preset
from everstep.sim.buckets import Buckets
from everstep.sim.fleet import Fleet
from everstep.sim.progress import Pace, Progress, Save
from everstep.sim.scenario import Job, Saves, Scenario
from everstep.sim.stages import growth
from everstep.sim.workload import Pipeline

if TYPE_CHECKING:
    from everstep.sim.roles import Roles

# With fewer nodes, after this action: whole replicas count, or every node.
LAWS = {Action.SHRINK: "replicas", Action.REROUTE: "reroute", Action.TAKE_OVER: "take-over"}


class Phase(enum.Enum):
    RUN = enum.auto()
    PAUSE = enum.auto()  # of known length, in parts that are booked differently
    WAIT = enum.auto()  # for a node
    ENDED = enum.auto()


class Books:
    """Buckets, progress and phase. `settle` brings them up to a moment; only then may anything be changed."""

    def __init__(self, scenario: Scenario, system: Preset, fleet: Fleet, standby_slots: int) -> None:
        self.job, self.system, self.fleet = scenario.job, system, fleet
        self.per_node = scenario.cluster.accelerators_per_node
        self.total_nodes = fleet.seats + standby_slots
        self.full_step_s = _step_s(self.job, self.job.replicas)
        self.buckets = Buckets()
        self.progress = _progress(system, scenario.saves, self.full_step_s)
        self.phase = Phase.PAUSE
        self.pauses: list[tuple[Bucket, float]] = []  # what it is, until when
        self.law = "replicas"
        self.slow: dict[int, float] = {}  # node -> how many times as long it takes
        self.eased: dict[int, float] = {}  # slow node that others help -> how many times as long the job takes
        self.roles: Roles | None = None  # of a job in whole pipelines
        self.booked_s = 0.0
        self.steps_redone = 0
        self.stalled_s = 0.0  # of time, in saves
        self._pace: Pace | None = None
        self._base_s = 0.0  # of it, without anybody slow
        self.holds = scenario.strategy.meanwhile  # the pace of before, until the switch

    def changed(self) -> None:
        """Nodes, law or slow ones are others than before."""
        if not self.holds:
            self._pace = None
        elif self._pace is not None:  # of those who are left
            self._pace = self._pace_of(self._base_s)

    def switched(self) -> None:
        """What was prepared takes over."""
        self._pace = None

    @property
    def working(self) -> int:
        """Nodes that take part in steps."""
        fleet = self.fleet
        if self.roles is not None:
            return self.roles.working
        return fleet.whole_replicas * fleet.per_replica if self.current_law == "replicas" else fleet.present

    @property
    def current_law(self) -> str:
        return self.law if self.job.law == "action" else self.job.law

    def can_run(self) -> bool:
        if self.current_law == "replicas":
            return self.fleet.whole_replicas >= self.job.min_replicas
        return self.fleet.present >= max(self.job.min_nodes, self.job.pipeline_nodes) and self.step_s() > 0

    def step_s(self) -> float:
        """With the nodes of now, without anybody slow; 0: there can be none."""
        fleet, job = self.fleet, self.job
        match self.current_law:
            case "table":
                rate = rate_of(job, self.roles.formed if self.roles is not None else fleet.present)
                return job.samples_per_step / rate if rate else 0.0
            case "nodes":
                return self.full_step_s * fleet.seats / fleet.present if fleet.present else 0.0
            case "reroute":
                slower = self._rerouted()
                return self.full_step_s * slower if slower < math.inf else 0.0
            case "take-over":
                return self.full_step_s
        whole = fleet.whole_replicas
        return _step_s(job, whole) if whole else 0.0

    def _rerouted(self) -> float:
        """By the stage that lost most."""
        fleet, (stages, micro_batches) = self.fleet, shape(self.job)
        lost = [0] * stages
        for seat in fleet.missing:
            lost[seat % fleet.per_replica * stages // fleet.per_replica] += 1
        worst = max(lost)
        if worst >= fleet.replicas:
            return math.inf  # nobody is left at this stage
        return rerouting_slowdown(fleet.replicas, stages, micro_batches, worst) if worst else 1.0

    def pace(self) -> Pace:
        if self._pace is None:
            self._base_s = self.step_s()
            self._pace = self._pace_of(self._base_s)
        return self._pace

    def _pace_of(self, base_s: float) -> Pace:
        slow = max((self.grown(n, f) for n, f in self.slow.items() if self._takes_part(n)), default=1.0)
        return Pace(base_s * self.redundancy() * slow, base_s * self.working * self.per_node)

    def _takes_part(self, node: int) -> bool:
        return self.fleet.seat_of(node) >= 0 and (self.roles is None or node in self.roles.holder)

    def grown(self, node: int, factor: float) -> float:
        """How many times as long a step takes when this node takes `factor` times as long for its part.

        Without stages all wait for it all the time. With them the critical path tells, with all replicas present.
        """
        if node in self.eased:
            return self.eased[node]
        stages, micro_batches = shape(self.job)
        if stages == 1 or factor == 1:
            return factor
        pipeline = self.job.pipeline or Pipeline(stages=stages, micro_batches=micro_batches)
        fleet, place = self.fleet, self.fleet.seat_of(node) % self.fleet.per_replica
        first, end = (n * stages // fleet.per_replica for n in (place, place + 1))
        return growth(pipeline, fleet.replicas, range(first, max(end, first + 1)), factor)

    def redundancy(self) -> float:
        """How much longer a step takes for being made twice in part. A table of rates holds what that always costs."""
        if self.roles is not None:
            return self.system.after_fault if self.roles.slowed else 1.0
        helps = self.current_law == "take-over" and self.fleet.missing
        return self.system.slowdown * (self.system.after_fault if helps else 1.0)

    # Booking --------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        span_s = now - self.booked_s
        if span_s <= 0:
            return
        standbys = len(self.fleet.standbys)
        self._book(Bucket.STANDBY, standbys, span_s)
        if self.phase is Phase.RUN:
            self._run(span_s)
            self._book(Bucket.WAITING, self.total_nodes - standbys - self.working, span_s)
        elif self.phase is Phase.PAUSE:
            self._paused(now)
            self._book(Bucket.WAITING, self.total_nodes - standbys - self.fleet.present, span_s)
        else:
            self._book(Bucket.WAITING, self.total_nodes - standbys, span_s)
        if self.phase is not Phase.RUN:
            self.progress.last_s = now
        self.booked_s = now

    def _book(self, bucket: Bucket, nodes: int, span_s: float) -> None:
        self.buckets.add(bucket, nodes * self.per_node * span_s)

    def _run(self, span_s: float) -> None:
        before = self.progress.worth
        stepping_s, stall_s = self.progress.advance(self.booked_s, span_s, self.pace())
        made = self.progress.worth - before
        lost = self.working * self.per_node * stepping_s - made
        redundant = min(lost, made * (self.redundancy() - 1))
        self.buckets.add(Bucket.PRODUCTIVE, made)
        self.buckets.add(Bucket.REDUNDANCY, redundant)
        self.buckets.add(Bucket.STRAGGLER, lost - redundant)
        self._book(Bucket.STALL, self.working, stall_s)
        self.stalled_s += stall_s

    def _paused(self, now: float) -> None:
        at = self.booked_s
        for bucket, until in self.pauses:
            end = min(until, now)
            if end > at:
                self._book(bucket, self.fleet.present, end - at)
                at = end
        assert at >= now - 1e-6, "a pause ends when the job goes on"

    # What a fault takes back ----------------------------------------------------------------------------

    def undo_part(self) -> None:
        """The step under way is made again."""
        self.buckets.move(Bucket.PRODUCTIVE, Bucket.REDONE, self.progress.drop_part())

    def save_fails(self, now: float) -> int:
        """The one under way, if there is one; steps that are made again."""
        return self.roll_back(now) if self.progress.failing(now) else 0

    def roll_back(self, now: float, to: Save | None = None) -> int:
        """To what is durable: steps that are made again."""
        steps, worth = self.progress.roll_back(now, to, keeps_part=self.holds)
        self.buckets.move(Bucket.PRODUCTIVE, Bucket.REDONE, worth)
        self.steps_redone += steps
        return steps


def shape(job: Job) -> tuple[int, int]:
    """Stages and micro-batches of a replica."""
    if job.pipeline is not None:
        return job.pipeline.stages, job.pipeline.micro_batches
    return max(job.stages, job.pipeline_nodes), job.micro_batches


def rate_of(job: Job, nodes: int) -> float:
    """Samples a second by the table: of the greatest number of nodes in it that is there; 0 below the least."""
    usable = [int(name) for name in job.samples_per_s if int(name) <= nodes]
    return job.samples_per_s[str(max(usable))] if usable else 0.0


@lru_cache(maxsize=4096)
def _pipelined(pipeline: Pipeline, replicas: int, of: int) -> float:
    return pipeline.step_s(replicas, of)


def _step_s(job: Job, replicas: int) -> float:
    """The samples of a step stay the same: fewer replicas take longer."""
    if job.pipeline is not None:
        return _pipelined(job.pipeline, replicas, job.replicas)
    if job.law == "table":
        return job.samples_per_step / max(job.samples_per_s.values())
    return job.step_s * job.replicas / replicas


def _progress(system: Preset, saves: Saves | None, step_s: float) -> Progress:
    saving = system.saving
    every = saving.every_steps
    if not every and saving.every_s:
        every = max(1, round((saving.every_s - saving.cost_s) / step_s))
    saves = saves or Saves()
    return Progress(every, saving.cost_s, saves.durable_s, saves.aligned, saves.failed_undoes)

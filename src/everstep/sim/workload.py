"""How long a step of a hybrid-parallel job takes: its pipeline played op by op, then the all-reduce; and its memory.

`play` is the longest path through the step's graph (each op follows the one before it on its worker and what it needs
from other stages), found by letting time run, because Varuna's stages change their order while they wait.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from everstep.core.config import Count, Group, Positive, PositiveSeconds, Seconds
from everstep.core.errors import UsageError
from everstep.detect.critical import Op as Kind
from everstep.plan.closed import ring_all_reduce_s
from everstep.sim.chance import Chance
from everstep.sim.schedule import MAKERS, After, Op, Schedule

MOST_PASSES = 1_000_000  # a step of so many is played in about ten seconds

Key = tuple[Kind, int, int]  # of an op: kind, stage, micro-batch


class Times(NamedTuple):
    """Seconds of one micro-batch at every stage. Jitter: standard deviation of each single op or message."""

    forward_s: float
    backward_s: float
    send_s: float = 0.0
    jitter_s: float = 0.0
    send_jitter_s: float = 0.0
    slow: tuple[float, ...] = ()  # factor by worker; empty: nobody is slow

    def op_s(self, op: Op, chance: Chance | None) -> float:
        usual = self.backward_s if op.kind is Kind.BACKWARD else self.forward_s
        return _jittered(usual * (self.slow[op.worker] if self.slow else 1.0), self.jitter_s, chance)

    def message_s(self, chance: Chance | None) -> float:
        return _jittered(self.send_s, self.send_jitter_s, chance)


def _jittered(usual_s: float, deviation_s: float, chance: Chance | None) -> float:
    """A normal distribution without its negative part."""
    if chance is None or not deviation_s:
        return usual_s
    while (drawn := chance.gauss(usual_s, deviation_s)) < 0:
        pass
    return drawn


class Played(NamedTuple):
    """One step. `in_flight`: by worker, the most micro-batches whose activations it held at once."""

    makespan_s: float
    busy_s: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of the workers' time in which they wait."""
        return 1.0 - sum(self.busy_s) / (self.makespan_s * len(self.busy_s))


class _Play:
    def __init__(self, schedule: Schedule, times: Times, chance: Chance | None) -> None:
        self.schedule, self.times, self.chance = schedule, times, chance
        self.orders = [list(reversed(order)) for order in schedule.orders]  # the next op is the last
        self.recomputes = {(op.stage, op.micro_batch) for o in schedule.orders for op in o if op.kind is Kind.RECOMPUTE}
        self.stages = schedule.stages
        self.worker = {op.stage: op.worker for order in schedule.orders for op in order}
        self.came: set[Key] = set()  # what an op needed from elsewhere is there
        self.done: set[Key] = set()
        self.busy = [False] * len(self.orders)
        self.busy_s = [0.0] * len(self.orders)
        self.held, self.most = [0] * len(self.orders), [0] * len(self.orders)
        self.events: list[tuple[float, int, Op | Key]] = []
        self.count = 0

    def run(self) -> Played:
        now = 0.0
        for worker in range(len(self.orders)):
            self.start(worker, now)
        while self.events:
            now, _, event = heapq.heappop(self.events)
            if isinstance(event, Op):
                self.ended(event, now)
            else:
                self.came.add(event)
                self.start(self.worker[event[1]], now)
        if any(self.orders):
            raise ValueError(f"the schedule {self.schedule.name} cannot end: its orders wait for each other")
        return Played(now, tuple(self.busy_s), tuple(self.most))

    def plan(self, when_s: float, event: Op | Key) -> None:
        self.count += 1
        heapq.heappush(self.events, (when_s, self.count, event))

    def start(self, worker: int, now: float) -> None:
        order = self.orders[worker]
        if self.busy[worker] or not order:
            return
        if self.schedule.swaps and order[-1].kind is Kind.RECOMPUTE and not self.ready(order[-1]):
            place = next((n for n in reversed(range(len(order))) if order[n].kind is Kind.FORWARD), None)
            if place is not None:
                order.append(order.pop(place))
        if not self.ready(order[-1]):
            return
        op = order.pop()
        took = self.times.op_s(op, self.chance)
        self.busy[worker] = True
        self.busy_s[worker] += took
        if op.kind is Kind.FORWARD:
            self.held[worker] += 1
            self.most[worker] = max(self.most[worker], self.held[worker])
        self.plan(now + took, op)

    def ready(self, op: Op) -> bool:
        kind, stage, n, _ = op
        last = stage == self.stages - 1
        match kind:
            case Kind.FORWARD:
                return stage == 0 or (kind, stage, n) in self.came
            case Kind.RECOMPUTE if last:
                return (Kind.FORWARD, stage, n) in self.done
            case Kind.RECOMPUTE if self.schedule.after is After.GRADIENT:
                return (Kind.BACKWARD, stage, n) in self.came
            case Kind.RECOMPUTE:
                return (Kind.RECOMPUTE, stage + 1, n) in self.done
        own = (Kind.RECOMPUTE if (stage, n) in self.recomputes else Kind.FORWARD, stage, n)
        return own in self.done and (last or (kind, stage, n) in self.came)

    def ended(self, op: Op, now: float) -> None:
        kind, stage, n, worker = op
        self.busy[worker] = False
        self.done.add((kind, stage, n))
        self.held[worker] -= kind is Kind.BACKWARD
        if kind is Kind.FORWARD and stage + 1 < self.stages:
            self.plan(now + self.times.message_s(self.chance), (kind, stage + 1, n))
        elif kind is Kind.BACKWARD and stage:
            self.plan(now + self.times.message_s(self.chance), (kind, stage - 1, n))
        elif kind is Kind.RECOMPUTE and stage:
            self.start(self.worker[stage - 1], now)
        self.start(worker, now)


def play(schedule: Schedule, times: Times, chance: Chance | None = None) -> Played:
    """One pipeline's step without its all-reduce. Raises ValueError for orders that wait for each other."""
    return _Play(schedule, times, chance).run()


def all_reduce_s(size_bytes: float, members: int, bandwidth: float, latency_s: float = 0.0) -> float:
    """Ring: the closed form, and the latency of its 2 (n - 1) messages."""
    if members < 2 or not size_bytes:
        return 0.0
    return ring_all_reduce_s(size_bytes, bandwidth, members) + 2 * (members - 1) * latency_s


class Pipeline(Group, frozen=True):
    """[job.pipeline]: a job of `job.replicas` pipelines. `micro_batches`: of one pipeline when all of them run."""

    schedule: str = "1f1b"
    stages: Positive = 1
    micro_batches: Positive = 1
    forward_s: PositiveSeconds = 0.1  # of one micro-batch at one stage
    backward_s: PositiveSeconds = 0.2
    send_s: Seconds = 0.0
    gradient_bytes: Count = 0  # of one stage
    bandwidth: PositiveSeconds = 1e10  # bytes a second between replicas
    latency_s: Seconds = 0.0
    update_s: Seconds = 0.0  # all else that a step takes once
    activation_bytes: Count = 0  # of one micro-batch at one stage
    state_bytes: Count = 0  # parameters, gradients and optimizer of one stage
    memory_bytes: Count = 0  # of one accelerator; 0: not checked

    def played(self, micro_batches: int) -> Played:
        if self.schedule not in MAKERS:
            raise UsageError(f"job.pipeline.schedule = {self.schedule!r}: there are {', '.join(MAKERS)}")
        if self.stages * micro_batches > MOST_PASSES:
            raise UsageError(
                f"job.pipeline: {self.stages} stages x {micro_batches} micro-batches are more than the {MOST_PASSES} "
                "that are played one by one"
            )
        times = Times(self.forward_s, self.backward_s, self.send_s)
        return play(MAKERS[self.schedule](self.stages, micro_batches), times)

    def step_s(self, replicas: int, of: int) -> float:
        """With `replicas` of `of` pipelines left, which share the micro-batches of all."""
        micro_batches = -(-self.micro_batches * of // replicas)
        return self.played(micro_batches).makespan_s + self.after_s(replicas)

    def after_s(self, replicas: int) -> float:
        """What follows the last backward pass."""
        return all_reduce_s(self.gradient_bytes, replicas, self.bandwidth, self.latency_s) + self.update_s

    def peak_bytes(self) -> int:
        """Of the worker that needs most. Raises UsageError when it does not fit."""
        peak = self.state_bytes + max(self.played(self.micro_batches).in_flight) * self.activation_bytes
        if self.memory_bytes and peak > self.memory_bytes:
            raise UsageError(f"job.pipeline: a worker needs {peak} bytes, memory_bytes is {self.memory_bytes}")
        return peak

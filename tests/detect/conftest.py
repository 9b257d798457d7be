"""A small synchronous job on paper: what its agents would report at any moment, healthy or not.

Each round every rank does its own phases, enters a collective, and when the last one came all make a step.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

import msgspec
import pytest

from everstep.core.events import Ticked
from everstep.core.types import EpochPlan, Member, NodeProgress, Phase, StacksTaken, Verdict, WorkerProgress
from everstep.detect.hang import HangDetector, HangState, Output, SuspectStacksWanted
from everstep.detect.timeouts import Limits

Round = dict[int, list[tuple[Phase, float]]]  # rank -> its phases and their durations

WAITING = """Thread 0x00007f21b5d6e6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f21b6a59b80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/home/user/train.py", line 90 in main
"""
BUSY = """Current thread 0x00007f21b6a59b80 (most recent call first):
  File "/home/user/train.py", line 42 in next_batch
  File "/home/user/train.py", line 88 in main
"""


class Moment(msgspec.Struct):
    """What a rank has come to at a time."""

    at_s: float
    phase: Phase
    phase_at_s: float
    step: int = 0
    step_at_s: float = 0.0
    collectives: int = 0


class Job(msgspec.Struct):
    """Moments of each rank, and the faults injected. `pauses`: (time, duration) in which the world stood still."""

    world_size: int
    slots: int
    moments: dict[int, list[Moment]]
    rank: int = -1
    fault_s: float = float("inf")
    stopped: bool = False
    last_step_s: float = 0.0
    last_excuse_s: float = 0.0  # end of the last excused phase of a healthy rank

    def plan(self, epoch: int = 1) -> EpochPlan:
        count = self.world_size // self.slots
        members = tuple(Member(f"node{i}", "inc", "h", i, i * self.slots, self.slots) for i in range(count))
        return EpochPlan(epoch, members, self.world_size, "h", 1, 0)

    def worker(self, rank: int, t: float, ages: Callable[[float], float]) -> WorkerProgress:
        """`ages` turns a time of this job into an age as the node's clock shows it."""
        trace = self.moments[rank]
        now = trace[max(0, bisect.bisect_right(trace, t, key=lambda m: m.at_s) - 1)]
        return WorkerProgress(
            rank=rank,
            local_rank=rank % self.slots,
            step=now.step,
            total_step=now.step,
            phase=now.phase,
            phase_age_s=ages(now.phase_at_s),
            step_age_s=ages(now.step_at_s),
            life_age_s=ages(now.at_s),
            collectives=now.collectives,
            stopped=self.stopped and rank == self.rank and t >= self.fault_s,
        )


def build(rounds: list[Round], slots: int = 2, rank: int = -1, fault_s: float = 1e9, stopped: bool = False) -> Job:
    """Play the rounds; `rank` does nothing any more from `fault_s` on."""
    world = len(rounds[0])
    job = Job(world, slots, {r: [Moment(0.0, Phase.START, 0.0)] for r in range(world)}, rank, fault_s, stopped)
    began = 0.0
    for one in rounds:
        arrived = [_play(job, r, one[r], began) for r in range(world)]
        if None in arrived:
            break
        began = job.last_step_s = max(a for a in arrived if a is not None)
        for trace in job.moments.values():
            old = trace[-1]
            phase_at = old.phase_at_s if old.phase is Phase.TRAIN else began
            trace.append(Moment(began, Phase.TRAIN, phase_at, old.step + 1, began, old.collectives))
    return job


def _play(job: Job, rank: int, phases: list[tuple[Phase, float]], t: float) -> float | None:
    """This rank's part of a round; None when the fault comes in between."""
    trace, old = job.moments[rank], job.moments[rank][-1]
    for phase, duration in [*phases, (Phase.START if old.step == 0 else Phase.TRAIN, 0.0)]:
        if rank == job.rank and t >= job.fault_s:
            return None
        old = trace[-1]
        if phase is not old.phase:
            trace.append(Moment(t, phase, t, old.step, old.step_at_s, old.collectives))
        t += duration
        if phase is not Phase.TRAIN and rank != job.rank:
            job.last_excuse_s = max(job.last_excuse_s, t)
    if rank == job.rank and t >= job.fault_s:
        return None
    old = trace[-1]
    trace.append(Moment(t, old.phase, old.phase_at_s, old.step, old.step_at_s, old.collectives + 1))
    return t


def play(
    job: Job,
    limits: Limits,
    until_s: float,
    pauses: tuple[tuple[float, float], ...] = (),
    answer: bool = True,
    state: HangState | None = None,
) -> Iterator[tuple[float, Output, HangState]]:
    """Feed the detector what the agents report until `until_s`; yields each output with the job's time."""
    detector = HangDetector(limits)
    state = detector.begin(job.plan(), state)
    held = 0.0  # how much longer than the job's time the clocks have run
    waiting = sorted(pauses)
    before: list[tuple[float, float]] = []
    for tick in range(int(until_s / limits.report_s) + 1):
        t = tick * limits.report_s
        while waiting and waiting[0][0] <= t:
            before.append(waiting.pop(0))
            held = sum(d for _, d in before)

        def ages(at: float, t: float = t) -> float:
            return t - at + sum(d for when, d in before if when > at)

        events: list[NodeProgress | StacksTaken | Ticked] = [Ticked()]
        for member in job.plan().members:
            ranks = range(member.first_rank, member.first_rank + member.slots)
            workers = tuple(job.worker(r, t, ages) for r in ranks)
            # Clocks of nodes differ by hours; only differences on one node may count.
            events.append(NodeProgress(member.node, "inc", 1, t + held + 3600 * member.group_rank, workers))
        while events:
            state, output = detector.step(state, events.pop(0), 500.0 + t + held)
            if output is None:
                continue
            yield t, output, state
            if isinstance(output, SuspectStacksWanted) and answer:
                stacks = {r: BUSY if r == job.rank else WAITING for r in output.ranks}
                events.append(StacksTaken("node0", "", 1, stacks))


def verdict_of(outputs: Iterator[tuple[float, Output, HangState]]) -> tuple[float, Verdict] | None:
    return next(((t, output) for t, output, _ in outputs if isinstance(output, Verdict)), None)


class Paper(msgspec.Struct):
    """What tests use of this file."""

    build: Callable[..., Job] = build
    play: Callable[..., Iterator[tuple[float, Output, HangState]]] = play
    verdict_of: Callable[..., tuple[float, Verdict] | None] = verdict_of
    waiting: str = WAITING
    busy: str = BUSY


@pytest.fixture(scope="session")
def paper() -> Paper:
    return Paper()

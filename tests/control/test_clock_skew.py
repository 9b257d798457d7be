"""C18: clocks of two hosts may differ by a minute; what is decided, and when, stays the same."""

from __future__ import annotations

import msgspec
import pytest

from everstep.control import lifecycle
from everstep.control.job import Command, Direct, Job
from everstep.control.watch import HangWatch
from everstep.core import events as e
from everstep.core.config import Hang, RunConfig
from everstep.core.types import (
    Activity,
    EpochPlan,
    Exit,
    ExitCause,
    JobSpec,
    NodeProgress,
    NodeReport,
    Phase,
    WorkerProgress,
    WorkerReport,
)

SPEC = JobSpec(job="j", min_nodes=2, max_nodes=2)


def report(node: str, seq: int, sent_s: float, **fields: object) -> NodeReport:
    base = NodeReport(node, f"i-{node}", seq, sent_s, slots=1, address=f"127.0.0.{seq}", store_port=1)
    return msgspec.structs.replace(base, **fields)


def history(skew_s: float) -> list[tuple[float, e.Input]]:
    """Two nodes join, run, a worker of node b dies 0.2 s before its report; b's clock is off by `skew_s`."""
    dead = WorkerReport(0, 9, gone=True, exit=Exit(ExitCause.SIGNAL, at_s=9.8 + skew_s, signal=9))
    alive = WorkerReport(0, 8)
    running = {"epoch": 1, "activity": Activity.RUNNING}
    stopped = {"epoch": 1, "activity": Activity.STOPPED}
    return [
        (0.0, e.JobSubmitted(SPEC)),
        (0.0, e.ControllerStarted(1)),
        (1.0, e.NodeReported(report("a", 1, 1.0))),
        (1.1, e.NodeReported(report("b", 1, 1.1 + skew_s))),
        (1.2, e.NodeReported(report("a", 2, 1.2, **running, workers=(alive,)))),
        (1.3, e.NodeReported(report("b", 2, 1.3 + skew_s, **running, workers=(WorkerReport(0, 9),)))),
        (10.0, e.NodeReported(report("b", 3, 10.0 + skew_s, **running, workers=(dead,)))),
        (10.1, e.NodeReported(report("a", 3, 10.1, **stopped))),
        (10.2, e.NodeReported(report("b", 4, 10.2 + skew_s, **stopped))),
    ]


def decisions(skew_s: float) -> tuple[Job, list[Command]]:
    job, commands = Job(SPEC), []
    for now, event in history(skew_s):
        job, more = lifecycle.step(job, event, now)
        commands += more
    return job, commands


def ends(commands: list[Command]) -> list[float]:
    records = [c.record for c in commands if not isinstance(c, Direct)]
    return [record.seen_s for record in records if isinstance(record, e.WorkerEnded)]


@pytest.mark.parametrize("skew_s", [-60.0, 60.0, 86_400.0])
def test_the_job_decides_the_same(skew_s: float) -> None:
    (job, commands), (other, skewed) = decisions(0.0), decisions(skew_s)
    assert job.epoch == other.epoch == 2
    assert [c for c in commands if isinstance(c, Direct)] == [c for c in skewed if isinstance(c, Direct)]
    assert ends(skewed) == pytest.approx(ends(commands), abs=1e-6)
    assert ends(commands)[0] == pytest.approx(9.8)


def first_verdict(skew_s: float) -> tuple[float, tuple[int, ...]]:
    """When, on the controller's clock, and on whom; rank 1 (node b) stops making steps at 5 s."""
    watch = HangWatch(RunConfig(hang=Hang(timeout_s=2.0)))
    plan = decisions(0.0)[0].plan
    assert isinstance(plan, EpochPlan)
    watch.new_epoch(msgspec.structs.replace(plan, epoch=1))
    for tenth in range(200):
        now = tenth / 10
        for node, rank, offset in (("a", 0, 0.0), ("b", 1, skew_s)):
            stuck = max(0.0, now - 5.0)
            steps = int(min(now, 5.0) * 10)
            worker = WorkerProgress(
                rank, 0, steps, -1, Phase.TRAIN, now, stuck, stuck, now, stopped=rank == 1 and stuck > 0
            )
            outcome = watch.saw(NodeProgress(node, f"i-{node}", 1, now + offset, (worker,)), now)
            if outcome.verdict is not None:
                return now, tuple(c.rank for c in outcome.verdict.culprits)
    raise AssertionError("no verdict")


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
def test_the_hang_detector_decides_the_same(skew_s: float) -> None:
    (at, who), (skewed_at, skewed_who) = first_verdict(0.0), first_verdict(skew_s)
    assert skewed_who == who == (1,)
    assert skewed_at == pytest.approx(at, abs=0.11)  # one heartbeat: sums of floats round differently

"""Reports of time-outs wait for the stacks of the others, a moment only, and for nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.control.job import Job, Stage
from everstep.control.patience import PATIENCE_S, SETTLE_S, Patience
from everstep.core.types import (
    Activity,
    EpochPlan,
    Exit,
    ExitCause,
    JobSpec,
    Member,
    NodeReport,
    Phase,
    StacksTaken,
    WorkerProgress,
    WorkerReport,
)

HEADER = "Current thread 0x00007f (most recent call first):\n"
BUSY = HEADER + '  File "/home/u/train.py", line 42 in between\n'
WAITING = HEADER + '  File "/v/site-packages/torch/autograd/graph.py", line 1 in _engine_run_backward\n'
GAVE_UP = Exit(ExitCause.ERROR, 99.0, message="RuntimeError: Timed out waiting 3000ms for recv operation to complete")
CLOSED = Exit(ExitCause.ERROR, 99.0, message="RuntimeError: Connection closed by peer")
OWN = Exit(ExitCause.ERROR, 99.0, message="ValueError: bad")
MEMBERS = tuple(Member(f"node{k}", f"i{k}", "127.0.0.1", k, 2 * k, 2) for k in range(2))
JOB = Job(JobSpec("j1"), stage=Stage.RUNNING, epoch=1, plan=EpochPlan(1, MEMBERS, 4, "127.0.0.1", 1, 0))
WORKERS = {r: WorkerProgress(r, r % 2, 5, 5, Phase.TRAIN, 2.0, 2.0, 2.0) for r in range(4)}


def report(node: int, *ends: Exit | None, **changes: Any) -> NodeReport:
    workers = tuple(WorkerReport(k, 10 + k, exit=end) for k, end in enumerate(ends))
    made = NodeReport(f"node{node}", f"i{node}", 7, 100.0, 2, "127.0.0.1", 1, 1, Activity.RUNNING, workers)
    return msgspec.structs.replace(made, **changes)


def complained() -> Patience:
    """Rank 0 gave up at time 10."""
    patience = Patience()
    assert patience.holds(JOB, report(0, GAVE_UP, None), 10.0)
    return patience


def stacks(node: int, texts: dict[int, str]) -> StacksTaken:
    return StacksTaken(f"node{node}", "", 1, texts)


def test_the_late_one_is_named_when_all_stacks_are_there() -> None:
    patience = complained()
    asked = dict(patience.questions(JOB.plan, WORKERS))  # type: ignore[arg-type]
    assert {node: x.local_ranks for node, x in asked.items()} == {"node0": (1,), "node1": (0, 1)}
    assert patience.questions(JOB.plan, WORKERS) == []  # type: ignore[arg-type]
    patience.saw(stacks(1, {2: WAITING, 3: BUSY}))
    assert patience.settle(JOB, WORKERS, 10.1) == (None, [])
    patience.saw(stacks(0, {1: WAITING}))
    assert patience.settle(JOB, WORKERS, 10.0 + SETTLE_S - 0.01) == (None, [])
    verdict, reports = patience.settle(JOB, WORKERS, 10.0 + SETTLE_S)
    assert verdict is not None and [(b.rank, b.node) for b in verdict.culprits] == [(3, "node1")]
    assert "rank 0 on node0 gave up waiting (RuntimeError: Timed out waiting 3000ms" in verdict.why
    assert "late was rank 3 on node1: " in verdict.why and "u/train.py:42" in verdict.why
    (released,) = reports
    assert released.sent_s == pytest.approx(100.0 + SETTLE_S), "the age of an end grows while its report is held"
    assert patience.settle(JOB, WORKERS, 10.3) == (None, [])


def test_stacks_that_do_not_come_are_not_waited_for_long() -> None:
    patience = complained()
    patience.questions(JOB.plan, WORKERS)  # type: ignore[arg-type]
    assert patience.settle(JOB, WORKERS, 10.0 + PATIENCE_S - 0.01) == (None, [])
    verdict, reports = patience.settle(JOB, WORKERS, 10.0 + PATIENCE_S)
    assert verdict is None and len(reports) == 1


def test_victims_of_other_nodes_wait_too_and_a_newer_report_takes_the_place_of_the_older() -> None:
    patience = complained()
    patience.questions(JOB.plan, WORKERS)  # type: ignore[arg-type]
    assert patience.holds(JOB, report(1, CLOSED, None), 10.05)
    assert patience.holds(JOB, report(0, GAVE_UP, GAVE_UP, seq=8), 10.1)
    assert patience.settle(JOB, WORKERS, 10.1) == (None, [])  # rank 3 alone may be late: its stacks are on their way
    patience.saw(stacks(1, {3: BUSY}))
    verdict, reports = patience.settle(JOB, WORKERS, 10.0 + SETTLE_S)
    assert verdict is not None and [b.rank for b in verdict.culprits] == [3]
    assert {(r.node, r.seq) for r in reports} == {("node0", 8), ("node1", 7)}


@pytest.mark.parametrize(
    "not_held",
    [
        report(0, OWN, None),
        report(0, GAVE_UP, OWN),
        report(0, CLOSED, None),  # a peer's death, which the job must hear of at once
        report(0, None, None),
        report(0, GAVE_UP, None, activity=Activity.STOPPING),
        report(0, GAVE_UP, None, epoch=0),
        report(0, GAVE_UP, None, incarnation="older"),
        report(5, GAVE_UP, None),
    ],
)
def test_everything_else_passes_at_once(not_held: NodeReport) -> None:
    assert not Patience().holds(JOB, not_held, 10.0)


def test_a_cause_of_its_own_ends_the_wait() -> None:
    patience = complained()
    patience.questions(JOB.plan, WORKERS)  # type: ignore[arg-type]
    assert not patience.holds(JOB, report(1, OWN, None), 10.1)
    evicting = msgspec.structs.replace(JOB, stage=Stage.EVICTING)
    verdict, reports = patience.settle(evicting, WORKERS, 10.1)
    assert verdict is None and [r.node for r in reports] == ["node0"]
    patience = complained()
    assert not patience.holds(JOB, report(0, GAVE_UP, OWN), 10.1)
    assert patience.settle(JOB, WORKERS, 10.1) == (None, [])


def test_an_epoch_that_is_over_is_not_judged() -> None:
    patience = complained()
    later = msgspec.structs.replace(JOB, epoch=2)
    verdict, reports = patience.settle(later, WORKERS, 10.1)
    assert verdict is None and len(reports) == 1

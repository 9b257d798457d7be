"""The critical path against closed forms, and orders that other systems published."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.detect.critical import Op, Schedule, Task, gpipe, growth, one_f_one_b, timeline

SECONDS = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.RECOMPUTE: 1.0, Op.INPUT: 1.0, Op.WEIGHT: 1.0, Op.UPDATE: 0.5}
# Varuna's generator for 4 stages and 4 micro-batches, first and last stage (microsoft/varuna): op,micro-batch
VARUNA = {0: "0,0;0,1;0,2;0,3;1,0;2,0;1,1;2,1;1,2;2,2;1,3;2,3", 1: "0,0;2,0;0,1;2,1;0,2;2,2;0,3;2,3"}


def lasts(task: Task, worker: int) -> float:
    return SECONDS[task.op]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9))
def test_bubble_is_the_closed_form(stages: int, micro_batches: int) -> None:
    """(P - 1) / (M + P - 1), for both orders."""
    for schedule in (gpipe(stages, micro_batches), one_f_one_b(stages, micro_batches)):
        step = timeline(schedule, lasts)
        assert step.step_s == pytest.approx(3 * (micro_batches + stages - 1) + 0.5)
        busy = step.busy_s(0) - 0.5
        assert 1 - busy / (step.step_s - 0.5) == pytest.approx((stages - 1) / (micro_batches + stages - 1))
        assert sum(step.on_path_s(w) for w in range(stages)) == pytest.approx(step.step_s)


def test_only_who_is_on_the_path_lengthens_the_step() -> None:
    """Stage 1 takes half as long as the others: slower by a half, nobody waits for long."""
    schedule = one_f_one_b(3, 8)
    uneven = lambda task, worker: lasts(task, worker) * (0.5 if worker == 1 else 1.0)  # noqa: E731
    assert growth(schedule, uneven, 1, 1.5) < 1.06 < 1.3 < growth(schedule, uneven, 0, 1.5)
    assert timeline(schedule, uneven).on_path_s(1) < timeline(schedule, uneven).on_path_s(0)


def test_transfers_count_between_workers_only() -> None:
    assert timeline(gpipe(2, 1), lasts, transfer_s=0.25).step_s == pytest.approx(6 + 2 * 0.25 + 0.5)
    alone: Schedule = [[*gpipe(2, 1)[0][:1], *gpipe(2, 1)[1], *gpipe(2, 1)[0][1:]]]
    assert timeline(alone, lasts, transfer_s=0.25).step_s == pytest.approx(7)


def test_published_orders_with_recompute_run() -> None:
    def order(stage: int, text: str) -> list[Task]:
        pairs = [tuple(map(int, one.split(","))) for one in text.split(";")]
        return [Task(Op(op), stage, m) for op, m in pairs]

    step = timeline([order(s, text) for s, text in VARUNA.items()], lasts)
    assert step.step_s == pytest.approx(15 + 1)  # two stages: the last works 12 s, from 1 s on, then 1 + 2 s more
    assert step.path[0] == Task(Op.FORWARD, 0, 0) and step.path[-1] == Task(Op.BACKWARD, 0, 3)


def test_zero_bubble_and_rerouted_micro_batches_are_just_data() -> None:
    """The replica's worker takes micro-batch 0 of stage 1 over; the update of a stage waits for both replicas."""
    first = [[Task(Op.FORWARD, 0, 0), Task(Op.BACKWARD, 0, 0), Task(Op.UPDATE, 0, 0)], [Task(Op.UPDATE, 1, 0)]]
    other: Schedule = [
        [Task(Op.FORWARD, 0, 1), Task(Op.INPUT, 0, 1), Task(Op.WEIGHT, 0, 1), Task(Op.UPDATE, 0, 1)],
        [Task(op, 1, m) for m in (0, 1) for op in (Op.FORWARD, Op.INPUT)]
        + [Task(Op.WEIGHT, 1, m) for m in (0, 1)]
        + [Task(Op.UPDATE, 1, 1)],
    ]
    step = timeline([*first, *other], lasts)
    assert step.begin_s[Task(Op.UPDATE, 1, 0)] == step.begin_s[Task(Op.UPDATE, 1, 1)] == 7
    assert step.begin_s[Task(Op.UPDATE, 0, 0)] == step.begin_s[Task(Op.UPDATE, 0, 1)] == 7


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([[Task(Op.BACKWARD, 0, 0), Task(Op.FORWARD, 0, 0)]], "cannot run"),
        ([[Task(Op.FORWARD, 0, 0)], [Task(Op.FORWARD, 0, 0)]], "again of worker 1"),
        ([[Task(Op.FORWARD, 1, 0)]], "nobody does"),
    ],
)
def test_impossible_schedules_are_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timeline(schedule, lasts)


def test_empty_schedule_takes_no_time() -> None:
    assert timeline([], lasts).step_s == 0.0

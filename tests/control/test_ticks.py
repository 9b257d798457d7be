"""What the journal gets of metrics and of each worker: seldom, the newest, and nothing that a rollback threw away."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from everstep.control.job import Job
from everstep.control.ticks import FIRST_S, WORKERS_S, Ticks
from everstep.core import events as e
from everstep.core.formation import Rollback
from everstep.core.logged import Logged
from everstep.core.types import JobSpec, NodeProgress, Phase, WorkerProgress
from everstep.core.work import StepWork

JOB = Job(JobSpec("demo"))
MB = 10**6


def worker(rank: int, **more: Any) -> WorkerProgress:
    known = {"step": 1, "total_step": 1, "phase": Phase.TRAIN, "phase_age_s": 0.0, "step_age_s": 0.0, "life_age_s": 0.0}
    return WorkerProgress(rank=rank, local_rank=rank, **{**known, **more})


def beat(*workers: WorkerProgress, epoch: int = 1) -> NodeProgress:
    return NodeProgress("n", "a", epoch, 0.0, workers)


def logs(rank: int, step: int, epoch: int = 1, **values: float) -> WorkerProgress:
    return worker(rank, logged=Logged(epoch, step, values or {"loss": float(step)}))


def metrics(records: list[e.Record]) -> list[tuple[int, dict[str, float]]]:
    return [(record.step, record.values) for record in records if isinstance(record, e.MetricsSeen)]


def workers(records: list[e.Record]) -> list[e.WorkersSeen]:
    return [record for record in records if isinstance(record, e.WorkersSeen)]


# Metrics ------------------------------------------------------------------------------------------------


def test_the_newest_values_once_a_second_and_before_an_incident() -> None:
    ticks = Ticks()
    told = [metrics(ticks.saw(beat(logs(0, step)), JOB, step / 4)) for step in range(1, 13)]
    assert [each[0][0] for each in told if each] == [1, 5, 9]
    assert metrics(ticks.flush(JOB, 3.0)) == [(12, {"loss": 12.0})]
    assert metrics(ticks.flush(JOB, 3.1)) == []
    assert metrics(ticks.saw(beat(logs(0, 12)), JOB, 9.0)) == []  # told already
    assert metrics(ticks.saw(beat(logs(0, 12, loss=12.0, rate=0.1)), JOB, 9.5)) == [(12, {"loss": 12.0, "rate": 0.1})]


def test_the_first_member_of_the_newest_formation_counts() -> None:
    ticks = Ticks()
    assert metrics(ticks.saw(beat(logs(0, 50), worker(1)), JOB, 1.0)) == [(50, {"loss": 50.0})]
    assert metrics(ticks.saw(beat(logs(0, 50), logs(1, 51, epoch=2)), JOB, 3.0)) == [(51, {"loss": 51.0})]
    assert metrics(ticks.saw(beat(logs(0, 50), logs(1, 52, epoch=2)), JOB, 5.0)) == [(52, {"loss": 52.0})]


def test_without_a_session_the_first_rank_that_logs_counts() -> None:
    ticks = Ticks()
    assert metrics(ticks.saw(beat(logs(2, 9, epoch=0), logs(1, 8, epoch=0)), JOB, 1.0)) == [(8, {"loss": 8.0})]
    gone = replace(logs(1, 8, epoch=0), phase=Phase.DONE)
    assert metrics(ticks.saw(beat(logs(2, 11, epoch=0), gone), JOB, 2.0)) == [(11, {"loss": 11.0})]
    assert metrics(ticks.saw(beat(logs(1, 1, epoch=0), epoch=2), JOB, 3.0)) == [(1, {"loss": 1.0})]  # a new attempt


def test_steps_that_all_went_back_behind_are_not_told_any_more() -> None:
    ticks, back = Ticks(), replace(JOB, rollbacks=(Rollback(2, 40),))
    assert metrics(ticks.saw(beat(logs(0, 50)), back, 1.0)) == []
    assert metrics(ticks.saw(beat(logs(0, 40)), back, 2.0)) == [(40, {"loss": 40.0})]
    assert metrics(ticks.saw(beat(logs(0, 50, epoch=2)), back, 4.0)) == [(50, {"loss": 50.0})]


# Workers ------------------------------------------------------------------------------------------------


def busy(rank: int, *own_s: float, **more: Any) -> WorkerProgress:
    steps = tuple(StepWork(number, seconds) for number, seconds in enumerate(own_s, 1))
    return worker(rank, work=steps, rss_bytes=(70 + rank) * MB + 1234, **more)


def test_each_workers_own_time_memory_and_kept_state() -> None:
    ticks = Ticks()
    assert ticks.saw(beat(busy(0, 0.1, 0.2, kept_step=40), busy(2, 0.3)), JOB, 100.0) == []
    (first,) = ticks.saw(beat(busy(0, 0.3, kept_step=41), busy(2)), JOB, 100.0 + FIRST_S)
    assert first == e.WorkersSeen(1, (0.2, -1.0, 0.3), (70 * MB, 0, 72 * MB), (41, -1, -1))
    (next_one,) = ticks.saw(beat(busy(0, 1 / 3), busy(2)), JOB, 102.0 + WORKERS_S)
    assert workers([next_one])[0].own_s == (0.333, -1.0, 0.3)  # a step that takes long is still the newest
    (last,) = ticks.saw(beat(busy(0)), JOB, 113.0 + WORKERS_S)
    assert workers([last])[0].own_s == (0.333, -1.0, -1.0)  # it was not heard any more
    (last,) = ticks.saw(beat(busy(0, step=0)), JOB, 123.0 + WORKERS_S)
    assert workers([last])[0].own_s == (-1.0, -1.0, -1.0)  # a new process in its place
    assert ticks.saw(beat(busy(0, 0.1), epoch=2), JOB, 124.0 + WORKERS_S) == []  # other workers
    (last,) = ticks.saw(beat(busy(0), epoch=2), JOB, 124.0 + WORKERS_S + FIRST_S)
    assert workers([last])[0] == e.WorkersSeen(2, (0.1,), (70 * MB,), (-1,))


def test_before_the_first_step_too_but_later() -> None:
    ticks = Ticks()
    told = [workers(ticks.saw(beat(busy(0, step=0)), JOB, float(second))) for second in range(15)]
    assert [second for second, records in enumerate(told) if records] == [WORKERS_S]


def test_up_to_date_before_an_incident_but_not_twice() -> None:
    ticks = Ticks()
    ticks.saw(beat(busy(0, 0.1)), JOB, 10.0)
    assert len(workers(ticks.flush(JOB, 10.0))) == 1
    assert workers(ticks.flush(JOB, 11.5)) == []  # nothing new
    assert workers(ticks.saw(beat(busy(0, 0.2)), JOB, 11.6)) == []
    assert len(workers(ticks.flush(JOB, 11.6))) == 1
    assert workers(ticks.saw(beat(busy(0, 0.4)), JOB, 12.0)) == []
    assert workers(ticks.flush(JOB, 12.0)) == []  # too soon
    assert workers(ticks.flush(JOB, 12.6))[0].own_s == (0.4,)


@pytest.mark.parametrize(("num_workers", "most"), [(8, 62), (1000, 12)])
def test_the_more_workers_the_more_seldom(num_workers: int, most: int) -> None:
    ticks, count = Ticks(), 0
    message = beat(*(busy(rank) for rank in range(num_workers)))
    for second in range(600):
        count += len(workers(ticks.saw(message, JOB, float(second))))
    assert most - 4 < count <= most

"""The step at which a stop meets every worker: ahead of where any of them can be, though each was heard a while ago."""

from __future__ import annotations

import msgspec
import pytest

from everstep.control.progress import STOP_LEAD_S, EpochProgress
from everstep.core.types import NodeProgress, Phase, WorkerProgress
from everstep.core.work import StepWork

PACE_S = 0.02


def beat(rank: int, at_s: float, *, began_s: float = 0.0, phase: Phase = Phase.TRAIN) -> NodeProgress:
    """Heartbeat of a node with one worker, which makes its steps at began_s + PACE_S, + 2 PACE_S, ..."""
    step = int((at_s - began_s) / PACE_S + 1e-6)
    age = at_s - began_s - step * PACE_S
    worker = WorkerProgress(
        rank=rank,
        local_rank=0,
        step=step,
        total_step=step,
        phase=phase if step else Phase.START,
        phase_age_s=0.0,
        step_age_s=age,
        life_age_s=age,
        first_step_age_s=at_s - began_s - PACE_S if step else -1.0,
    )
    return NodeProgress(f"node{rank}", "a", 1, at_s, (worker,))


def heard(*beats: NodeProgress) -> EpochProgress:
    progress = EpochProgress(1, 2)
    for message in beats:
        progress.add(message, message.sent_s)
    return progress


@pytest.mark.parametrize("now", [2.0, 2.3, 2.49])
def test_staggered_heartbeats_give_a_step_that_nobody_has_made_yet(now: float) -> None:
    progress = heard(beat(0, 1.0), beat(1, 1.4), beat(0, 1.5), beat(1, 1.9))
    step = progress.common_stop_step(now)
    assert step * PACE_S >= now + STOP_LEAD_S
    assert step * PACE_S <= now + 2 * STOP_LEAD_S


def test_a_pause_in_the_past_does_not_make_the_workers_seem_slow() -> None:
    """An evaluation of 8 s lies between step 50 and step 51; now they step as quickly as before."""
    progress = heard(beat(0, 1.0), beat(1, 1.0), beat(0, 9.5, began_s=8.0), beat(1, 9.5, began_s=8.0))
    progress.add(beat(0, 10.0, began_s=8.0), 10.0)
    progress.add(beat(1, 10.0, began_s=8.0), 10.0)
    assert progress.common_stop_step(10.4) * PACE_S >= 2.4 + STOP_LEAD_S


def test_who_is_ahead_does_not_tell_when_the_slowest_made_its_step() -> None:
    progress = heard(beat(0, 1.0), beat(1, 1.0))
    times = []
    for at_s in (1.1, 1.2, 1.3):
        progress.add(beat(0, at_s), at_s)  # heard first: then it is ahead by what it made since
        times.append((progress.step, progress.step_at_s))
        progress.add(beat(1, at_s), at_s)
    assert times == [(step, pytest.approx(step * PACE_S)) for step in (50, 55, 60)]


def test_a_save_is_no_reason_to_stop_at_different_steps() -> None:
    beats = (beat(0, 0.9), beat(1, 0.9), beat(0, 1.0, phase=Phase.SAVE), beat(1, 1.0))
    assert heard(*beats).common_stop_step(1.1) > 0


@pytest.mark.parametrize(
    "beats",
    [
        (beat(0, 1.0),),  # one was not heard yet
        (beat(0, 0.01), beat(1, 0.01)),  # no step yet
        (beat(0, 1.0), beat(1, 1.0, phase=Phase.DONE)),
        (beat(0, 9.0), beat(1, 9.0, began_s=6.0)),  # not in step: each for itself
    ],
)
def test_no_common_step(beats: tuple[NodeProgress, ...]) -> None:
    assert heard(*beats).common_stop_step(beats[-1].sent_s) == 0


def test_time_in_saves_is_that_of_the_worker_that_saves_longest() -> None:
    """Heartbeats tell of the steps since the one before."""

    def saving(rank: int, at_s: float, *seconds: float) -> NodeProgress:
        told = beat(rank, at_s)
        work = tuple(StepWork(step, PACE_S, save_s=s, twice_s=2 * s) for step, s in enumerate(seconds))
        return msgspec.structs.replace(told, workers=(msgspec.structs.replace(told.workers[0], work=work),))

    progress = heard(saving(0, 1.0, 0.01, 0.0), saving(1, 1.0, 0.002), saving(0, 1.5, 0.0), saving(1, 1.5, 0.003))
    assert progress.snapshot().stall_s == pytest.approx(0.01)
    progress.add(saving(1, 2.0, 0.25), 2.0)
    assert progress.snapshot().stall_s == pytest.approx(0.255)
    assert progress.snapshot().twice_s == pytest.approx(0.51)


def test_a_newcomer_whose_count_jumps_to_the_jobs_is_no_quick_worker() -> None:
    """A stop would be put off until far more steps were made than anybody makes meanwhile."""
    progress = heard(beat(0, 10.0), beat(1, 10.0, began_s=10.0 - PACE_S), beat(0, 10.1))
    told = beat(1, 10.1)
    work = (StepWork(500, 0.9 * PACE_S), StepWork(501, 0.95 * PACE_S))
    progress.add(msgspec.structs.replace(told, workers=(msgspec.structs.replace(told.workers[0], work=work),)), 10.1)
    assert 505 < progress.common_stop_step(10.1) < 505 + 1.3 * STOP_LEAD_S / PACE_S + 3


def test_a_newcomers_first_step_tells_no_pace() -> None:
    """It began at the job's count, a moment ago."""
    first = msgspec.structs.replace(beat(1, 10.1).workers[0], rank=1, first_step_age_s=1e-3, step_age_s=1e-4)
    progress = heard(beat(0, 10.0))
    progress.add(msgspec.structs.replace(beat(1, 10.1), workers=(first,)), 10.1)
    progress.add(beat(0, 10.2), 10.2)
    assert 505 < progress.common_stop_step(10.2) < 510 + 1.3 * STOP_LEAD_S / PACE_S + 3

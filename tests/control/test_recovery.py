"""The phases of an incident add up from the first sign to the first new step."""

from __future__ import annotations

import pytest

from everstep.control.recovery import Recovery
from everstep.core import events as e
from everstep.core.types import Exit, ExitCause


def seen(epoch: int, step: int, total: int, at: float, first: float) -> e.StepsSeen:
    return e.StepsSeen(epoch, step, total, step_at_s=at, first_step_at_s=first)


def stage(new: str) -> e.StageChanged:
    return e.StageChanged("", new)


def ended(rank: int, total: int, at: float) -> e.WorkerEnded:
    return e.WorkerEnded(rank, "n", Exit(ExitCause.SIGNAL, 0.0, step=total, total_step=total), at)


def test_one_incident_from_first_sign_to_first_step() -> None:
    recovery = Recovery()
    recovery.saw(seen(1, 10, 10, at=9.9, first=0.5), 10.0)
    recovery.saw(seen(1, 9, 9, at=9.8, first=0.5), 10.0)  # late, from a slower rank
    recovery.saw(ended(1, 11, 10.0), 10.0)
    recovery.saw(e.IncidentOpened("I001", "crash", (), ""), 10.0)
    recovery.saw(ended(0, 12, 10.1), 10.1)
    recovery.saw(stage("re-forming"), 10.1)
    recovery.saw(stage("running"), 10.15)
    assert recovery.saw(seen(1, 12, 12, at=9.95, first=0.5), 10.2) == []  # an old step told late
    (closed,) = recovery.saw(seen(2, 1, 9, at=10.65, first=10.6), 10.7)
    assert closed.outcome == "recovered"
    assert closed.downtime_s == pytest.approx(0.7)
    assert closed.phases == pytest.approx({"detect": 0.1, "stop": 0.1, "form": 0.05, "first-step": 0.45})
    assert list(closed.phases) == ["detect", "stop", "form", "first-step"]
    assert closed.redone_steps == 4  # 9 to 12
    assert recovery.saw(seen(2, 2, 10, at=10.8, first=10.6), 10.9) == []


def test_the_steps_of_who_failed_first_count_too() -> None:
    """Its end is told before the incident that it opens; an end in the next epoch is none of this incident's."""
    recovery = Recovery()
    recovery.saw(seen(1, 10, 10, at=9.9, first=0.5), 10.0)
    recovery.saw(ended(1, 12, 10.0), 10.0)
    recovery.saw(e.IncidentOpened("I001", "crash", (), ""), 10.0)
    recovery.saw(ended(0, 11, 10.1), 10.1)
    recovery.saw(stage("re-forming"), 10.1)
    recovery.saw(stage("running"), 10.2)
    recovery.saw(ended(0, 20, 10.3), 10.3)
    (closed,) = recovery.saw(seen(2, 1, 11, at=10.4, first=10.4), 10.4)
    assert closed.redone_steps == 2  # 11 and 12


@pytest.mark.parametrize(
    ("gap_s", "phases"),
    [(0.36, {"detect": 0.01, "first-step": 0.35}), (0.3, {"detect": 0.0, "first-step": 0.3}), (-1.0, None)],
)
def test_phases_add_up_to_what_the_survivors_measured(gap_s: float, phases: dict[str, float] | None) -> None:
    """The last heartbeat was 0.4 s before the fault, and the first step after it was told 0.35 s later."""
    recovery = Recovery()
    recovery.saw(seen(1, 10, 10, at=9.6, first=0.5), 9.6)
    recovery.saw(e.IncidentOpened("I001", "crash", (), ""), 10.0)
    (closed,) = recovery.saw(e.StepResumed(2, 12, gap_s), 10.35)
    assert closed.phases == pytest.approx({"detect": 0.4} if phases is None else phases)


def test_two_incidents_before_a_step_close_together() -> None:
    recovery = Recovery()
    recovery.saw(seen(1, 5, 5, at=0.9, first=0.5), 0.9)
    recovery.saw(e.IncidentOpened("I001", "crash", (), ""), 1.0)
    recovery.saw(stage("re-forming"), 1.1)
    recovery.saw(stage("running"), 1.2)
    recovery.saw(e.IncidentOpened("I002", "node-lost", (), ""), 1.3)
    recovery.saw(stage("re-forming"), 1.4)
    recovery.saw(stage("running"), 1.5)
    first, second = recovery.saw(seen(3, 1, 6, at=2.0, first=2.0), 2.0)
    assert (first.incident, second.incident) == ("I001", "I002")
    assert first.phases == pytest.approx({"detect": 0.1, "stop": 0.1, "form": 0.1, "first-step": 0.8})
    assert second.phases == pytest.approx({"detect": 0.4, "stop": 0.1, "form": 0.1, "first-step": 0.5})
    assert first.downtime_s == second.downtime_s == pytest.approx(1.1)


def test_a_step_that_the_old_epoch_still_made_ends_nothing() -> None:
    """The fault was noticed before that epoch's first step; and nothing is known of a step before it."""
    recovery = Recovery()
    recovery.saw(e.IncidentOpened("I001", "crash", (), ""), 1.0)
    assert recovery.saw(seen(1, 1, 1, at=1.05, first=1.05), 1.05) == []
    recovery.saw(stage("re-forming"), 1.1)
    recovery.saw(stage("running"), 1.2)
    (closed,) = recovery.saw(seen(2, 1, 1, at=2.0, first=2.0), 2.0)
    assert closed.downtime_s == -1.0
    assert closed.phases == pytest.approx({"stop": 0.1, "form": 0.1})


def test_the_end_of_the_job_closes_what_is_open() -> None:
    recovery = Recovery()
    recovery.saw(e.IncidentOpened("I001", "crash", (), ""), 1.0)
    recovery.saw(stage("re-forming"), 1.1)
    (closed,) = recovery.saw(e.JobEnded(1, "no restart left"), 2.0)
    assert closed.outcome == "job ended: no restart left"
    assert closed.phases == pytest.approx({"stop": 0.1})
    assert recovery.saw(e.JobEnded(1, ""), 3.0) == []


def test_a_slow_worker_does_not_recover_with_the_job() -> None:
    """Its incident ends when it is well again, and costs no downtime."""
    recovery = Recovery()
    recovery.saw(seen(1, 10, 10, at=9.9, first=0.5), 10.0)
    recovery.saw(e.IncidentOpened("S001", "slow", (), ""), 10.0)
    recovery.saw(e.IncidentOpened("I001", "crash", (), ""), 10.0)
    recovery.saw(stage("running"), 10.15)
    assert [c.incident for c in recovery.saw(seen(2, 1, 9, at=10.65, first=10.6), 10.7)] == ["I001"]
    assert not recovery.saw(e.JobEnded(0, ""), 11.0)

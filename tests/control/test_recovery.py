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


def test_one_incident_from_first_sign_to_first_step() -> None:
    recovery = Recovery()
    recovery.saw(seen(1, 10, 10, at=9.9, first=0.5), 10.0)
    recovery.saw(e.IncidentOpened("I001", "crash", (), ""), 10.0)
    recovery.saw(e.WorkerEnded(1, "n", Exit(ExitCause.SIGNAL, 0.0, step=11, total_step=11), 10.0), 10.0)
    recovery.saw(stage("re-forming"), 10.1)
    recovery.saw(stage("running"), 10.15)
    assert recovery.saw(seen(1, 11, 11, at=9.95, first=0.5), 10.2) == []  # an old step told late
    (closed,) = recovery.saw(seen(2, 1, 9, at=10.6, first=10.6), 10.7)
    assert closed.outcome == "recovered"
    assert closed.downtime_s == pytest.approx(0.7)
    assert sum(closed.phases.values()) == pytest.approx(closed.downtime_s)
    assert list(closed.phases) == ["detect", "stop", "form", "first-step"]
    assert closed.redone_steps == 3  # 9, 10 and 11
    assert recovery.saw(seen(2, 2, 10, at=10.8, first=10.6), 10.9) == []


def test_two_incidents_before_a_step_close_together() -> None:
    recovery = Recovery()
    recovery.saw(e.IncidentOpened("I001", "crash", (), ""), 1.0)
    recovery.saw(stage("re-forming"), 1.1)
    recovery.saw(stage("running"), 1.2)
    recovery.saw(e.IncidentOpened("I002", "node-lost", (), ""), 1.3)
    recovery.saw(stage("re-forming"), 1.4)
    recovery.saw(stage("running"), 1.5)
    closed = recovery.saw(seen(3, 1, 1, at=2.0, first=2.0), 2.0)
    assert [c.incident for c in closed] == ["I001", "I002"]
    assert all(c.downtime_s == -1.0 for c in closed)  # there was no step before


def test_the_end_of_the_job_closes_what_is_open() -> None:
    recovery = Recovery()
    recovery.saw(e.IncidentOpened("I001", "crash", (), ""), 1.0)
    (closed,) = recovery.saw(e.JobEnded(1, "no restart left"), 2.0)
    assert closed.outcome == "job ended: no restart left"
    assert recovery.saw(e.JobEnded(1, ""), 3.0) == []

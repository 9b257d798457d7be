"""What the accelerators' time is booked as, in jobs of 2 nodes with 2 workers whose every second is known."""

from __future__ import annotations

import pytest
from told_jobs import Told

from everstep.core import events as e
from everstep.core.formation import Stage
from everstep.core.types import (
    Blame,
    Exit,
    ExitCause,
    NodeLoss,
    Verdict,
)
from everstep.observe.view import Bucket, View


def spent(view: View) -> dict[str, float]:
    return {name: round(seconds, 6) for name, seconds in view.buckets.items() if round(seconds, 6)}


@pytest.fixture
def told() -> Told:
    """Four workers that made steps 1 to 10, at seconds 11 to 20; the last node came at second 1."""
    told = Told()
    told.joined(0, "n0")
    told.joined(1, "n1")
    told.epoch(1, 1, "n0", "n1")
    told.began(11, 20)
    return told


BEGIN = {Bucket.WAITING: 4 * 1.0, Bucket.START: 4 * 10.0}


def test_two_words_that_lie_close_together_are_no_leap(told: Told) -> None:
    """The second one came late of one worker, and early of another."""
    told.at(22.1, e.StepsSeen(1, 12, 12, 22.0, 11.0))
    told.at(23.1, e.StepsSeen(1, 13, 13, 22.0001, 11.0))
    told.at(24.1, e.StepsSeen(1, 14, 14, 24.0, 11.0))
    view = told.view()
    assert max(value for value in view.series["steps_per_s"].high if value is not None) <= 2.0
    assert min(value for value in view.series["step_s"].low if value is not None) >= 0.5
    assert view.step_s == pytest.approx(1.0)


def test_a_crash_with_a_restart(told: Told) -> None:
    """A step was under way for half a second, and 1.5 s later the end of its worker was known."""
    told.at(22, e.WorkerEnded(1, "n0", Exit(ExitCause.SIGNAL, 20.5, signal=9), 20.5))
    told.fault(22, "evicting")
    told.at(25, e.StageChanged("evicting", "re-forming"))
    told.epoch(26, 2, "n0", "n1")
    told.began(31, 33, epoch=2, total=8)
    told.at(33, e.IncidentClosed("I1", "recovered", 11.0, {}, 3))
    told.at(36, e.JobEnded(0, "done"))
    view = told.view()
    redone = 4 * (3 + 0.5)  # steps 8 to 10, and half of one
    assert spent(view) == {
        Bucket.WAITING: BEGIN[Bucket.WAITING] + 4 * 1.0,
        Bucket.START: BEGIN[Bucket.START] + 4 * 3.0,  # and after the last step
        Bucket.PRODUCTIVE: 4 * (9 + 2.0) - 4 * 3.0,
        Bucket.REDONE: redone,
        Bucket.DETECTION: 4 * 1.5,
        Bucket.RECOVERY: 4 * (3 + 5.0),
    }
    (incident,) = view.incidents
    lost = redone + 4 * (1.5 + 8 + 1)
    assert incident.cost["redone work"] == pytest.approx(redone)
    assert sum(incident.cost.values()) == pytest.approx(lost)
    assert view.costs == pytest.approx({"signal": lost, "start": 52.0, "waiting for capacity": 4.0})
    assert view.ettr == pytest.approx((9 + 2 - 3) / 36)
    assert (view.redone_steps, view.redone) == (3, [(17.0, 20.0)])
    assert [(line.at_s, line.phase) for line in incident.timeline][:2] == [(20.5, "sign"), (22.0, "detect")]


def test_survivors_go_on_while_a_place_is_filled_again(told: Told) -> None:
    told.seated(20, 1, "n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0")
    told.at(21, e.WorkerEnded(1, "n0", Exit(ExitCause.SIGNAL, 21, signal=9), 21))
    told.at(21, e.IncidentOpened("I1", "crash", (Blame(1, "n0", "signal"),), ""))
    told.seated(21, 2, "n0/0#0", "n1/0#0", "n1/1#0")
    told.at(21, e.StageChanged("running", "re-seating"))
    told.at(23, e.StepResumed(2, 11, 3.0), e.IncidentClosed("I1", "recovered", 3.0))
    told.at(23, e.StageChanged("re-seating", "running"))
    told.at(29, e.StepsSeen(1, 17, 17, 29, 11))
    told.waits(29, "n0", Stage.MEMBER, Stage.READY, life=1)
    told.at(31, e.StepsSeen(1, 19, 19, 31, 11))
    told.seated(31, 3, "n0/0#0", "n1/0#0", "n1/1#0", "n0/1#1")
    told.at(33, e.StepsSeen(1, 21, 21, 33, 11))
    view = told.view()
    assert spent(view) == BEGIN | {
        Bucket.PRODUCTIVE: 4 * 9 + 3 * (31 - 23) + 4 * 2.0,
        Bucket.REDONE: 4 * 1.0,  # the step that was under way
        Bucket.RECOVERY: 4 * 2 + (29 - 23.0),  # all, then the new process
        Bucket.STANDBY: 31 - 29.0,
    }
    assert view.incidents[0].cost["recovery"] == pytest.approx(14.0)
    assert [(x.links_kept, x.links_new, x.came) for x in view.epochs[-2:]] == [(2, 1, ()), (2, 2, ("n0/1#1",))]
    assert view.workers.roles == [0, 3, 1, 2]


def test_why_the_others_stopped_is_told_after_they_did(told: Told) -> None:
    """A worker ends with exit status 0 right after step 10."""
    told.seated(21, 1, "n0/0", "n0/1", "n1/0", "n1/1")
    told.seated(23, 2, "n0/0", "n1/0", "n1/1")
    told.at(23, e.StageChanged("running", "re-seating", "formation 2 of 3 workers"))
    told.at(24, e.IncidentOpened("I1", "left-early", (Blame(1, "n0", "left-early"),), "ended (exit 0) at step 10"))
    told.at(25, e.StepResumed(2, 11, 5.0), e.IncidentClosed("I1", "recovered", 5.0))
    told.at(25, e.StageChanged("re-seating", "running"), e.StepsSeen(1, 11, 11, 25.0, 11.0))
    view = told.view()
    expected = {Bucket.REDONE: 4 * 1.0, Bucket.DETECTION: 4 * 2.0, Bucket.RECOVERY: 3 * 2.0}
    assert view.incidents[0].cost == pytest.approx(expected)
    assert view.buckets["productive"] == pytest.approx(9 * 4)


def test_the_curve_ends_where_the_books_do(told: Told) -> None:
    """One of four does nothing; whether the others made steps since second 25 is told later."""
    told.seated(20, 1, "n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0")
    told.at(20, e.DrainAsked("n1/1"))
    told.seated(20, 2, "n0/0#0", "n0/1#0", "n1/0#0")
    told.at(25, e.StepsSeen(1, 15, 15, 25, 11))
    told.at(28.6, e.SaveRequested(15))
    curve = told.view().bucket_series[Bucket.STANDBY]
    assert (len(curve.mean), curve.mean[20:]) == (25, [0.25] * 5)
    told.at(28.7, e.StepsSeen(1, 18, 18, 28.65, 11))  # but for the twelfth part of a bin
    assert told.view().bucket_series[Bucket.STANDBY].mean[20:28] == [0.25] * 8
    assert len(told.view().bucket_series[Bucket.STANDBY].mean) == 29


def test_a_place_that_was_drained_is_not_filled_again(told: Told) -> None:
    told.seated(20, 1, "n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0")
    told.at(20, e.DrainAsked("n1/1"))
    told.seated(20, 2, "n0/0#0", "n0/1#0", "n1/0#0")
    told.at(25, e.StepsSeen(1, 15, 15, 25, 11), e.DrainAsked("n1/1", undo=True))
    told.at(27, e.StepsSeen(1, 17, 17, 27, 11))
    told.seated(27, 3, "n0/0#0", "n0/1#0", "n1/0#0", "n1/1#1")
    told.at(28, e.StepsSeen(1, 18, 18, 28, 11))
    expected = {Bucket.PRODUCTIVE: 36 + 3 * 7 + 4.0, Bucket.STANDBY: 5.0, Bucket.START: 40 + 2.0}
    assert spent(told.view()) == BEGIN | expected


def test_a_node_that_is_missing_is_waited_for_and_charged_to_its_loss(told: Told) -> None:
    told.at(21, e.NodeLost("n1", "i", NodeLoss.DIED))
    told.at(21, e.IncidentOpened("I1", "node-lost", (Blame(-1, "n1", "node lost: died"),), "lost n1"))
    told.at(21, e.StageChanged("running", "evicting"), e.StageChanged("evicting", "re-forming"))
    told.at(30, e.Ticked())
    view = told.view()
    expected = BEGIN | {Bucket.PRODUCTIVE: 36.0, Bucket.REDONE: 4 * 1.0}
    assert spent(view) == expected | {Bucket.WAITING: 4 + 4 * 9.0}
    assert (view.fleet.acting, view.fleet.missing) == (2, 2)
    assert view.costs["node lost: died"] == pytest.approx(40.0)


def test_a_hang_is_detection_beyond_one_step(told: Told) -> None:
    told.at(24, e.StageChanged("running", "suspect"))
    told.at(30, e.HangJudged(1, Verdict("hang", (Blame(1, "n0", "hang"),), "")))
    told.fault(30, "evicting", "hang")
    told.at(32, e.Ticked())
    expected = BEGIN | {Bucket.PRODUCTIVE: 36.0, Bucket.REDONE: 4.0, Bucket.DETECTION: 36.0, Bucket.RECOVERY: 8.0}
    assert spent(told.view()) == expected


def test_a_suspicion_that_was_wrong_costs_nothing(told: Told) -> None:
    told.at(24, e.StageChanged("running", "suspect"))
    told.at(28, e.Ticked())
    view = told.view()
    assert spent(view)[Bucket.DETECTION] == 16.0 and view.costs["detection"] == pytest.approx(16.0)
    told.at(30, e.StepsSeen(1, 11, 11, 29.5, 11), e.StageChanged("suspect", "running"))
    assert spent(told.view()) == BEGIN | {Bucket.PRODUCTIVE: 36 + 40.0}


def test_all_wait_for_a_slow_one(told: Told) -> None:
    """Since step 5 each step takes a quarter longer than it should; so a fifth of the time is lost."""
    verdict = Verdict("slow", (Blame(3, "n1", "slow-compute"),), "slow")
    told.at(20, e.IncidentOpened("I1", "slow", verdict.culprits, "slow"))
    told.at(20, e.SlowJudged("I1", verdict, "compute", 0.25, 5, 10))
    told.at(30, e.StepsSeen(1, 20, 20, 30, 11))
    view = told.view()
    assert view.buckets["straggler loss"] == pytest.approx(4 * (5 + 10) / 5)
    assert view.incidents[0].cost == pytest.approx({"straggler loss": 12.0})
    assert (view.fleet.slow, view.workers.states) == (1, [0, 0, 0, 3])
    told.at(30, e.IncidentClosed("I1", "recovered"))
    told.at(40, e.StepsSeen(1, 30, 30, 40, 11))
    view = told.view()
    assert view.buckets["straggler loss"] == pytest.approx(12.0) and view.fleet.slow == 0


def test_the_pass_of_an_audited_step_that_is_not_committed_is_redundant(told: Told) -> None:
    told.at(30, e.StepsSeen(1, 20, 20, 30, 11, stall_s=1.0, twice_s=2.0))
    told.at(40, e.StepsSeen(1, 30, 30, 40, 11, stall_s=1.0, twice_s=2.5))
    view = told.view()
    assert view.buckets[Bucket.REDUNDANCY] == pytest.approx(4 * 2.5)
    assert view.buckets[Bucket.PRODUCTIVE] == pytest.approx(4 * (29 - 3.5))
    assert view.ettr == pytest.approx((29 - 3.5) / 40)


def test_steps_until_a_planned_end_of_an_epoch_count(told: Told) -> None:
    """Told to stop at step 13; that it was made is written down after the epoch is over."""
    told.at(21, e.IncidentOpened("I1", "grow", (), "a place is free"), e.StageChanged("running", "evicting"))
    told.at(24, e.StageChanged("evicting", "re-forming"), e.StepsSeen(1, 13, 13, 23, 11))
    told.epoch(24, 2, "n0", "n1")
    told.began(30, 31, epoch=2, total=14)
    assert spent(told.view()) == BEGIN | {Bucket.PRODUCTIVE: 4 * (12 + 1.0), Bucket.RECOVERY: 4 * 7.0}


def test_what_goes_back_to_a_kept_state_is_redone(told: Told) -> None:
    told.seated(20, 1, "n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0")
    told.fault(20, "re-seating")
    told.at(21, e.StateRestored(2, 4, 10, 6), e.StageChanged("re-seating", "running"))
    told.at(24, e.StepsSeen(1, 7, 7, 24, 11))
    view = told.view()
    assert spent(view) == BEGIN | {Bucket.PRODUCTIVE: 4 * (3 + 3.0), Bucket.REDONE: 4 * 6.0, Bucket.RECOVERY: 4.0}
    assert (view.step, view.steps, view.redone_steps) == (10, 13, 6)


def test_steps_that_were_taken_back_before_they_were_told(told: Told) -> None:
    """Half of the 4 s since the newest step that was told went into two more, and one was under way."""
    told.seated(20, 1, "n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0")
    told.fault(24, "re-seating", "corrupt")
    told.at(25, e.StateRestored(2, 8, 12, 4), e.StageChanged("re-seating", "running"))
    view = told.view()
    redone = 4 * (2 + 1 + 2.0)
    expected = BEGIN | {Bucket.PRODUCTIVE: 4 * 7.0, Bucket.REDONE: redone, Bucket.RECOVERY: 4.0, Bucket.DETECTION: 4.0}
    assert spent(view) == expected
    assert view.incidents[0].cost["redone work"] == pytest.approx(redone)
    assert (view.step, view.steps, view.redone_steps) == (12, 12, 4)


def test_an_epoch_that_began_at_zero_without_a_count(told: Told) -> None:
    """All that was done before is done again, and not what it has made since."""
    told.fault(20, "evicting")
    told.epoch(20, 2, "n0", "n1")
    told.began(25, 27, epoch=2, total=-1)
    assert told.view().step == 13
    told.at(27, e.Alert("step-fell-back", "the step counter fell back"))
    view = told.view()
    assert spent(view) == BEGIN | {Bucket.PRODUCTIVE: 4 * 2.0, Bucket.REDONE: 36.0, Bucket.RECOVERY: 20.0}
    assert (view.redone_steps, view.step) == (10, 10)


def test_a_spare_node_is_idle_and_takes_the_place_of_a_lost_one() -> None:
    told = Told()
    told.joined(0, "n0", "n1", "n2")
    told.epoch(0, 1, "n0", "n1")
    told.began(5, 10)
    told.at(10, e.NodeLost("n1", "i", NodeLoss.DIED))
    told.fault(10, "evicting", "node-lost", rank=-1)
    told.epoch(10, 2, "n0", "n2")
    told.began(15, 16, epoch=2, total=7)
    view = told.view()
    assert spent(view) == {
        Bucket.START: 20.0, Bucket.PRODUCTIVE: 24.0, Bucket.RECOVERY: 20.0, Bucket.STANDBY: 2 * 10.0
    }  # fmt: skip
    assert (view.fleet.total, view.fleet.missing) == (4, 0)

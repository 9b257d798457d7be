"""A step counter that falls back: redone steps are normal, a start from scratch is told."""

from __future__ import annotations

from everstep.core.events import StepsSeen
from everstep.detect.fallback import Counted, FellBack, How, compare


def follow(*seen: tuple[int, int, int, int]) -> list[FellBack]:
    """Feed (epoch, step, total_step, loads)."""
    counted, found = Counted(), []
    for epoch, step, total, loads in seen:
        counted, fell = compare(counted, StepsSeen(epoch, step, total, 0.0), loads)
        found += [fell] if fell else []
    return found


def test_resumed_from_an_older_checkpoint() -> None:
    (fell,) = follow((1, 1, 1, 0), (1, 40, 40, 0), (2, 1, 31, 3), (2, 30, 60, 3))
    assert (fell.how, fell.steps, fell.epoch) == (How.REDONE, 10, 2)
    assert fell.alert().kind == "steps-redone" and "10 steps" in fell.text


def test_resumed_exactly_or_beyond() -> None:
    assert follow((1, 40, 40, 0), (2, 1, 41, 1), (3, 1, 43, 1)) == []


def test_first_report_of_an_epoch_may_come_late() -> None:
    (fell,) = follow((1, 40, 40, 0), (2, 4, 34, 3))
    assert fell.steps == 10


def test_from_scratch_with_and_without_a_count() -> None:
    for case in ([(1, 40, 40, 0), (2, 1, 1, 0)], [(1, 40, -1, 0), (2, 1, -1, 0)], [(1, 40, 40, 0), (2, 2, 2, 1)]):
        (fell,) = follow(*case)
        assert (fell.how, fell.steps) == (How.SCRATCH, 40)
        assert fell.alert().kind == "step-fell-back" and "40 steps are lost" in fell.text


def test_unknown_count_but_something_was_loaded() -> None:
    assert follow((1, 40, -1, 0), (2, 1, -1, 2)) == []


def test_attempts_too_short_to_lose_anything_and_epochs_without_steps() -> None:
    assert follow((1, 1, 1, 0), (2, 1, 1, 0)) == []
    assert follow((1, 40, 40, 0), (2, 0, -1, 0)) == []
    (fell,) = follow((1, 40, 40, 0), (2, 0, -1, 0), (3, 1, 1, 0))
    assert fell.epoch == 3


def test_each_epoch_is_judged_once_and_against_the_best() -> None:
    found = follow((1, 40, 40, 0), (2, 1, 31, 1), (2, 5, 35, 1), (3, 1, 31, 1))
    assert [(f.epoch, f.steps) for f in found] == [(2, 10), (3, 10)]

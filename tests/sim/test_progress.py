"""Steps and saves in closed form, against the same made one by one."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everstep.sim.arrivals import Aging
from everstep.sim.chance import exponential, weibull
from everstep.sim.fleet import Fleet
from everstep.sim.progress import Pace, Progress
from everstep.sim.scenario import Cluster, Failures

PACE = Pace(2.0, 16.0)


class Slowly:
    """Second by second, and a step or a save at a time."""

    def __init__(self, every: int, stall_s: int) -> None:
        self.every, self.stall_s = every, stall_s
        self.steps = self.since = self.done_s = self.idle_s = 0
        self.saves: list[tuple[float, int]] = []
        self.saving = False

    def second(self, now: float) -> None:
        self.done_s += 1
        self.idle_s += 1
        if self.saving and self.done_s == self.stall_s:
            self.saves.append((now + 1, self.steps))
            self.saving, self.since, self.done_s = False, 0, 0
        elif not self.saving and self.done_s == PACE.step_s:
            self.steps, self.since, self.done_s, self.idle_s = self.steps + 1, self.since + 1, 0, 0
            self.saving = bool(self.every) and self.since == self.every

    def failing(self, now: float, lag_s: int) -> int | None:
        """Steps of the first save that is not durable yet."""
        pending = [steps for at, steps in self.saves if at + lag_s > now] + [self.steps] * self.saving
        return pending[0] if pending else None


SPANS = st.lists(st.integers(1, 90), min_size=1, max_size=8)


@given(st.integers(0, 5), st.integers(1, 4), st.integers(0, 9), SPANS, st.integers(0, 7))
@example(2, 4, 1, [7, 4], 0)  # the first save ends with the second span
@example(2, 3, 0, [5, 1, 1], 0)
@example(3, 1, 9, [90, 8], 4)
@settings(max_examples=150, deadline=None)
def test_closed_form_is_the_sum_of_its_seconds(
    every: int, stall_s: int, lag_s: int, spans: list[int], undoes: int
) -> None:
    fast, slow, now = Progress(every, stall_s, lag_s, undoes=undoes), Slowly(every, stall_s), 0
    for span in spans:
        stepping_s, stalls_s = fast.advance(now, span, PACE)
        for second in range(now, now + span):
            slow.second(second)
        now += span
        assert stepping_s + stalls_s == pytest.approx(span)
        assert (fast.steps, fast.saves) == (slow.steps, len(slow.saves))
        assert fast.worth == pytest.approx((fast.steps + fast.part) * PACE.worth)
        durable = max((steps for at, steps in slow.saves if at + lag_s <= now), default=0)
        assert fast.durable(now).steps == durable
        assert fast.last_s == pytest.approx(now - slow.idle_s)
    failing = slow.failing(now, lag_s)
    if undoes and failing is not None:
        durable = min(durable, max(0, failing - undoes))
    lost, worth = fast.roll_back(now)
    assert (lost, fast.steps) == (slow.steps - durable, durable)
    assert fast.worth == pytest.approx(durable * PACE.worth)
    assert worth >= lost * PACE.worth - 1e-6


def test_a_save_may_follow_the_next_step() -> None:
    progress = Progress(10, 1.0)
    progress.advance(0, 6.0, PACE)
    progress.save_next()
    assert progress.advance(6, 3.0, PACE) == (2.0, 1.0)
    assert progress.durable(9.0).steps == 4
    progress.advance(9, 20.5, PACE)
    progress.save_next()  # while one is under way
    progress.advance(29.5, 3.5, PACE)
    assert progress.durable(33.0).steps == 15


def test_a_failed_save_takes_back_the_last_steps_redone_ones_among_them() -> None:
    progress = Progress(5, 1.0, aligned=True, undoes=3)
    progress.advance(0, 15.0, PACE)
    progress.roll_back(15.0)  # from 7 steps to the save of 5
    progress.advance(15, 6.5, PACE)  # 8, 9, 10: the next save begins
    assert progress.steps == 8 and progress.failing(21.5) == (5, 5 * PACE.worth)
    progress.roll_back(21.5)
    progress.advance(21.5, 0.5, PACE)  # it goes on, but counts no more
    assert (progress.steps, progress.failing(22.0), progress.durable(22.0).steps) == (5, None, 5)
    progress.advance(22, 10.5, PACE)
    assert progress.failing(32.5) == (7, 7 * PACE.worth)


class Fixed:
    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value

    def gauss(self, mu: float, sigma: float) -> float:
        return mu + sigma


def test_draws() -> None:
    median = Fixed(0.5)
    assert exponential(median, 10.0) == pytest.approx(10 * math.log(2))
    assert weibull(median, 10.0, 1.0, age=5.0) == pytest.approx(10 * math.log(2))
    assert weibull(median, 10.0, 2.0) == pytest.approx(10 * math.log(2) ** 0.5)


def test_only_switches_bring_spares_of_other_slices() -> None:
    for optical, expected in ((True, 9), (False, -1)):
        fleet = Fleet(8, 2, replicas=2, per_slice=4, optical=optical)
        fleet.lose(8)
        assert fleet.lose(1) == 1
        assert fleet.whole_replicas == 1
        assert fleet.fits(1) == expected
        fleet.back(1)
        fleet.fill()
        assert not fleet.missing and fleet.seat_of(1 if not optical else 9) == 1


def test_a_slice_takes_its_own_spare() -> None:
    fleet = Fleet(8, 0, replicas=2, per_slice=4)
    for node in (1, 5, 6):
        fleet.lose(node)
    fleet.back(6)
    assert (fleet.fits(1), fleet.fits(5)) == (-1, 6)


def test_a_repaired_node_does_not_fail_when_its_old_part_would_have() -> None:
    planned: list[tuple[float, int]] = []
    spec, fleet = Failures(kind="weibull", rate=1000.0, shape=2.0), Fleet(1, 0, replicas=1)
    ages = Aging(spec, Cluster(), fleet, random.Random(3), lambda at_s, node: planned.append((at_s, node)))
    ages.begin(0.0)
    old_s = planned[0][0]
    ages.renewed(0, old_s - 1.0)
    new_s = planned[1][0]
    assert new_s > old_s and ages.victims(0, old_s) == [] and ages.victims(0, new_s) == [0]

"""The interval between saves: closed forms against published numbers, the tuner against a modelled job."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.plan.interval import Cost, Tuner, efficiency, interval_steps, optimal_period_s


@pytest.mark.parametrize(
    ("period", "cost", "downtime", "recovery", "expected"),
    [(44.8, 5, 10, 5, 0.7255), (20, 5, 10, 5, 0.6561), (120, 5, 10, 5, 0.6296), (7.9, 1 / 6, 0.5, 0.5, 0.9531)],
)
def test_efficiency(period: float, cost: float, downtime: float, recovery: float, expected: float) -> None:
    """Minutes. For 120 a simulation of the same model gave 0.6305 +- 0.001."""
    assert efficiency(period, 185.6, cost, downtime, recovery) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("mttf_s", "period_s", "best"), [(240601, 17194, 0.9285), (60150, 8701, 0.8559), (7519, 3218, 0.5971)]
)
def test_optimum_of_aupy_et_al(mttf_s: float, period_s: float, best: float) -> None:
    assert round(optimal_period_s(mttf_s, 600)) == period_s
    assert efficiency(period_s, mttf_s, 600, 60, 600) == pytest.approx(best, abs=5e-5)


@given(st.floats(10, 1e7), st.floats(1e-6, 2))
def test_nothing_near_the_optimum_is_better(mttf_s: float, ratio: float) -> None:
    cost_s = mttf_s * ratio
    best = optimal_period_s(mttf_s, cost_s)
    assert best > cost_s
    for other in (best * 0.97, best * 1.03):
        assert efficiency(best, mttf_s, cost_s, 1, 1) >= efficiency(other, mttf_s, cost_s, 1, 1)


def test_the_interval_respects_work_bound_and_failures() -> None:
    assert interval_steps(Cost(-1.0, -1.0, -1.0), 0.01) == 1
    assert interval_steps(Cost(1.0, 0.0, 0.1), 0.01) == 1
    assert interval_steps(Cost(1.0, 0.0, 3.2), 0.01) == 4
    assert interval_steps(Cost(1.0, 0.055, 0.1), 0.01) == 6
    assert interval_steps(Cost(1.0, 0.055, 0.1), 0.01, mttf_s=7200) == round(optimal_period_s(7200, 0.055))


class Job:
    """Steps of 1 s +- noise; a save adds `stall_s` over the steps of its window, which lasts `whole_s`, and `after_s`

    to the next one; one step in ten is slow.
    """

    def __init__(self, stall_s: float, whole_s: float, after_s: float, seed: int) -> None:
        self.stall_s, self.whole_s, self.after_s = stall_s, whole_s, after_s
        self.random = random.Random(seed)
        self.tuner = Tuner()
        self.spent = self.stalled = 0.0

    def run(self, num_steps: int) -> list[int]:
        saves, left, after = [], 0.0, 0.0
        for step in range(num_steps):
            extra, after = after, 0.0
            self.stalled += extra
            if left > 0:
                share = self.stall_s / max(1, math.ceil(self.whole_s))
                extra += share
                self.stalled += share
            seconds = self.random.gauss(1.0, 0.002) + extra + 0.04 * (self.random.random() < 0.1)
            self.spent += seconds
            self.tuner.stepped(seconds)
            if left > 0:
                left -= 1.0
                if left <= 0:
                    self.tuner.ended(self.whole_s)
                    after = self.after_s
            if self.tuner.due:
                self.tuner.began()
                left = self.whole_s
                saves.append(step)
        return saves


@pytest.mark.parametrize(("stall_s", "whole_s", "after_s"), [(0.05, 0.4, 0.0), (0.3, 2.5, 0.1), (0.0, 6.0, 0.0)])
def test_the_tuner_finds_the_shortest_interval_within_the_bound(stall_s: float, whole_s: float, after_s: float) -> None:
    job = Job(stall_s, whole_s, after_s, seed=3)
    saves = job.run(3000)
    best = max(math.ceil(whole_s), math.ceil((stall_s + after_s) / job.tuner.bound))
    last = [late - early for early, late in zip(saves[-20:-1], saves[-19:], strict=True)]
    assert sum(last) / len(last) == pytest.approx(best, rel=0.2, abs=1)
    spent, stalled = job.spent, job.stalled
    job.run(3000)
    assert (job.stalled - stalled) / (job.spent - spent) <= job.tuner.bound


def test_no_save_before_steps_were_profiled_or_while_one_runs() -> None:
    tuner = Tuner()
    assert not tuner.due
    for _ in range(7):
        tuner.stepped(1.0)
    assert tuner.due
    tuner.began()
    for _ in range(50):
        tuner.stepped(1.0)
    assert not tuner.due
    tuner.ended(0.5)
    assert not tuner.due
    for _ in range(2):  # one pays for what follows the save, one is quiet
        tuner.stepped(1.0)
    assert tuner.due


def test_first_steps_that_were_slow_do_not_hide_what_saves_cost() -> None:
    """Saves then seem to cost nothing, and come so often that no step is quiet."""
    job = Job(stall_s=0.1, whole_s=0.4, after_s=0.0, seed=5)
    for _ in range(7):
        job.tuner.stepped(1.1)
    saves = job.run(1500)
    last = [late - early for early, late in zip(saves[-20:-1], saves[-19:], strict=True)]
    assert sum(last) / len(last) == pytest.approx(10, rel=0.2, abs=1)

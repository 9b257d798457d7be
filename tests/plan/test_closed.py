"""Closed forms against known numbers, and against the processes that they stand for (fixed seeds; errors are stated).

`benchmarks/simulator_forms.py` does the same for every case of SYSTEMS section 15 with ten times the runs.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.plan import closed, interval
from everstep.testing import chance
from everstep.testing.chance import Played

RUNS = 40_000


def dice() -> np.random.Generator:
    return np.random.default_rng(15)


def agrees(form: float, played: Played) -> None:
    """Within 1 %, and the standard error is small enough to tell."""
    assert 3 * played.error < 0.01 * played.mean
    assert form == pytest.approx(played.mean, rel=0.01)


def test_mean_time_to_failure() -> None:
    form = closed.mttf_s(128, 6.5e-3) / 3600
    assert form == pytest.approx(28.8, abs=0.05)
    played = chance.first_failure(128, 6.5e-3 / 24, 100_000, dice())
    agrees(form, played)


@pytest.mark.parametrize(("gpus", "every", "known", "linear"), [
    (16_000, 60, 0.7202, 0.684), (16_000, 5, 0.9345, 0.932), (100_000, 7, 0.6150, 0.520)])  # fmt: skip
def test_non_blocking_saves(gpus: int, every: float, known: float, linear: float) -> None:
    """Minutes; a recovery takes 5. Meta's linear form gives less."""
    mttf = closed.mttf_s(gpus // 8, 6.5e-3) / 60
    form = closed.ettr_non_blocking(mttf, every, 5)
    assert form == pytest.approx(known, abs=1e-4)
    assert closed.ettr_linear(mttf, every, 5) == pytest.approx(linear, abs=1e-3)
    agrees(form, chance.non_blocking(mttf, every, 5, 200_000, dice()))


@pytest.mark.parametrize(("period", "mttf", "cost", "down", "recovery"), [
    (44.8, 185.6, 5, 10, 5), (120, 185.6, 5, 10, 5), (7.9, 185.6, 1 / 6, 0.5, 0.5),
    (3218, 7519, 600, 60, 600)])  # fmt: skip
def test_blocking_saves(period: float, mttf: float, cost: float, down: float, recovery: float) -> None:
    form = interval.efficiency(period, mttf, cost, down, recovery)
    agrees(form, chance.blocking(period, mttf, cost, down, recovery, 200_000, dice()))


@pytest.mark.parametrize(("period", "inner", "costs", "rates", "downs"), [
    (20.0, 12, (0.5, 4.0), (1 / 185.6, 1 / 2000), (2.0, 30.0)),
    (5.0, 40, (0.1, 2.0), (1 / 60, 1 / 500), (1.0, 10.0)),
])  # fmt: skip
def test_two_tiers(
    period: float, inner: int, costs: tuple[float, float], rates: tuple[float, float], downs: tuple[float, float]
) -> None:
    form = closed.two_level_efficiency(period, inner, costs, rates, downs)
    agrees(form, chance.two_tiers(period, inner, costs, rates, downs, RUNS, dice()))


@given(st.floats(1, 1e4), st.floats(10, 1e5), st.floats(0, 0.5), st.floats(0, 100), st.integers(1, 50))
def test_a_tier_without_failures_of_its_own_is_none(
    period: float, mttf: float, cost: float, down: float, inner: int
) -> None:
    """Then only the other one's form is left, whichever of both it is."""
    if period > 100 * mttf:
        return
    one = interval.efficiency(period, mttf, cost, down, 0)
    form = closed.two_level_efficiency
    assert form(period, inner, (cost, 0), (1 / mttf, 0), (down, 0)) == pytest.approx(one, abs=1e-9)
    assert form(period, 1, (0, cost), (0, 1 / mttf), (0, down)) == pytest.approx(one, abs=1e-9)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (4, 8), (8, 32), (16, 16)])
def test_the_bubble_of_1f1b(stages: int, micro_batches: int) -> None:
    played = chance.one_forward_one_backward(stages, micro_batches)
    assert closed.bubble_1f1b(stages, micro_batches) == pytest.approx(played, abs=1e-9)


@pytest.mark.parametrize("members", [2, 5, 64])
def test_a_ring(members: int) -> None:
    assert closed.ring_all_reduce_s(1e9, 25e9, members) == pytest.approx(chance.ring(1e9, 25e9, members), rel=1e-9)


def test_placement_as_played() -> None:
    played = chance.placement(16, 2, 3, 8000, dice())
    assert played.mean == pytest.approx(0.8, abs=4 * played.error)


def test_spares_by_quantile() -> None:
    found = [closed.binomial_quantile(machines, 0.0012, 0.99) for machines in (128, 256, 512, 1024)]
    assert found == [2, 2, 3, 4]
    days = chance.failing(1024, 0.0012, 400_000, dice())
    assert (days <= 4).mean() >= 0.99 > (days <= 3).mean()


@given(st.integers(1, 40), st.floats(0.01, 0.99), st.floats(0.01, 0.999))
def test_a_quantile_is_the_least_that_suffices(num: int, probability: float, level: float) -> None:
    found = closed.binomial_quantile(num, probability, level)
    mass = [_exactly(num, probability, k) for k in range(num + 1)]
    upto = list(itertools.accumulate(mass))
    assert upto[found] >= level - 1e-9
    assert found == 0 or upto[found - 1] < level + 1e-9


def _exactly(num: int, probability: float, k: int) -> float:
    ways = 1.0
    for i in range(k):
        ways *= (num - i) / (i + 1)
    return ways * probability**k * (1 - probability) ** (num - k)


def test_rare_failures_of_a_million_do_not_underflow() -> None:
    assert 1200 < closed.binomial_quantile(1_000_000, 0.0012, 0.99) < 1300


def test_erlang() -> None:
    """Two servers under a load of one: 1/2 / (1 + 1 + 1/2)."""
    assert closed.erlang_b(2, 1.0) == pytest.approx(0.2)
    assert closed.erlang_b(0, 3.0) == 1.0


def test_rerouting_is_free_while_it_fits_the_bubble() -> None:
    """Slots of 3: SYSTEMS section 12, DP 3, PP 4, m 6 with one failed: 27, as without a fault."""
    assert closed.rerouting_slowdown(3, 4, 6, 1) == 1.0
    assert closed.rerouting_slowdown(3, 2, 6, 1) == pytest.approx(9 / 7)


@pytest.mark.parametrize(("shape", "z", "known"), [(20, 1.645, 1.394), (20, -1.645, 0.663), (419, 1.645, 1.0819)])
def test_quantiles_of_gamma(shape: float, z: float, known: float) -> None:
    """Chi-squared tables: 55.758 / 40 and 26.509 / 40."""
    assert closed.gamma_quantile(shape, z) == pytest.approx(known, abs=2e-3)

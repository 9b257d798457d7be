"""Metric anomalies on series as trainings make them: what is an alarm, and what is not."""

from __future__ import annotations

import math
import random

import pytest

from everstep.core.types import Blame, Verdict
from everstep.detect.anomaly import LOSS, NORM, PLAIN, Series, judge, limits_of, saw


def run(name: str, values: list[float]) -> list[tuple[int, Verdict]]:
    series, found = Series(), []
    for step, value in enumerate(values):
        series, verdict = judge(series, name, step, value, limits_of(name))
        if verdict is not None:
            found.append((step, verdict))
    return found


def loss(steps: int, seed: int, noise: float = 0.02) -> list[float]:
    """Falls as a power of the step, with noise by ratio."""
    draw = random.Random(seed)
    return [(1.8 + 9 * (1 + step) ** -0.5) * math.exp(draw.gauss(0, noise)) for step in range(steps)]


def norms(steps: int, seed: int) -> list[float]:
    """Heavy tails; grows tenfold while the learning rate warms up, then shrinks."""
    draw = random.Random(seed)
    return [10 ** min(step / 300, 1) * (1 + step / 500) ** -0.5 * math.exp(draw.gauss(0, 0.3)) for step in range(steps)]


@pytest.mark.parametrize("seed", range(6))
def test_healthy_series_raise_no_alarm(seed: int) -> None:
    assert run("loss", loss(2000, seed)) == []
    assert run("grad_norm", norms(2000, seed)) == []
    drift = [2.0 * 1.002**step + random.Random(seed * 9999 + step).gauss(0, 0.02) for step in range(1000)]
    assert run("loss", drift) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_spike_is_told_once_at_its_step_and_hides_no_other(seed: int) -> None:
    values = loss(1000, seed)
    values[400] *= 1.6
    values[401] *= 1.4
    values[900] *= 1.6
    found = run("train/loss", values)
    assert [(step, v.culprits[0].cause) for step, v in found] == [(400, "spike"), (900, "spike")]
    assert all(0.5 < v.confidence < 0.99 for _, v in found) and "step 400" in found[0][1].why


def test_small_steps_are_no_spikes_and_a_larger_one_is_surer() -> None:
    flat = [2.0] * 100
    assert run("loss", [*flat, 2.2, *flat]) == []
    small, large = run("loss", [*flat, 2.4])[0][1], run("loss", [*flat, 8.0])[0][1]
    assert small.confidence < large.confidence
    assert run("grad_norm", [1.0] * 100 + [2.5]) == [] != run("grad_norm", [1.0] * 100 + [9.0])


def test_spikes_that_come_again_escalate() -> None:
    values = loss(1000, 3)
    for step in (500, 560, 620):
        values[step] *= 2
    causes = [v.culprits[0].cause for _, v in run("loss", values)]
    assert causes == ["spike", "spike", "repeated-spike"]
    values[620] /= 2
    values[990] *= 2
    assert [v.culprits[0].cause for _, v in run("loss", values)] == ["spike"] * 3  # too far apart


def test_the_same_step_after_a_rollback_is_no_chance() -> None:
    values, series = loss(600, 5), Series()
    values[500] *= 2
    found = []
    for step in [*range(520), *range(450, 600)]:
        series, verdict = judge(series, "loss", step, values[step], LOSS)
        found += [verdict] if verdict else []
    assert [v.culprits[0].cause for v in found] == ["spike", "repeated-spike"]
    assert "rollback" in found[1].why and found[1].confidence >= 0.99


def test_a_level_that_stays_is_told_and_then_usual() -> None:
    values = [v * (2 if step >= 500 else 1) for step, v in enumerate(loss(1000, 4))]
    found = run("loss", values)
    assert [(step, v.culprits[0].cause) for step, v in found] == [(500, "spike"), (507, "shift")]
    assert "since step 500" in found[1][1].why


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_single_and_repeated(bad: float) -> None:
    assert [(s, v.culprits[0].cause) for s, v in run("loss", [bad])] == [(0, "non-finite")]  # warm-up or not
    one = run("grad_norm", [1.0, bad, 1.0])[0][1]
    assert one.confidence == NORM.single < LOSS.single
    found = run("grad_norm", [1.0, bad, bad, bad, bad, 1.0])
    assert [(s, v.culprits[0].cause) for s, v in found] == [(1, "non-finite"), (3, "repeated-non-finite")]
    apart = run("loss", [bad if step % 50 == 0 else 2.0 for step in range(101)])
    assert [v.culprits[0].cause for _, v in apart] == ["non-finite", "non-finite", "repeated-non-finite"]


def test_a_dictionary_of_metrics_with_an_owner() -> None:
    states: dict[str, Series] = {}
    for step in range(50):
        states, found = saw(states, step, {"loss": 2.0, "grad_norm": 1.0, "queue": 5.0 + step % 3}, Blame(3, "n1", ""))
        assert found == ()
    _, found = saw(states, 50, {"loss": math.nan, "grad_norm": 50.0, "queue": 500.0}, Blame(3, "n1", ""))
    assert [(v.kind, v.culprits[0].rank, v.culprits[0].node, v.culprits[0].cause) for v in found] == [
        ("anomaly", 3, "n1", "non-finite"),
        ("anomaly", 3, "n1", "spike"),
        ("anomaly", 3, "n1", "spike"),
    ]
    assert limits_of("queue") is PLAIN

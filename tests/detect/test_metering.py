"""What a script's metrics may do without a word, and what is told of the rest until it is over."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from everstep.core.anomaly import Anomaly
from everstep.detect.metering import KEPT, Metering


def feed(meter: Metering, values: Iterable[float], name: str = "loss", first: int = 1) -> list[Anomaly]:
    """What was told newly, or anew, in this order."""
    told: list[Anomaly] = []
    for step, value in enumerate(values, first):
        before = meter.told
        if meter.saw(step, {name: value}):
            told += [each for each in meter.told if each not in before]
    return told


def usual(steps: int, seed: int = 1) -> list[float]:
    chance = random.Random(seed)
    return [2.0 * math.exp(chance.gauss(0, 0.02)) for _ in range(steps)]


def test_an_ordinary_run_says_nothing() -> None:
    """3,000 steps: a young loss falls, a learning rate warms up and restarts, epochs count, a norm has a heavy tail."""
    chance, meter = random.Random(3), Metering()
    for step in range(1, 3001):
        values = {
            "loss": (11 * 0.995**step + 2 - step * 1e-4) * math.exp(chance.gauss(0, 0.05)),
            "grad_norm": math.exp(chance.gauss(0, 0.3)) * (5 if step % 97 == 0 else 1) * (1 + 20 * 0.98**step),
            "lr": min(step, 200) * 1e-6 if step < 2000 else (step - 1999) * 1e-5,
            "epoch": step // 500,
            "tokens_per_s": 1000 * chance.random() if step % 100 else 1e7,
            "policy_loss": chance.gauss(0, 1) * (100 if step % 50 == 0 else 1),
            "value_loss": -0.1 if step < 50 else 2.0 if step % 50 == 0 else 0.02,
            "val_loss": 2.0 if step % 100 == 0 else math.nan,
        }
        meter.saw(step, values)
        meter.gradients(step, True)
    assert meter.told == ()


def test_a_spike_is_told_with_its_range_until_it_is_over() -> None:
    opened, closed = feed(Metering(), [*usual(60), 9.0, 8.0, *usual(3)])
    assert (opened.number, opened.metric, opened.step, opened.cause, opened.value) == (1, "loss", 61, "spike", 9.0)
    assert opened.low is not None and opened.high is not None and 1.8 < opened.low < 2 < opened.high < 2.2
    assert opened.confidence > 0.8 and "it was 1.9" in opened.why and not opened.lasting
    assert (closed.number, closed.over) == (1, 63)


def test_what_comes_again_is_told_once_and_then_left_alone() -> None:
    meter = Metering()
    told = feed(meter, [*usual(60), *([9.0, *usual(9)] * 12)])
    assert [(each.cause, bool(each.over)) for each in told[::2]] == [
        ("spike", False),
        ("spike", False),
        ("repeated-spike", False),
    ]
    assert len(told) == 6 and len(meter.told) <= KEPT
    assert feed(meter, [*usual(230), 9.0], first=181)[0].cause == "spike"


def test_a_level_that_stays_ends_it() -> None:
    _, shift = feed(Metering(), [*usual(60), *[4.0] * 30])
    assert (shift.cause, shift.number, shift.over) == ("shift", 1, 68) and shift.lasting


def test_the_same_step_after_a_rollback_is_no_chance() -> None:
    meter = Metering()
    feed(meter, [*usual(60), 9.0, 2.0])
    (again,) = feed(meter, [2.0, 9.0], first=60)
    assert again.cause == "repeated-spike" and "after" not in again.metric and "rollback" in again.why


def test_no_number_is_told_where_there_was_one_before() -> None:
    meter = Metering()
    assert not feed(meter, [math.nan] * 5)
    opened, repeated, closed = feed(meter, [1.0, 1.0, 1.0, math.nan, math.inf, math.nan, math.nan, 1.0], first=6)
    assert (opened.cause, opened.value, opened.step) == ("non-finite", None, 9)
    assert repeated.cause == "repeated-non-finite" and repeated.number == opened.number == closed.number
    assert closed.over == 13


def test_gradients_that_no_optimizer_could_use() -> None:
    meter = Metering()
    assert not meter.gradients(1, True) and meter.gradients(2, False)
    assert meter.told[0].metric == "gradients" and meter.told[0].cause == "non-finite"
    assert meter.gradients(3, True) and meter.told[0].over == 3


def test_many_metrics_cost_no_more_than_a_few_words() -> None:
    meter = Metering()
    for step in range(1, 70):
        meter.saw(step, {f"loss{n}": 2.0 + 50 * (step == 60) for n in range(500)})
    assert len(meter.told) == KEPT

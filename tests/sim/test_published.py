"""Published results from their stated inputs; benchmarks/simulator.py has all of them, with more failures."""

from __future__ import annotations

import heapq
import math
import random

import published as p
import pytest


@pytest.mark.parametrize(("shrinks", "expected"), [(False, 8 / 18), (True, (7 * 11 / 12 + 8) / 18)])
def test_ft_hsdp(shrinks: bool, expected: float) -> None:
    assert p.simulate(p.ft_hsdp(shrinks)).goodput == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("way", "expected"), [("no standby", 0.5499), ("parcae", 0.8794)])
def test_trainmover_at_131072(way: str, expected: float) -> None:
    """Ratios of two runs with the same failures: 2,000 of them are enough."""
    ours, other = (p.simulate(p.trainmover(16384, name, 2000)) for name in ("trainmover", way))
    assert p.interruptions(ours) == pytest.approx(2000, abs=3 * math.sqrt(2000))
    assert 1 - p.waste_gpu_h(ours) / p.waste_gpu_h(other) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("machines", "expected"), [(256, 2), (512, 3)])
def test_byterobusts_spares(machines: int, expected: int) -> None:
    assert p.simulate(p.byterobust(machines, 4000)).failures_quantile(0.99) == expected


@pytest.mark.parametrize("period", p.PERIODS)
@pytest.mark.parametrize("model", sorted(p.MODELS))
def test_oobleck_in_its_artifact(model: str, period: str) -> None:
    result = p.simulate(*p.oobleck(model, "oobleck", period))
    assert result.samples_per_s == pytest.approx(p.oobleck_expected(model, "oobleck", period), rel=0.001)


@pytest.mark.parametrize("period", p.PERIODS)
@pytest.mark.parametrize("model", sorted(p.MODELS))
def test_varuna_in_oobleck_s_artifact(model: str, period: str) -> None:
    result = p.simulate(*p.oobleck(model, "varuna", period))
    assert result.samples_per_s == pytest.approx(p.oobleck_expected(model, "varuna", period), rel=0.001)


def test_the_side_of_a_heap_on_which_the_end_of_a_save_comes() -> None:
    """However the losses lie in it: the switch comes before the save's end, and all losses after it."""
    chance = random.Random(1)
    for left in list(range(1, 40)) * 5:
        events = [(chance.random() + 3, "loss") for _ in range(left)]
        for event in ((1.0, "switch"), (2.0, "end")):
            heapq.heapify(events)
            heapq.heappush(events, event)
        heapq.heapify(events)
        kinds = [kind for _, kind in events]
        assert (kinds.index("loss") < kinds.index("end")) == (1 in p.tears(left + 1))


@pytest.mark.parametrize("period", p.PERIODS)
@pytest.mark.parametrize("model", ["BERT-large", "GPT-2-ours"])
def test_bamboo_in_oobleck_s_artifact(model: str, period: str) -> None:
    result = p.simulate(*p.oobleck(model, "bamboo", period))
    assert result.samples_per_s == pytest.approx(p.oobleck_expected(model, "bamboo", period), rel=0.003)

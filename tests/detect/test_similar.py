"""Machine similarity: the machine and the metric are named, glitches and changes of load are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from everstep.detect.similar import Options, Similarity, Unlike, distances, verdict_of

METRICS = ("gpu_power_w", "nic_bytes_per_s", "ecc_errors")
OPTIONS = Options()


class Cluster:
    """Samples of machines that do the same, each with noise; `load` moves all together."""

    def __init__(self, machines: int, seed: int, stages: int = 1) -> None:
        self.draw = np.random.default_rng(seed)
        self.groups = np.arange(machines) % stages
        self.machine = Similarity(METRICS, self.groups.tolist())

    def sample(self, load: float = 1.0) -> NDArray[np.float64]:
        usual = np.array([[650.0], [2e9], [0.0]]) * (1 + 0.3 * self.groups)
        noise = self.draw.normal(1.0, [[0.02], [0.1], [0.0]], usual.shape)
        return np.asarray(usual * noise * load)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40))
def test_distances_are_those_of_all_pairs(values: list[float]) -> None:
    array = np.array(values)
    pairs = np.abs(array[:, None] - array[None, :]).sum(axis=1) / (len(array) - 1)
    assert np.allclose(distances(array), pairs, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("metric", "change"), [(0, lambda v: v * 0.7), (1, lambda v: v * 0.3), (2, lambda v: v + 4)])
def test_the_machine_and_the_metric_are_named(seed: int, metric: int, change: object) -> None:
    assert callable(change)
    cluster, found = Cluster(64, seed, stages=2), {}
    for at in range(120):
        sample = cluster.sample()
        if at >= 60:
            sample[metric, 17] = change(sample[metric, 17])
        for one in cluster.machine.saw(sample):
            found[at] = one
    ((at, one),) = found.items()
    assert (one.machine, one.metric) == (17, METRICS[metric])
    assert 60 + OPTIONS.continuity - 1 <= at <= 60 + OPTIONS.continuity + OPTIONS.window
    verdict = verdict_of([one], [f"n{i}" for i in range(64)])
    assert verdict is not None and verdict.kind == "anomaly" and verdict.confidence > 0.6
    assert verdict.culprits[0].node == "n17" and METRICS[metric] in verdict.why


@pytest.mark.parametrize("seed", range(4))
def test_noise_load_glitches_and_silence_name_nobody(seed: int) -> None:
    cluster = Cluster(64, seed, stages=2)
    for at in range(300):
        sample = cluster.sample(load=0.2 if 100 <= at < 150 else 1.0)
        sample[:, 3] = np.nan  # reports nothing
        if at % 30 == 0:
            sample[0, 9] *= 50
        assert cluster.machine.saw(sample) == (), at


def test_roles_differ_and_are_compared_among_their_like() -> None:
    for stages, expected in ((2, 0), (1, 1)):
        machine = Similarity(("power",), [0 if stages == 1 else i // 12 for i in range(16)])
        told = [one for _ in range(40) for one in machine.saw(np.array([[600.0] * 12 + [300.0] * 4]))]
        assert bool(told) == bool(expected)
        assert verdict_of(told, [f"n{i}" for i in range(16)]) is None  # a quarter of all: a change of load


def test_it_is_told_again_only_after_it_was_well() -> None:
    machine = Similarity(("power",), [0] * 8)
    ill, well = np.array([[600.0] * 7 + [300.0]]), np.full((1, 8), 600.0)
    told = [at for at in range(150) for _ in machine.saw(well if 60 <= at < 100 else ill)]
    assert len(told) == 2 and told[0] < 60 and told[1] >= 100


def test_ten_thousand_machines() -> None:
    machine = Similarity(METRICS, [0] * 10_000)
    draw = np.random.default_rng(1)
    told: list[Unlike] = []
    for _ in range(OPTIONS.continuity + OPTIONS.window):
        sample = draw.normal(1.0, 0.05, (3, 10_000))
        sample[1, 4321] += 2
        told += machine.saw(sample)
    assert [(one.machine, one.metric) for one in told] == [(4321, METRICS[1])]


def test_a_small_difference_is_none_however_equal_the_others_are() -> None:
    for factor, expected in ((1.03, 0), (1.10, 1)):
        machine = Similarity(("power",), [0] * 8)
        sample = np.full((1, 8), 600.0)
        sample[0, 5] *= factor
        assert len([one for _ in range(40) for one in machine.saw(sample)]) == expected

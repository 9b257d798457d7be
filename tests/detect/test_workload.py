"""Time from lengths, medians without oneself, NVRx's scores, and the change point, each against what is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.detect.change import LIMIT, Cusum
from everstep.detect.peers import flagged, individual_scores, others_median, relative_scores
from everstep.detect.workload import WorkloadModel

TRUE = (0.02, 2e-5, 1.5e-8)


def jobs(seed: int, steps: int, members: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(times, tokens, squares) with 1.5 % noise."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(6, 0.8, (steps, members, 24))
    tokens, squares = lengths.sum(-1), (lengths**2).sum(-1)
    times = (TRUE[0] + TRUE[1] * tokens + TRUE[2] * squares) * (1 + rng.normal(0, 0.015, tokens.shape))
    return times, tokens, squares


def test_model_finds_the_coefficients_in_spite_of_a_slow_member() -> None:
    times, tokens, squares = jobs(0, 300, 8)
    times[:, 3] *= 1.5
    times[::7, 5] *= 4.0
    model = WorkloadModel()
    model.begin(times[:16], tokens[:16], squares[:16])
    for step in range(16, 300):
        model.learn(np.where(np.arange(8) == 3, np.nan, times[step]), tokens[step], squares[step])
    assert model.coefficients[1:] == pytest.approx(TRUE[1:], rel=0.1)
    clean = TRUE[0] + TRUE[1] * tokens[-1] + TRUE[2] * squares[-1]
    assert model.predict(tokens[-1], squares[-1]) == pytest.approx(clean, rel=0.02)


def test_model_follows_a_change_and_never_predicts_nonsense() -> None:
    times, tokens, squares = jobs(1, 800, 4)
    model = WorkloadModel()
    model.begin(times[:16], tokens[:16], squares[:16])
    for step in range(16, 800):
        model.learn(2 * times[step], tokens[step], squares[step])
    assert model.predict(tokens[-1], squares[-1]) == pytest.approx(2 * times[-1], rel=0.08)
    assert (model.predict(np.array([1.0, 1e6]), np.array([1.0, 1e9])) > 0).all() and min(model.coefficients) >= 0


def test_members_that_tell_no_lengths_get_the_average() -> None:
    model, nothing = WorkloadModel(), np.zeros((16, 4))
    model.begin(np.full((16, 4), 0.25), nothing, nothing)
    assert model.predict(nothing[0], nothing[0]) == pytest.approx(0.25, rel=1e-3)


VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_median_of_the_others(values: list[float]) -> None:
    found = others_median(np.array(values))
    for member, value in enumerate(found):
        rest = [v for k, v in enumerate(values) if k != member and not np.isnan(v)]
        assert np.isnan(value) if not rest else value == pytest.approx(np.median(rest))


def test_scores_of_nvrx() -> None:
    scores = relative_scores(np.array([1.0, 1.2, 1.4, np.nan, 2.0]))
    assert scores[[0, 1, 2, 4]] == pytest.approx([1, 1 / 1.2, 1 / 1.4, 0.5]) and flagged(scores) == (2, 4)
    own = individual_scores(np.array([1.0, 1.0]), np.array([1.3, 1.4]))
    assert flagged(own) == (1,)


def test_change_point_knows_its_onset_and_needs_four_steps() -> None:
    cusum, nothing = Cusum((2,), 1), np.zeros((1, 2))
    for step in range(50):
        cusum.saw(step, np.array([0.5, 1.0]), nothing)
    for step in range(50, 54):
        assert not cusum.alarms.any()
        cusum.saw(step, np.array([100.0, np.nan]), nothing + step)
    assert cusum.alarms.tolist() == [True, False] and cusum.onset.tolist() == [50, -1]
    assert cusum.length[0] == 4 and cusum.means()[0, 0] == 51.5
    for step in range(54, 54 + int(2 * LIMIT)):
        cusum.saw(step, np.array([0.0, 0.0]), nothing)
    assert cusum.level.tolist() == [0, 0]

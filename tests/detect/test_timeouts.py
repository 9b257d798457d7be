"""NVIDIA Resiliency Extension's rule for time-outs of heartbeats, with its own numeric cases."""

from __future__ import annotations

import pytest

from everstep.core.types import Phase
from everstep.detect.timeouts import MAX_DOUBLED, Learned, Timeouts, from_heartbeats


def test_nvrx_case() -> None:
    found = from_heartbeats(0.0, [10.0, 11.0, 18.0, 20.0], factor=2.0)
    assert found == Timeouts(20.0, 14.0)
    assert found.merged(Timeouts(21.0, 15.0)) == Timeouts(20.5, 14.5)


@pytest.mark.parametrize(
    ("beats", "expected"), [([], Timeouts(0.0, 0.0)), ([3.0], Timeouts(15.0, 0.0)), ([3.0, 4.0], Timeouts(15.0, 5.0))]
)
def test_few_heartbeats(beats: list[float], expected: Timeouts) -> None:
    assert from_heartbeats(0.0, beats, factor=5.0) == expected


def test_merging_takes_what_is_known() -> None:
    assert Timeouts(15.0, 0.0).merged(Timeouts(25.0, 8.0)) == Timeouts(20.0, 8.0)
    assert Timeouts(15.0, 6.0).merged(Timeouts(0.0, 0.0)) == Timeouts(15.0, 6.0)


def test_learned_keeps_the_longest_and_doubles_to_a_bound() -> None:
    learned = Learned().saw(Phase.SAVE, 3.0).saw(Phase.SAVE, 2.0).saw(Phase.EVAL, 1.0)
    assert learned.longest_s == {Phase.SAVE: 3.0, Phase.EVAL: 1.0}
    for _ in range(20):
        learned = learned.judged()
    assert learned.doubled == MAX_DOUBLED

"""Memory of nodes: who is left out, for how long, and when it is back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.plan.nodes import RULE, Memory, num_spares


def after(times: list[float]) -> Memory:
    memory = Memory()
    for now in times:
        memory = memory.failed("n1", now)
    return memory


def test_three_failures_in_a_row_exclude_it_for_a_while() -> None:
    memory = after([0, 10, 20])
    assert not after([0, 10]).excluded("n1", 10)
    assert memory.excluded("n1", 20) and memory.excluded("n1", 20 + RULE.back_off_s - 1)
    assert not memory.excluded("n1", 20 + RULE.back_off_s) and not memory.excluded("n2", 20)


def test_failures_long_ago_do_not_count() -> None:
    hours = [hour * 3 * RULE.half_life_s for hour in range(20)]
    memory = after(hours)
    assert not memory.excluded("n1", hours[-1]) and memory.score("n1", hours[-1]) < 1.2


def test_it_comes_back_on_probation_and_the_next_time_is_longer() -> None:
    memory = after([0, 10, 20])
    back = 20 + RULE.back_off_s
    again = memory.failed("n1", back + 1)
    assert again.excluded("n1", back + 1 + 2 * RULE.back_off_s - 1)
    assert not again.excluded("n1", back + 1 + 2 * RULE.back_off_s)
    assert not memory.failed("n1", back + 3 * RULE.half_life_s).excluded("n1", back + 3 * RULE.half_life_s)


def test_a_health_check_decides_at_once() -> None:
    memory = after([0, 10, 20])
    assert not memory.checked("n1", healthy=True, now=30).excluded("n1", 30)
    assert memory.checked("n1", healthy=False, now=30).excluded("n1", 30 + 2 * RULE.back_off_s - 1)
    assert Memory().checked("n9", healthy=False, now=30).excluded("n9", 30)
    assert Memory().checked("n9", healthy=True, now=30) == Memory()


@given(st.lists(st.floats(0, 1e6), max_size=12), st.floats(0, 1e6))
def test_nobody_is_out_for_longer_than_the_longest_time(times: list[float], now: float) -> None:
    """Also under another controller, whose clock begins anew."""
    memory = after(sorted(times))
    end = max([now, *times])
    assert not memory.excluded("n1", end + RULE.longest_s + 1)
    other = memory.rebased(5.0)
    assert not other.excluded("n1", 5.0 + RULE.longest_s + 1) and other.score("n1", 5.0) <= memory.score("n1", end) + 12


def test_spares() -> None:
    assert [num_spares(nodes, 0.0012) for nodes in (128, 256, 512, 1024)] == [2, 2, 3, 4]
    assert num_spares(10, 0.0) == 0 and num_spares(4, 1.0) == 4


@given(st.integers(1, 3000), st.floats(1e-5, 0.5), st.floats(1e-5, 0.5))
def test_more_failures_never_need_fewer_spares(nodes: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert num_spares(nodes, low) <= num_spares(nodes, high) <= nodes


def test_scores_are_of_one_node() -> None:
    assert after([0]).score("n2", 0) == 0 and after([0]).score("n1", RULE.half_life_s) == pytest.approx(0.5)

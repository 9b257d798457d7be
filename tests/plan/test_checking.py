"""How often replicas are compared: what it costs stays below its part of the step time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.plan.checking import BOUND, Pace


@given(st.floats(1e-5, 1.0), st.floats(1e-3, 2.0))
def test_the_cost_stays_within_its_bound(cost_s: float, step_s: float) -> None:
    pace, compared, spent = Pace(), [], 0.0
    for step in range(1, 3000):
        if pace.due(step):
            compared.append(step)
            spent += cost_s
            pace.compared(step, cost_s)
        else:
            pace.stepped(step_s)
    first = compared[0]  # to know what it costs
    assert first < 10
    assert spent - cost_s <= BOUND * step_s * (3000 - first)
    gaps = {after - before for before, after in zip(compared, compared[1:], strict=False)}
    assert all(gap - 1 <= cost_s / (BOUND * step_s) for gap in gaps)  # and not more seldom than that takes


@pytest.mark.parametrize(("every", "due"), [(0, []), (4, [4, 8, 12])])
def test_what_a_person_says_counts(every: int, due: list[int]) -> None:
    pace = Pace(every)
    assert [step for step in range(1, 13) if pace.due(step)] == due
    assert pace.interval == every


def test_what_was_compared_before_all_went_back_does_not_count() -> None:
    pace = Pace()
    for _ in range(10):
        pace.stepped(1.0)
    pace.compared(500, 1.0)
    assert not pace.due(501)
    assert pace.due(480)

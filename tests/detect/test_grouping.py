"""The planner and the judge of group tests: whoever is bad is named, or said to be one of a few."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.detect import grouping
from everstep.detect.grouping import Group, Judged, Stage


def names(count: int) -> list[str]:
    return [f"n{k:02}" for k in range(count)]


def run(stages: list[Stage] | tuple[Stage, ...], bad: set[str]) -> dict[Group, bool]:
    """What an examination sees when each ring goes at the pace of its slowest member."""
    return {group: not bad & set(group) for stage in stages for each in stage for group in each}


def examined(count: int, bad: set[str], rounds: int = 3) -> tuple[Judged, Judged]:
    """After the planned stages, and after the follow-ups."""
    tests = run(grouping.stages(names(count)), bad)
    first = judged = grouping.judge(tests)
    for _ in range(rounds):
        tests |= run((grouping.followup(judged, tests),), bad)
        judged = grouping.judge(tests)
    return first, judged


@pytest.mark.parametrize("count", range(2, 41))
def test_rounds_can_run_at_once_and_reach_everybody(count: int) -> None:
    for stage in grouping.stages(names(count)):
        for each in stage:
            members = [name for group in each for name in group]
            assert len(members) == len(set(members))
            assert all(len(group) > 1 for group in each)
    rows, columns, *more = grouping.grid(names(count)) if count >= 4 else [(), ()]
    assert not more or count in (5, 7, 10, 13, 17, 21, 26, 31, 37)
    if rows:
        assert sorted(name for row in rows[0] for name in row) == names(count)
        assert all(len(set(row) & set(column)) <= 1 for row in rows[0] for column in columns[0])


@given(st.integers(2, 9))
def test_every_pair_meets_once(count: int) -> None:
    met = [frozenset(pair) for each in grouping.pairs(names(count)) for pair in each]
    assert sorted(map(sorted, met)) == sorted(map(sorted, combinations(names(count), 2)))


@given(st.integers(3, 150), st.data())
def test_a_single_bad_node_is_named_without_a_followup(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.sampled_from(names(count)))
    first, _ = examined(count, {bad})
    assert (first.bad, first.perhaps, first.links) == ((bad,), (), ())
    assert len(first.well) == count - 1


@given(st.integers(4, 80), st.data())
def test_two_bad_nodes_are_named_or_said_to_be_ambiguous(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.sampled_from(names(count)), min_size=2, max_size=2))
    first, last = examined(count, bad)
    assert set(first.bad) <= bad <= {*first.bad, *first.perhaps}
    borrows = len(grouping.grid(names(count))) > 2  # whoever was alone in a column is in doubt with whom it borrowed
    assert len(first.perhaps) <= (5 if borrows else 4)
    assert not first.well & bad
    assert (set(last.bad), last.perhaps) == (bad, ()) if last.well else bad <= set(last.perhaps)


@given(st.integers(2, 40), st.data())
def test_nobody_good_is_ever_named(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.sampled_from(names(count))))
    for judged in examined(count, bad):
        assert set(judged.bad) <= bad <= {*judged.bad, *judged.perhaps}


def test_of_two_it_is_not_known_which() -> None:
    first, last = examined(2, {"n01"})
    assert first.perhaps == last.perhaps == ("n00", "n01")
    assert not last.bad


def test_a_link_between_two_good_nodes_is_named_as_that() -> None:
    ends = {"n01", "n04"}
    tests = {group: not ends <= set(group) for stage in grouping.stages(names(6)) for each in stage for group in each}
    judged = grouping.judge(tests)
    assert (judged.bad, judged.perhaps, judged.links) == ((), (), (("n01", "n04"),))


def test_a_slow_group_is_compared_with_its_stage_and_those_before() -> None:
    pair, other, row, alone = ("a", "b"), ("c", "d"), ("a", "c"), ("b", "d")
    stages = [{pair: 10.0, other: 9.0}, {row: 1.0}, {alone: 40.0}]  # the last one had the switch to itself
    assert grouping.failed(stages, 0.5) == {row}
    assert grouping.failed([{pair: 0.0}], 0.5) == {pair}
    assert grouping.failed([{pair: 10.0, other: 4.9}], 0.5) == {other}

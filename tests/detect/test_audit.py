"""Who computes wrong gradients, from what a step's passes came to."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from everstep.detect.audit import Finding, Outcome, Pass, judge, turns

Trace = Callable[[int, int, int], int]  # who, number of the pass, right trace -> what he comes to


def wrong(who: int, number: int, right: int) -> int:
    """The same each time."""
    return right + 1000


def random(who: int, number: int, right: int) -> int:
    return right + 1000 * (number + 1)


def passes(size: int, faults: dict[int, Trace], only: set[int] | None = None, first: bool = False) -> list[Pass]:
    """Two attempts, or the first one. `only`: numbers of the passes in which the faults show."""
    found = []
    for number, turn in enumerate((1, 0) if first else (1, 0, *range(turns(size), -1, -1))):
        right = [1 + (role + turn) % size for role in range(size)]
        told = [
            faults[role](role, number, trace) if role in faults and (only is None or number in only) else trace
            for role, trace in enumerate(right)
        ]
        found.append(Pass(turn, tuple(told), (7,) * size))
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 9])
def test_alike_is_found_in_two_passes_and_a_fault_asks_for_more(size: int) -> None:
    assert judge(passes(size, {}, first=True), proven=True) == Finding(Outcome.ALIKE)
    for who, fault, only in itertools.product(range(size), (wrong, random), (None, {0}, {1})):
        assert judge(passes(size, {who: fault}, only, first=True), proven=True).outcome is Outcome.AGAIN


@pytest.mark.parametrize("size", [3, 4, 9])
@pytest.mark.parametrize("fault", [wrong, random])
def test_who_is_wrong_each_time_is_named_though_no_audit_was_ever_alike(size: int, fault: Trace) -> None:
    for who in range(size):
        assert judge(passes(size, {who: fault}), proven=False) == Finding(Outcome.WRONG, (who,), sure=True)


def test_of_two_only_who_does_not_come_to_the_same_twice_is_named() -> None:
    assert judge(passes(2, {1: random}), proven=False) == Finding(Outcome.WRONG, (1,), sure=True)
    assert judge(passes(2, {1: wrong}), proven=True) == Finding(Outcome.WRONG, (0, 1))
    assert judge(passes(2, {1: wrong}), proven=False) == Finding(Outcome.UNFIT), "it may be how the script deals"


def test_a_slip_that_does_not_come_again_harms_nobody() -> None:
    for who, number in itertools.product(range(3), (0, 1)):
        found = judge(passes(3, {who: random}, {number}), proven=True)
        assert found.outcome is Outcome.ALIKE and who in found.roles
    found = judge(passes(3, {2: random}, {0, 2, 3}), proven=True)
    assert found == Finding(Outcome.WRONG, (2,), sure=True), "but who makes it again is no good"
    found = judge(passes(3, {2: random}, {0, 2}), proven=True)
    assert found == Finding(Outcome.WRONG, (2,), sure=False), "unless he is right as a rule"
    once = passes(3, {2: random}, {0, 3})
    assert judge(once, proven=True) == Finding(Outcome.WRONG, (2,), sure=False), "both in the same share"


def test_two_of_many_are_suspects_and_where_nothing_agrees_nobody_is() -> None:
    found = judge(passes(8, {1: wrong, 5: random}), proven=True)
    assert found == Finding(Outcome.WRONG, (1, 5))
    everybody = dict.fromkeys(range(4), random)
    assert judge(passes(4, everybody), proven=True) == Finding(Outcome.UNFIT)
    assert judge(passes(3, {0: wrong, 1: random}), proven=True) == Finding(Outcome.UNFIT)


def test_bits_that_differ_now_and_then_on_whatever_member_are_nobodys_fault() -> None:
    """Kernels without an order, say: one is hit in an attempt, another one in the next."""

    def now_and_then(*numbers: int) -> Trace:
        return lambda who, number, right: right + 1000 if number in numbers else right

    found = judge(passes(8, {1: now_and_then(0), 5: now_and_then(3)}), proven=True)
    assert found == Finding(Outcome.UNFIT)
    beside = judge(passes(8, {1: wrong, 2: random, 5: now_and_then(3)}), proven=True)
    assert beside == Finding(Outcome.UNFIT)
    neighbours: dict[int, Trace] = {1: wrong, 2: lambda who, number, right: right + 7}
    assert judge(passes(8, neighbours), proven=True) == Finding(Outcome.WRONG, (1, 2)), "both always"


def test_unlike_hardware_and_what_is_not_known_tells_nothing() -> None:
    first = passes(3, {1: wrong}, first=True)
    unlike = [Pass(each.turn, each.traces, (7, 8, 7)) for each in first]
    unknown = [Pass(each.turn, (0, *each.traces[1:]), each.kinds) for each in first]
    assert judge(unlike, proven=True) == judge(unknown, proven=True) == Finding(Outcome.UNFIT)

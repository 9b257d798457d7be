"""Boxes of tensors: intersections, remainders, coverings and runs, against sets of elements."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from everstep.state.reshape import Box, cover, intersect, runs, subtract


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, end) for start, end in zip(box.offsets, box.ends, strict=True))))


def boxes(axes: int) -> st.SearchStrategy[Box]:
    def numbers(last: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.tuples(*[st.integers(0, last)] * axes)

    return st.builds(Box, numbers(3), numbers(4))


several = st.integers(0, 3).flatmap(lambda axes: st.lists(boxes(axes), min_size=2, max_size=6))


@given(several)
def test_intersection_and_remainder_are_those_of_the_elements(drawn: list[Box]) -> None:
    one, other, *_ = drawn
    common = intersect(one, other)
    assert (elements(common) if common else set()) == elements(one) & elements(other)
    left = subtract(one, other)
    assert sum(box.size for box in left) == len(elements(one) - elements(other))
    assert {at for box in left for at in elements(box)} == elements(one) - elements(other)


@given(several)
def test_a_cover_takes_each_element_once_and_from_the_first_part_that_has_it(drawn: list[Box]) -> None:
    wanted, *parts = drawn
    taken, missing = cover(wanted, parts)
    places = [(at, number) for number, box in taken for at in elements(box)]
    first = {at: next((n for n, part in enumerate(parts) if at in elements(part)), None) for at in elements(wanted)}
    assert sorted(places) == sorted((at, n) for at, n in first.items() if n is not None)
    assert {at for box in missing for at in elements(box)} == {at for at, n in first.items() if n is None}


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple), st.integers(0, 300), st.integers(0, 300))
def test_runs_are_contiguous_boxes_of_a_range(shape: tuple[int, ...], first: int, last: int) -> None:
    order = list(itertools.product(*map(range, shape)))
    first, last = min(first, len(order)), min(last, len(order))
    found = runs(shape, first, last)
    assert len(found) <= max(1, 2 * len(shape))
    listed = []
    for start, box in found:
        inside = sorted(elements(box))
        assert inside == order[start : start + box.size]
        listed += inside
    assert listed == order[first:last]

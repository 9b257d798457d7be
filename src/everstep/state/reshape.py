"""Boxes: which part of a tensor lies where, and what to take from whom. Pure.

A box is a part of a tensor with its edges along the axes: (offsets, shape). Saved parts and wanted ones are boxes of
the same global tensor, so any layout is served from any other by their intersections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """Without axes it is the one element of a 0-dim tensor; a length of 0 makes it empty."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + length for offset, length in zip(self.offsets, self.shape, strict=True))

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """This box in a tensor whose first element is at `origin`."""
        places = zip(self.offsets, self.shape, origin, strict=True)
        return tuple(slice(offset - at, offset - at + length) for offset, length, at in places)


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def intersect(one: Box, other: Box) -> Box | None:
    """None if they have no element in common."""
    starts = tuple(map(max, one.offsets, other.offsets))
    lengths = tuple(end - start for start, end in zip(starts, map(min, one.ends, other.ends), strict=True))
    return Box(starts, lengths) if all(length > 0 for length in lengths) else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """The elements of `box` that are not in `hole`, as boxes without common elements."""
    common = intersect(box, hole)
    if common is None:
        return [box] if box.size else []
    left, (offsets, shape) = [], box
    for axis, (start, length) in enumerate(zip(*common, strict=True)):
        for begin, end in ((offsets[axis], start), (start + length, offsets[axis] + shape[axis])):
            if begin < end:
                left.append(Box(replaced(offsets, axis, begin), replaced(shape, axis, end - begin)))
        offsets, shape = replaced(offsets, axis, start), replaced(shape, axis, length)
    return left


def replaced(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def cover(wanted: Box, parts: Sequence[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """(what to take from which part, each element once and from the first part that has it; what none of them has)."""
    taken: list[tuple[int, Box]] = []
    missing = [wanted] if wanted.size else []
    for number, part in enumerate(parts):
        if not missing:
            break
        common = [found for box in missing if (found := intersect(box, part))]
        taken += [(number, box) for box in common]
        missing = [left for box in missing for left in subtract(box, part)] if common else missing
    return taken, missing


def runs(shape: Sequence[int], first: int, last: int) -> list[tuple[int, Box]]:
    """The elements [first, last) of a row-major tensor as boxes, each contiguous, with the number of its first element.

    A block of whole rows, with the ends of a row before and after it, and so on for each of those: at most two boxes
    an axis.
    """
    if first >= last:
        return []
    if not shape:
        return [(first, Box((), ()))]
    row = math.prod(shape[1:])
    begin, end = -(-first // row), last // row
    if begin > end:  # within one row
        return within(shape, end, first, last)
    found = within(shape, begin - 1, first, begin * row)
    if begin < end:
        found.append((begin * row, Box((begin,) + (0,) * (len(shape) - 1), (end - begin, *shape[1:]))))
    return found + within(shape, end, end * row, last)


def within(shape: Sequence[int], row: int, first: int, last: int) -> list[tuple[int, Box]]:
    """Elements of one row."""
    start = row * math.prod(shape[1:])
    inner = runs(shape[1:], first - start, last - start)
    return [(start + at, Box((row, *box.offsets), (1, *box.shape))) for at, box in inner]

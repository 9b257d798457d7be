"""What differs between two checkpoints, tensor by tensor; in memory are two tensors at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from everstep.state import assemble
from everstep.state.assemble import Window
from everstep.state.image import Source
from everstep.state.stock import Parts, merge


class Difference(msgspec.Struct, frozen=True):
    """max_abs: of the elements' differences; None where that says nothing (other shapes, other kinds of numbers)."""

    name: str
    what: str
    max_abs: float | None = None


def differences(
    a: Sequence[Source], b: Sequence[Source], progress: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[Difference]:
    """Whatever the layouts are. Raises Damaged, OSError."""
    left, right = merge([source.index for source in a]), merge([source.index for source in b])
    for name in sorted(left.keys() ^ right.keys()):
        yield Difference(name, "only in the first" if name in left else "only in the second")
    windows_a, windows_b = assemble.windows(a), assemble.windows(b)
    for name in sorted(left.keys() & right.keys(), key=lambda name: assemble.first_place(left[name])):
        one, other = left[name], right[name]
        kinds = [(parts.first.dtype, parts.first.global_shape) for parts in (one, other)]
        if kinds[0] != kinds[1]:
            yield Difference(name, f"{kinds[0][0]} {list(kinds[0][1])} and {kinds[1][0]} {list(kinds[1][1])}")
            continue
        first, second = _whole(windows_a, name, one), _whole(windows_b, name, other)
        progress(len(first))
        if first != second:
            yield _differing(name, one.first.dtype, first, second)


def _whole(windows: Mapping[int, Window], name: str, parts: Parts) -> bytearray:
    whole = bytearray(assemble.num_bytes(parts))

    def put(_: str, place: int, part: memoryview) -> None:
        whole[place : place + len(part)] = part

    assemble.spread(windows, {name: parts}, put)
    return whole


def _differing(name: str, dtype: str, first: bytearray, second: bytearray) -> Difference:
    values = [_numbers(dtype, data) for data in (first, second)]
    a, b = values
    if a is None or b is None:
        return Difference(name, "other bytes")
    where = np.flatnonzero(~((a == b) | (np.isnan(a) & np.isnan(b))))
    if not len(where):
        return Difference(name, "other bytes of equal numbers", 0.0)
    largest = float(np.max(np.abs(a[where] - b[where])))
    return Difference(name, f"{len(where)} of {len(a)} elements", largest)


def _numbers(dtype: str, data: bytearray) -> np.ndarray | None:
    """As float64; None for dtypes which numpy has not."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    try:
        kind = np.dtype(dtype)
    except TypeError:
        return None
    return np.frombuffer(data, kind).astype(np.float64) if kind.kind in "biuf" else None

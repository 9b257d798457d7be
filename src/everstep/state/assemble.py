"""Whole tensors out of the parts that shards hold, as a stream: one chunk of each shard is in memory at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from everstep.state.image import CHUNK_BYTES, Piece, Source, chunk_span
from everstep.state.stock import Parts

Put = Callable[[str, int, memoryview], None]  # name, first byte in the whole tensor, bytes


def runs(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """(first byte in the piece, first byte in the whole tensor, bytes) of each contiguous run, in the piece's order."""
    numel = math.prod(piece.shape)
    if not numel:
        return
    item_bytes = piece.num_bytes // numel
    whole, shape = piece.global_shape, piece.shape
    strides = [math.prod(whole[dim + 1 :]) * item_bytes for dim in range(len(whole))]
    cut = max((dim for dim in range(len(whole)) if shape[dim] != whole[dim]), default=0)  # the last dim which is cut
    length = math.prod(shape[cut:]) * item_bytes
    base = sum(offset * stride for offset, stride in zip(piece.offsets, strides, strict=True))
    for number, at in enumerate(itertools.product(*(range(size) for size in shape[:cut]))):
        yield number * length, base + sum(i * strides[dim] for dim, i in enumerate(at)), length


class Window:
    """The chunk of a source which was read last."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._buffer = memoryview(bytearray(min(CHUNK_BYTES, source.index.num_bytes)))
        self._chunk = -1

    def parts(self, start: int, num_bytes: int) -> Iterator[memoryview]:
        """The bytes from `start` on, as they lie in chunks. Each is valid until the next one."""
        while num_bytes:
            chunk, skip = divmod(start, CHUNK_BYTES)
            first, end = chunk_span(self.source.index, chunk)
            if chunk != self._chunk:
                self._chunk = -1
                self.source.read(chunk, self._buffer[: end - first])
                self._chunk = chunk
            part = self._buffer[skip : min(skip + num_bytes, end - first)]
            yield part
            start, num_bytes = start + len(part), num_bytes - len(part)


def windows(sources: Iterable[Source]) -> dict[int, Window]:
    return {source.index.shard: Window(source) for source in sources}


def spread(shards: Mapping[int, Window], tensors: Mapping[str, Parts], put: Put) -> None:
    """Give the bytes of these tensors, each once, with their places; shard by shard, in the order of the files."""
    wanted = [(shard, piece.start, name, piece) for name, parts in tensors.items() for shard, piece in parts.pieces]
    for shard, start, name, piece in sorted(wanted, key=lambda one: one[:2]):
        for within, place, length in runs(piece):
            for part in shards[shard].parts(start + within, length):
                put(name, place, part)
                place += len(part)


def num_bytes(parts: Parts) -> int:
    """Of the whole tensor."""
    numel = math.prod(parts.first.global_shape)
    held = sum(math.prod(piece.shape) for _, piece in parts.pieces)
    return sum(piece.num_bytes for _, piece in parts.pieces) * numel // max(held, 1)


def first_place(parts: Parts) -> tuple[int, int]:
    """Where its first part lies, to go through tensors in the order of the files."""
    return min((shard, piece.start) for shard, piece in parts.pieces)

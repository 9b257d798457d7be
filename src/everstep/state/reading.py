"""Bytes of saved pieces into tensors: chunk by chunk, each read once and checked, by a few threads.

Every thread has one chunk of memory; what is read goes from there straight to where it belongs, so beside the state
itself only a few chunks are needed, whatever the layouts are.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from everstep.state.image import CHUNK_BYTES, Piece, Source, chunk_span
from everstep.state.reshape import Box, intersect, runs
from everstep.state.tree import dtype_named

MAX_THREADS = 4


class Read(NamedTuple):
    """What a tensor here takes from a saved piece. `box` is in the global tensor, as is `origin`, where `target` is.

    only_compare: the target has its values already, and these must be the same.
    """

    source: int
    piece: Piece
    box: Box
    target: Tensor
    origin: tuple[int, ...]
    only_compare: bool = False


class Chunk(NamedTuple):
    source: int
    number: int
    reads: list[Read]


def fill(sources: Sequence[Source], reads: Sequence[Read], num_threads: int | None = None) -> None:
    """Raises what a source raises: Damaged or OSError. Some targets are written then, and some are not.

    Raises ValueError, when all are written, for values that differ from those they are compared with.
    """
    _fill(sources, [read for read in reads if not read.only_compare], num_threads)
    _fill(sources, [read for read in reads if read.only_compare], num_threads)


def _fill(sources: Sequence[Source], reads: Sequence[Read], num_threads: int | None) -> None:
    chunks = plan_chunks(reads)
    num_bytes = sum(read.box.size * read.target.element_size() for read in reads)
    num_threads = min(num_threads or min(MAX_THREADS, os.cpu_count() or 1), num_bytes // CHUNK_BYTES)
    work = Work(sources, iter(chunks))
    if num_threads <= 1:
        work.run()
        return
    with ThreadPoolExecutor(num_threads, "everstep-restore") as pool:
        for done in [pool.submit(work.run) for _ in range(num_threads)]:
            done.result()


def plan_chunks(reads: Sequence[Read]) -> list[Chunk]:
    """Every chunk that is needed, once, in the order of each source's bytes."""
    needed: dict[tuple[int, int], list[Read]] = defaultdict(list)
    for read in reads:
        first, last = span(read)
        for number in range(first // CHUNK_BYTES, (last - 1) // CHUNK_BYTES + 1):
            needed[read.source, number].append(read)
    return [Chunk(source, number, needed[source, number]) for source, number in sorted(needed)]


def span(read: Read) -> tuple[int, int]:
    """(first byte of the data, one past the last) that the read needs."""
    first = last = 0
    for offset, length, at, extent in zip(*read.box, read.piece.offsets, read.piece.shape, strict=True):
        first = first * extent + offset - at
        last = last * extent + offset - at + length - 1
    itemsize = dtype_named(read.piece.dtype).itemsize
    return read.piece.start + first * itemsize, read.piece.start + (last + 1) * itemsize


class Work:
    """Chunks to be read, shared by threads: each takes the next one."""

    def __init__(self, sources: Sequence[Source], chunks: Iterator[Chunk]) -> None:
        self._sources = sources
        self._chunks = chunks
        self._lock = threading.Lock()
        self._failed = False

    def _next(self) -> Chunk | None:
        with self._lock:
            return None if self._failed else next(self._chunks, None)

    def run(self) -> None:
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        view = buffer.numpy().data
        try:
            with torch.no_grad():
                while (chunk := self._next()) is not None:
                    source = self._sources[chunk.source]
                    start, end = chunk_span(source.index, chunk.number)
                    source.read(chunk.number, view[: end - start])
                    for read in chunk.reads:
                        scatter(buffer, start, end, read)
        except BaseException:
            self._failed = True
            raise


def scatter(buffer: Tensor, start: int, end: int, read: Read) -> None:
    """What the bytes [start, end) of the data hold for one target."""
    piece, dtype = read.piece, dtype_named(read.piece.dtype)
    first, last = max(start, piece.start), min(end, piece.start + piece.num_bytes)
    if read.box.shape == piece.shape == read.target.shape and read.target.is_contiguous():
        flat = read.target.view(-1).view(torch.uint8)
        put(read, flat[first - piece.start : last - piece.start], buffer[first - start : last - start])
        return
    itemsize = dtype.itemsize
    for at, box in runs(piece.shape, (first - piece.start) // itemsize, (last - piece.start) // itemsize):
        here = Box(tuple(map(int.__add__, box.offsets, piece.offsets)), box.shape)
        common = intersect(here, read.box)
        if common is not None:
            begin = piece.start + at * itemsize - start
            values = buffer[begin : begin + box.size * itemsize].view(dtype).view(box.shape)
            put(read, read.target[common.slices(read.origin)], values[common.slices(here.offsets)])


def put(read: Read, target: Tensor, values: Tensor) -> None:
    if not read.only_compare:
        target.copy_(values)
    elif not torch.equal(target.cpu(), values):
        raise ValueError(f"{read.piece.name} was saved with other values than the tensor which it is tied to here")

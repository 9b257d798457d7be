"""A saved step as another number of shards: each tensor is cut along its first dimension, as FSDP cuts it.

No load needs it (any layout loads into any other, see state.restore); it is for moving checkpoints to where each node
shall read one file. One new shard at a time is put together, in a file without a name beside the new place:
so memory is bounded, whatever the sizes are.
"""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.state import image, item
from everstep.state.assemble import Window, runs, windows
from everstep.state.disk import Checkpoints, Written
from everstep.state.image import ALIGN_BYTES, Blob, Index, Piece, Source
from everstep.state.stock import Parts, merge

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Layout:
    """One new shard. heads: what stands before the raw bytes of each piece."""

    index: Index
    heads: tuple[bytes, ...]
    blobs: tuple[tuple[int, Blob, Blob], ...]  # (shard it comes from, there, here)


def recut(
    sources: Sequence[Source], to: Checkpoints, num_shards: int, progress: Progress = lambda num_bytes: None
) -> list[Written]:
    """Write the step of these sources to another place. Raises ValueError, Damaged, OSError."""
    if num_shards < 1:
        raise ValueError(f"a checkpoint has at least one shard: got {num_shards}")
    tensors = merge([source.index for source in sources])
    shards = windows(sources)
    done = []
    for shard in range(num_shards):
        layout = lay_out([source.index for source in sources], tensors, shard, num_shards)
        with scratch(layout.index.num_bytes, to.store.name) as data:
            fill(data, layout, tensors, shards, progress)
            done.append(to.write(layout.index, data))
    return done


def lay_out(indexes: Sequence[Index], tensors: Mapping[str, Parts], shard: int, num_shards: int) -> Layout:
    pieces, heads, end = [], [], 0
    for name, parts in tensors.items():
        first = parts.first
        offsets, shape = cut(first.global_shape, shard, num_shards)
        head = item.head(first.dtype, shape)
        start = -(-(end + len(head)) // ALIGN_BYTES) * ALIGN_BYTES
        held = max(1, sum(math.prod(piece.shape) for _, piece in parts.pieces))
        num_bytes = sum(piece.num_bytes for _, piece in parts.pieces) // held * math.prod(shape)
        around = (start - len(head), len(head) + num_bytes)
        pieces.append(Piece(name, first.dtype, first.global_shape, offsets, shape, start, num_bytes, around))
        heads.append(head)
        end = start + num_bytes
    blobs: dict[str, tuple[int, Blob, Blob]] = {}
    for index in indexes:
        for blob in index.blobs:
            if blob.name not in blobs:
                blobs[blob.name] = (index.shard, blob, Blob(blob.name, (end, blob.item[1])))
                end += blob.item[1]
    one = indexes[0]
    made = Index(
        image.VERSION, one.job, one.step, one.epoch, shard, num_shards, one.written_s, end, tuple(pieces),
        tuple(here for _, _, here in blobs.values()), tuple(trees(indexes, {p.name: n for n, p in enumerate(pieces)})),
    )  # fmt: skip
    return Layout(made, tuple(heads), tuple(blobs.values()))


def cut(shape: tuple[int, ...], shard: int, num_shards: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, shape) of a shard's part; all shards hold what has no dimensions."""
    if not shape:
        return (), ()
    rows = -(-shape[0] // num_shards)
    first = min(shard * rows, shape[0])
    return (first,) + (0,) * (len(shape) - 1), (min(rows, shape[0] - first), *shape[1:])


def trees(indexes: Sequence[Index], numbers: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    """The objects of all shards with the new numbers of their tensors; equal ones once."""
    seen: list[tuple[str, Any]] = []
    for index in indexes:
        names = [piece.name for piece in index.pieces]
        new = {number: numbers[name] for number, name in enumerate(names)}
        for owner, tree in index.objects:
            made = (owner, renumbered(tree, new))
            if made not in seen:
                seen.append(made)
                yield made


def renumbered(node: Any, new: Mapping[int, int]) -> Any:
    """A node of state.tree with other numbers. Only lists are nodes, and a tag is a string that comes first."""
    if not isinstance(node, list) or not node:
        return node
    tag, *rest = node
    if tag == "T":
        return ["T", new[rest[0]]]
    if tag in ("l", "t"):
        return [tag, [renumbered(part, new) for part in rest[0]]]
    if tag in ("d", "o", "n"):
        return [tag, [[renumbered(key, new), renumbered(value, new)] for key, value in rest[0]]]
    return node


@contextmanager
def scratch(num_bytes: int, near: str) -> Iterator[memoryview]:
    """Memory which the kernel may write out: a file without a name."""
    folder = near if Path(near).is_dir() else None
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(max(num_bytes, 1))
        memory = mmap.mmap(file.fileno(), max(num_bytes, 1))
        with memory, memoryview(memory) as view, view[:num_bytes] as data:
            yield data


def fill(
    data: memoryview, layout: Layout, tensors: Mapping[str, Parts], shards: Mapping[int, Window], progress: Progress
) -> None:
    for piece, head in zip(layout.index.pieces, layout.heads, strict=True):
        data[piece.item[0] : piece.start] = head
        for shard, saved in tensors[piece.name].pieces:
            for start, length, place in common(saved, piece):
                for part in shards[shard].parts(saved.start + start, length):
                    data[piece.start + place : piece.start + place + len(part)] = part
                    place += len(part)
        progress(piece.num_bytes)
    for shard, there, here in layout.blobs:
        at = here.item[0]
        for part in shards[shard].parts(*there.item):
            data[at : at + len(part)] = part
            at += len(part)


def common(saved: Piece, piece: Piece) -> Iterator[tuple[int, int, int]]:
    """(first byte in the saved piece, bytes, first byte in the new one). The new one is one span of whole rows."""
    if not math.prod(piece.shape):
        return
    item_bytes = piece.num_bytes // math.prod(piece.shape)
    begin = (piece.offsets[0] if piece.offsets else 0) * math.prod(piece.global_shape[1:]) * item_bytes
    for start, place, length in runs(saved):
        first, last = max(place, begin), min(place + length, begin + piece.num_bytes)
        if first < last:
            yield start + first - place, last - first, first - begin

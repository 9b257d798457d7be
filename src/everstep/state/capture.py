"""Taking a snapshot: what the image of some objects will be (`plan`), and their bytes into a buffer (`Plan.copy`).

A plan is made after a commit, in the training thread; it copies at once what a forward pass may change (buffers, the
user's objects) and leaves parameters and the optimizer's tensors, which lie still until the next optimizer step. `copy`
may so run in another thread while the next forward and backward pass runs; it must end before the optimizer steps.

Bytes of large tensors are compared and copied by libc, in one call each: without the interpreter's lock, with one
thread (torch's own copy would take those of the training), and a comparison that ends at the first difference. So a
tensor that nobody changed costs no write, and its chunks need not be sent or written again. Versions of tensors would
not tell: `.data` goes around them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everstep.state import image, item, naming
from everstep.state.flatten import Stateful
from everstep.state.image import ALIGN_BYTES, CHUNK_BYTES, Blob, Index, Piece
from everstep.state.naming import Kind, Part
from everstep.state.staging import Staging
from everstep.state.tree import dtype_name

SMALL_BYTES = 64 << 10  # below, giving the interpreter's lock away costs more than the copy
_FREE = ctypes.CDLL(None)  # calls without the interpreter's lock
_HELD = ctypes.PyDLL(None)
for _library in (_FREE, _HELD):
    for _function in (_library.memcmp, _library.memmove):
        _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _library.memmove.restype = ctypes.c_void_p


@dataclass(frozen=True)
class Layout:
    """Where what stands; the same for every snapshot of the same tensors, so it is made once."""

    key: tuple[Any, ...]
    pieces: tuple[Piece, ...]  # one for each name
    heads: tuple[tuple[int, bytes], ...]  # of each part: (start, what stands there, up to its first raw byte)
    starts: tuple[int, ...]  # of each part
    num_bytes: int  # of all parts


@dataclass(frozen=True)
class Copied:
    """`changed`: the chunks with other bytes than before. `non_finite`: the name of a tensor, if there is one."""

    num_bytes: int
    changed: frozenset[int]
    non_finite: str | None


@dataclass(frozen=True)
class Plan:
    """The image of one shard, to be taken."""

    shard: int
    num_shards: int
    layout: Layout
    parts: Sequence[Part] = field(repr=False)
    blobs: tuple[Blob, ...] = field(repr=False)
    tail: bytes = field(repr=False)
    trees: tuple[tuple[str, Any], ...] = field(repr=False)
    staging: Staging | None = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes + len(self.tail)

    def copy(self, view: memoryview) -> Copied:
        """All bytes into a writable buffer of `num_bytes` at least. Once the optimizer may step, it must be through."""
        assert view.nbytes >= self.num_bytes, (view.nbytes, self.num_bytes)
        return Copy(self, view).run()

    def index(self, job: str, step: int, epoch: int, written_s: float, sums: tuple[int, ...] = ()) -> Index:
        return Index(
            image.VERSION, job, step, epoch, self.shard, self.num_shards, written_s, self.num_bytes,
            self.layout.pieces, self.blobs, self.trees, sums,
        )  # fmt: skip


def plan(objects: Mapping[str, Stateful], *, shard: int = 0, num_shards: int = 1, last: Plan | None = None) -> Plan:
    """`last`: an earlier plan of the same objects, whose layout is used again if it still holds.

    Raises ValueError which names what cannot be saved.
    """
    with torch.no_grad():
        named = naming.name(objects)
        key = layout_key(named)
        layout = last.layout if last is not None and last.layout.key == key else lay_out(key, named)
        still = (Kind.PARAMETER, Kind.MOMENT)
        parts = [p if p.kind in still else p._replace(tensor=p.tensor.clone()) for p in named.parts]
        blobs, tail = lay_out_blobs(named.leaves, layout.num_bytes)
        devices = {part.tensor.device for part in parts} - {torch.device("cpu")}
        staging = (last.staging if last else None) or Staging() if devices else None
        if staging:
            staging.mark(devices)
    return Plan(shard, num_shards, layout, parts, blobs, tail, tuple(named.trees), staging)


def layout_key(named: naming.Named) -> tuple[Any, ...]:
    parts = [(part.tensor.dtype, part.tensor.shape, part.global_shape, part.offsets) for part in named.parts]
    return tuple(named.names), tuple(parts)


def lay_out(key: tuple[Any, ...], named: naming.Named) -> Layout:
    heads, starts, end = [], [], 0
    for part in named.parts:
        head = item.head(dtype_name(part.tensor.dtype), tuple(part.tensor.shape))
        start = -(-(end + len(head)) // ALIGN_BYTES) * ALIGN_BYTES
        heads.append((end, bytes(start - len(head) - end) + head))
        starts.append(start)
        end = start + part.tensor.nbytes
    pieces = tuple(piece(name, named.parts[index], starts[index]) for name, index in named.names)
    return Layout(key, pieces, tuple(heads), tuple(starts), end)


def piece(name: str, part: Part, start: int) -> Piece:
    dtype, shape, num_bytes = dtype_name(part.tensor.dtype), tuple(part.tensor.shape), part.tensor.nbytes
    before = len(item.head(dtype, shape))
    span = (start - before, before + num_bytes)
    return Piece(name, dtype, part.global_shape, part.offsets, shape, start, num_bytes, span)


def lay_out_blobs(leaves: Sequence[tuple[str, Any]], start: int) -> tuple[tuple[Blob, ...], bytes]:
    """Behind the tensors, since their lengths change from step to step; equal ones once."""
    places: dict[bytes, int] = {}
    blobs, end = [], start
    for name, leaf in leaves:
        data = item.value(leaf)
        at = places.setdefault(data, end)
        end += len(data) if at == end else 0
        blobs.append(Blob(name, (at, len(data))))
    return tuple(blobs), b"".join(places)


class Copy:
    """One run of a plan into one buffer."""

    def __init__(self, plan: Plan, view: memoryview) -> None:
        self.plan = plan
        self.view = view.cast("B")
        self.bytes = torch.frombuffer(self.view, dtype=torch.uint8)
        self.base = self.bytes.data_ptr()
        self.written = 0
        self.changed: set[int] = set()
        self.non_finite: str | None = None

    def run(self) -> Copied:
        layout = self.plan.layout
        with torch.no_grad():
            for part, start, head in zip(self.plan.parts, layout.starts, layout.heads, strict=True):
                self.put(*head)
                if part.tensor.nbytes:
                    self.part(part, start)
                    self.check(part, start)
            self.put(layout.num_bytes, self.plan.tail)
        return Copied(self.written, frozenset(self.changed), self.non_finite)

    def put(self, start: int, data: bytes) -> None:
        if self.view[start : start + len(data)] != data:
            self.view[start : start + len(data)] = data
            self.mark(start, len(data))

    def mark(self, start: int, num_bytes: int) -> None:
        self.written += num_bytes
        self.changed.update(range(start // CHUNK_BYTES, (start + num_bytes - 1) // CHUNK_BYTES + 1))

    def part(self, part: Part, start: int) -> None:
        tensor = part.tensor
        if tensor.device.type != "cpu":
            assert self.plan.staging is not None
            for at, staged in self.plan.staging.pull(tensor):
                self.move(staged.data_ptr(), start + at, staged.nbytes)
        else:
            whole = tensor.resolve_neg().resolve_conj().contiguous()
            self.move(whole.data_ptr(), start, whole.nbytes)

    def move(self, source: int, start: int, num_bytes: int) -> None:
        libc = _HELD if num_bytes < SMALL_BYTES else _FREE
        if libc.memcmp(self.base + start, source, num_bytes):
            libc.memmove(self.base + start, source, num_bytes)
            self.mark(start, num_bytes)

    def check(self, part: Part, start: int) -> None:
        if part.kind is Kind.OTHER or self.non_finite:
            return  # a user's "best loss so far" may begin at infinity
        copied = self.bytes[start : start + part.tensor.nbytes].view(part.tensor.dtype)
        if not finite(copied, infinity=part.kind is Kind.BUFFER):
            self.non_finite = next(piece.name for piece in self.plan.layout.pieces if piece.start == start)


def finite(values: Tensor, *, infinity: bool = False) -> bool:
    """Whether no value is NaN or, unless `infinity` is allowed (masks are full of it), infinite.

    A sum runs at 35 GB/s and is finite only if all values are; the exact answer, at 1, is asked for only when it is
    not, which a sum that overflows is too.
    """
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point():
        return True
    if values.dtype.itemsize == 1:
        values = values.float()
    wide = torch.float64 if values.dtype is torch.float64 else torch.float32
    if math.isfinite(values.sum(dtype=wide).item()):
        return True
    return not bool(values.isnan().any() if infinity else (~values.isfinite()).any())

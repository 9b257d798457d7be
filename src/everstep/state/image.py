"""An image: one shard of the job's state at one step, as bytes which are the same in a vault's memory and in a file.

Its data is a valid data file of `torch.distributed.checkpoint`: every tensor is an item which stock PyTorch reads. The
index beside it says what is where, in words of ours, so that nothing of ours ever unpickles a byte. Tensors have the
names, global shapes and offsets of the whole job, so any image serves any later layout.

The data is cut into chunks of CHUNK_BYTES, the unit of copying, sending, writing and checking.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import msgspec

VERSION = 1
CHUNK_BYTES = 4 << 20
ALIGN_BYTES = 64  # of each tensor's first byte
DIGEST_BYTES = 16


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """One tensor, or the part of one that this shard holds: contiguous, row-major, at `start`.

    item: (start, length) of the bytes which `torch.load` reads, around the raw ones.
    """

    name: str  # "model.blocks.0.weight", "optimizer.state.blocks.0.weight.exp_avg"
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]  # of this part in the global tensor
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    item: tuple[int, int]


class Blob(msgspec.Struct, array_like=True, frozen=True):
    """A value without tensors, for stock PyTorch only: pickled, so never read by us."""

    name: str
    item: tuple[int, int]


class Index(msgspec.Struct, array_like=True, frozen=True):
    """What an image holds. `objects`: the protected ones by name, each a tree (state.tree) with numbers of pieces."""

    version: int
    job: str
    step: int  # steps committed: the number of the next one
    epoch: int  # whose gradients made the last of them
    shard: int
    num_shards: int
    written_s: float  # wall clock of the node that took it
    num_bytes: int  # of the data
    pieces: tuple[Piece, ...]
    blobs: tuple[Blob, ...]
    objects: tuple[tuple[str, Any], ...]
    sums: tuple[int, ...] = ()  # xxh3_64 of each chunk; empty while they are not known

    @property
    def num_chunks(self) -> int:
        return -(-self.num_bytes // CHUNK_BYTES)


class Source(Protocol):
    """Where the data of an image is: a vault's memory, a peer's, a file, an object store."""

    @property
    def index(self) -> Index: ...

    def read(self, chunk: int, into: memoryview) -> None:
        """The bytes of one chunk, checked; several threads may call it at once. Raises Damaged, or OSError."""


class Damaged(Exception):
    """The bytes are not those that were written; the text says which, and where."""


def encode(index: Index) -> bytes:
    body = msgspec.msgpack.encode(index)
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() + body


def decode(data: bytes) -> Index:
    """Raises Damaged for an index which is cut short, changed, or of another version."""
    body = memoryview(data)[DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() != data[:DIGEST_BYTES]:
        raise Damaged(f"the index of an image ({len(data)} bytes) is cut short or damaged")
    try:
        index = msgspec.msgpack.decode(body, type=Index)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Damaged(f"the index of an image is not one: {error}") from error
    if index.version != VERSION:
        raise Damaged(f"the index of an image is of version {index.version}, this is version {VERSION}")
    return index


def chunk_span(index: Index, chunk: int) -> tuple[int, int]:
    """(first byte, one past the last) of a chunk."""
    start = chunk * CHUNK_BYTES
    return start, min(start + CHUNK_BYTES, index.num_bytes)

"""The .metadata file of a checkpoint: what stock `torch.distributed.checkpoint.load` reads first. Pure, without torch.

It is a pickle of torch's class Metadata, written here opcode by opcode: so the process that saves needs no torch, equal
indexes give equal bytes, and nothing is ever unpickled. torch keeps reading what its older versions wrote, so these
names and fields stay valid; tests/state/test_stock.py loads with the torch that is installed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from everstep.state.image import Blob, Damaged, Index, Piece
from everstep.state.layout import data_name

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
FORMAT_VERSION = "1.0.0"  # of torch.distributed.checkpoint


class Named(NamedTuple):
    """An object found by import."""

    module: str
    name: str


class Called(NamedTuple):
    """What a call of something by import gives."""

    what: Named
    arguments: tuple[Any, ...]


class Made(NamedTuple):
    """An instance with this state."""

    kind: Named
    state: Any


class Parts(NamedTuple):
    """What all shards hold of one name, replicated pieces once: (shard, piece)."""

    first: Piece
    pieces: list[tuple[int, Piece]]


def merge(indexes: Sequence[Index]) -> dict[str, Parts]:
    """Tensors by name, over all shards. Raises Damaged when shards contradict each other or do not make it whole."""
    tensors, problems = merge_what_fits(indexes)
    if problems:
        raise Damaged("; ".join(problems))
    return tensors


def merge_what_fits(indexes: Sequence[Index]) -> tuple[dict[str, Parts], list[str]]:
    """(tensors by name, what is wrong with the others)."""
    found: dict[str, dict[tuple[int, ...], tuple[int, Piece]]] = {}
    for index in indexes:
        for piece in index.pieces:
            if math.prod(piece.shape) or not math.prod(piece.global_shape):
                found.setdefault(piece.name, {}).setdefault(piece.offsets, (index.shard, piece))
    tensors, problems = {}, []
    for name, parts in found.items():
        held = list(parts.values())
        first = held[0][1]
        if any((piece.dtype, piece.global_shape) != (first.dtype, first.global_shape) for _, piece in held):
            problems.append(f"{name}: the shards do not agree in its dtype and shape")
        elif sum(math.prod(piece.shape) for _, piece in held) != math.prod(first.global_shape):
            problems.append(f"{name}: the shards do not make a whole tensor of shape {first.global_shape}")
        else:
            tensors[name] = Parts(first, held)
    return tensors, problems


def metadata(indexes: Sequence[Index]) -> bytes:
    """The file's contents, for the indexes of all shards. A name which is not one tensor of all shards is left out."""
    tensors, _ = merge_what_fits(indexes)
    blobs: dict[str, tuple[int, Blob]] = {}
    for index in indexes:
        for blob in index.blobs:
            blobs.setdefault(blob.name, (index.shard, blob))
    objects = sorted({name for index in indexes for name, _ in index.objects}, key=len, reverse=True)
    entries: dict[str, Any] = {name: _tensor(parts) for name, parts in tensors.items()}
    entries |= {name: Made(Named(_METADATA, "BytesStorageMetadata"), {}) for name in blobs}
    where = {_place(p.name, p.offsets): _info(s, p.item) for parts in tensors.values() for s, p in parts.pieces}
    where |= {_place(name, None): _info(shard, blob.item) for name, (shard, blob) in blobs.items()}
    state = {
        "state_dict_metadata": entries,
        "planner_data": {name: _path(name, objects) for name in entries},
        "storage_data": where,
        "storage_meta": None,
        "version": FORMAT_VERSION,
    }
    writer = Writer()
    writer.put(Made(Named(_METADATA, "Metadata"), state))
    return writer.finish()


def _path(name: str, objects: Iterable[str]) -> tuple[str, ...]:
    """Where a name belongs in the nested dict of objects: ("model", "blocks.0.weight")."""
    owner = next((found for found in objects if name.startswith(found + ".")), None)
    return (name,) if owner is None else (owner, name[len(owner) + 1 :])


def _size(shape: Sequence[int]) -> Called:
    return Called(Named("torch", "Size"), (tuple(shape),))


def _tensor(parts: Parts) -> Made:
    layout = Called(Named("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Called(Named(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (Named("torch", parts.first.dtype), layout, False, memory_format, False)
    chunk = Named(_METADATA, "ChunkStorageMetadata")
    return Made(
        Named(_METADATA, "TensorStorageMetadata"),
        {
            "properties": Made(Named(_METADATA, "TensorProperties"), properties),
            "size": _size(parts.first.global_shape),
            "chunks": [Made(chunk, {"offsets": _size(p.offsets), "sizes": _size(p.shape)}) for _, p in parts.pieces],
        },
    )


class _Place(NamedTuple):
    """Key of storage_data; hashable, unlike Made."""

    name: str
    offsets: tuple[int, ...] | None

    def made(self) -> Made:
        state = {"fqn": self.name, "index": None}
        whole = state if self.offsets is None else state | {"offset": _size(self.offsets)}
        return Made(Named(_METADATA, "MetadataIndex"), whole)


def _place(name: str, offsets: tuple[int, ...] | None) -> _Place:
    return _Place(name, offsets)


def _info(shard: int, item: tuple[int, int]) -> Made:
    state = {"relative_path": data_name(shard), "offset": item[0], "length": item[1]}
    return Made(Named(_FILESYSTEM, "_StorageInfo"), state)


class Writer:
    """Writes pickle, protocol 2: the few opcodes which this file needs."""

    def __init__(self) -> None:
        self._out = [b"\x80\x02"]
        self._known: dict[Named, int] = {}

    def finish(self) -> bytes:
        return b"".join([*self._out, b"."])

    def put(self, value: Any) -> None:
        put: Any = {
            type(None): self._none, bool: self._bool, int: self._int, str: self._str, tuple: self._tuple,
            list: self._list, dict: self._dict, Named: self._named, Called: self._called, Made: self._made,
            _Place: self._place,
        }[type(value)]  # fmt: skip
        put(value)

    def _none(self, _: None) -> None:
        self._out.append(b"N")

    def _bool(self, value: bool) -> None:
        self._out.append(b"\x88" if value else b"\x89")

    def _int(self, value: int) -> None:
        data = value.to_bytes(9, "little", signed=True)
        self._out.append(b"\x8a\x09" + data)

    def _str(self, value: str) -> None:
        data = value.encode()
        self._out.append(b"X" + struct.pack("<I", len(data)) + data)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        self._out.append(b"(")
        for part in value:
            self.put(part)
        self._out.append(b"t")

    def _list(self, value: list[Any]) -> None:
        self._out.append(b"](")
        for part in value:
            self.put(part)
        self._out.append(b"e")

    def _dict(self, value: dict[Any, Any]) -> None:
        self._out.append(b"}(")
        for key, part in value.items():
            self.put(key)
            self.put(part)
        self._out.append(b"u")

    def _named(self, value: Named) -> None:
        if value in self._known:
            self._out.append(b"j" + struct.pack("<I", self._known[value]))
            return
        number = self._known[value] = len(self._known)
        self._out.append(f"c{value.module}\n{value.name}\n".encode() + b"r" + struct.pack("<I", number))

    def _called(self, value: Called) -> None:
        self.put(value.what)
        self.put(value.arguments)
        self._out.append(b"R")

    def _made(self, value: Made) -> None:
        self.put(value.kind)
        self._out.append(b")\x81")
        if value.state:  # torch's classes without fields have no state
            self.put(value.state)
            self._out.append(b"b")

    def _place(self, value: _Place) -> None:
        self.put(value.made())

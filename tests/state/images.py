"""Images in memory, for tests: taken from objects, read back as a source, and written as a folder for stock PyTorch."""

from __future__ import annotations

import importlib
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from everstep.state import restore
from everstep.state.capture import Plan, plan
from everstep.state.flatten import Stateful
from everstep.state.image import Damaged, Index, chunk_span
from everstep.state.tree import dtype_named


class BytesSource:
    """An image in memory. `reads`: the chunks that were read, in order."""

    def __init__(self, index: Index, data: bytearray) -> None:
        self.index = index
        self.data = data
        self.sums = [xxhash.xxh3_64_intdigest(data[slice(*chunk_span(index, n))]) for n in range(index.num_chunks)]
        self.reads: list[int] = []

    def read(self, chunk: int, into: memoryview) -> None:
        self.reads.append(chunk)
        into[:] = memoryview(self.data)[slice(*chunk_span(self.index, chunk))]
        if xxhash.xxh3_64_intdigest(into) != self.sums[chunk]:
            raise Damaged(f"chunk {chunk}")


def take(objects: Mapping[str, Stateful], shard: int = 0, num_shards: int = 1) -> BytesSource:
    return finish(plan(objects, shard=shard, num_shards=num_shards))


def finish(planned: Plan) -> BytesSource:
    data = bytearray(planned.num_bytes)
    planned.copy(memoryview(data))
    return BytesSource(planned.index("job", 7, 1, 0.0), data)


def write(folder: Path, sources: list[BytesSource]) -> None:
    """As torch.distributed.checkpoint would have: data files, and a .metadata."""
    module = importlib.import_module(FileSystemReader.__module__)
    described: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for source in sources:
        index, name = source.index, f"__{source.index.shard}_0.distcp"
        (folder / name).write_bytes(source.data)
        for piece in index.pieces:
            if not math.prod(piece.shape) and math.prod(piece.global_shape):
                continue
            key = MetadataIndex(piece.name, piece.offsets)
            if key in storage:
                continue
            entry = described.setdefault(
                piece.name,
                TensorStorageMetadata(
                    TensorProperties(dtype=dtype_named(piece.dtype)), torch.Size(piece.global_shape), []
                ),
            )
            entry.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)))
            storage[key] = module._StorageInfo(name, *piece.item)
        for blob in index.blobs:
            described[blob.name] = BytesStorageMetadata()
            storage.setdefault(MetadataIndex(blob.name), module._StorageInfo(name, *blob.item))
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, storage_data=storage)))


def load(objects: Mapping[str, Stateful], *sources: BytesSource) -> None:
    restore.load(objects, sources)

"""Small images for tests of checkpoints: named tensors, cut over shards along their first dimension."""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from everstep.state.image import ALIGN_BYTES, VERSION, Blob, Index, Piece

JOB = "train-1234"


def state(step: int, num_rows: int = 12) -> dict[str, Tensor]:
    """Tensors of several dtypes which depend on the step."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(num_rows, 8, generator=generator)
    return {
        "model.blocks.0.weight": weight,
        "model.blocks.0.bias": weight[:, 0].to(torch.bfloat16),
        "model.scale": torch.tensor(float(step)),
        "optimizer.state.blocks.0.weight.exp_avg": weight * 2,
        "optimizer.state.blocks.0.weight.step": torch.tensor(step, dtype=torch.int64),
    }


def image(
    tensors: Mapping[str, Tensor],
    step: int,
    *,
    shard: int = 0,
    num_shards: int = 1,
    epoch: int = 1,
    job: str = JOB,
    blobs: Mapping[str, Any] | None = None,
) -> tuple[Index, memoryview]:
    """One shard: a row-wise part of each tensor, and all of those with fewer rows than shards."""
    data, pieces, found = bytearray(), [], []
    for name, tensor in tensors.items():
        part, offsets = cut(tensor, shard, num_shards)
        start = len(data)
        item = saved(part.clone())
        data += item
        raw = start + _raw(item, part)
        kind = str(tensor.dtype).removeprefix("torch.")
        pieces.append(
            Piece(name, kind, (*tensor.shape,), offsets, (*part.shape,), raw, part.nbytes, (start, len(item)))
        )
        data += bytes(-len(data) % ALIGN_BYTES)
    for name, value in (blobs or {}).items():
        item = saved(value)
        found.append(Blob(name, (len(data), len(item))))
        data += item
    index = Index(
        VERSION, job, step, epoch, shard, num_shards, 1000.0 + step, len(data), tuple(pieces), tuple(found),
        (("model", None), ("optimizer", None)),
    )  # fmt: skip
    return index, shared(bytes(data))


def cut(tensor: Tensor, shard: int, num_shards: int) -> tuple[Tensor, tuple[int, ...]]:
    if tensor.dim() == 0 or len(tensor) < num_shards:
        return tensor, (0,) * tensor.dim()
    rows = -(-len(tensor) // num_shards)
    return tensor[shard * rows : (shard + 1) * rows], (shard * rows, *(0,) * (tensor.dim() - 1))


def shared(data: bytes) -> memoryview:
    """In memory at the begin of a page, as a vault's is."""
    memory = memoryview(mmap.mmap(-1, max(len(data), 1)))[: len(data)]
    memory[:] = data
    return memory


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _raw(item: bytes, part: Tensor) -> int:
    """Where in a file of torch.save the bytes of its one tensor begin."""
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        (record,) = [info for info in archive.infolist() if "/data/" in info.filename]
    name, extra = struct.unpack_from("<HH", item, record.header_offset + 26)
    start = int(record.header_offset + 30 + name + extra)
    assert item[start : start + part.nbytes] == part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return start

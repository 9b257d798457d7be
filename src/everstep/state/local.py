"""The part of a tensor that lies in this process: all of a plain one, this member's share of a DTensor.

Nobody holds a DTensor who has not imported it, so it is not imported here: it would cost every worker's start.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

_HOME = "torch.distributed.tensor"
_OFFSETS: dict[tuple[Any, ...], tuple[int, ...]] = {}  # all that offsets follow from; torch takes 60 us for each
MAX_KNOWN = 1 << 16


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor: one tensor of several members."""
    module = sys.modules.get(_HOME)
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Shares the memory of the tensor. Asks no other member."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # five times as fast as the way that autograd would follow
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part.detach()


def extent(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape of the whole tensor, where in it the local part begins). Raises for a DTensor with partial sums."""
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return shape, (0,) * len(shape)
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    key = (shape, placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))
    if key not in _OFFSETS:
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        if len(_OFFSETS) >= MAX_KNOWN:
            _OFFSETS.clear()
        _OFFSETS[key] = tuple(chunk.offsets)
    return shape, _OFFSETS[key]


def like(model: Tensor, part: Tensor) -> Tensor:
    """`part`, if the model is a DTensor as the part of one which is split in the same way."""
    if not is_sharded(model):
        return part
    whole: Tensor = sys.modules[_HOME].DTensor.from_local(
        part,
        model.device_mesh,  # type: ignore[attr-defined]
        model.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=model.shape,
        stride=model.stride(),
    )
    return whole

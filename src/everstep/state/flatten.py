"""Training state as a small typed header and a list of tensors: how it is sent, kept, and put back, without pickle.

The tensors are the live ones, so flattening costs no copy. Putting back is in place wherever a tensor of the same shape
and dtype is there: parameters keep their identity and address, and so does the state of optimizers. Everything is
checked before anything is touched.

Not state: buffers registered with persistent=False, gradients, and whatever a `state_dict()` leaves out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from torch import Tensor

from everstep.state import inplace
from everstep.state.tree import Packer, TensorSpec, describe, dtype_name, unpack

VERSION = 1
DIGEST_BYTES = 16


@runtime_checkable
class Stateful(Protocol):
    """Modules, optimizers, schedulers, grad scalers, and any object of the user's with these two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Header(msgspec.Struct, array_like=True, frozen=True):
    """What the tensors are, and where in which object each belongs."""

    version: int
    tensors: list[TensorSpec]
    objects: list[tuple[str, Any]]


@dataclass(frozen=True)
class Flat:
    """State in flat form. `tensors` share memory with the objects: they change when those do."""

    header: bytes
    tensors: list[Tensor]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def flatten(objects: Mapping[str, Stateful]) -> Flat:
    """The state of named objects. Raises ValueError which names what cannot travel."""
    packer = Packer()
    trees = [(name, packer.pack(stateful.state_dict(), name)) for name, stateful in objects.items()]
    body = msgspec.msgpack.encode(Header(VERSION, packer.specs, trees))
    return Flat(hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() + body, packer.tensors)


def parse(header: bytes) -> Header:
    """Raises ValueError for a header which is cut short, damaged, or of another version."""
    body = memoryview(header)[DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() != header[:DIGEST_BYTES]:
        raise ValueError(f"the header of the state ({len(header)} bytes) is cut short or damaged")
    try:
        parsed = msgspec.msgpack.decode(body, type=Header)
        for spec in parsed.tensors:
            _ = spec.torch_dtype
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the header of the state is not one: {error}") from error
    if parsed.version != VERSION:
        raise ValueError(f"the header of the state is of version {parsed.version}, this is version {VERSION}")
    return parsed


def empty(header: bytes) -> list[Tensor]:
    """New tensors in host memory which the state of this header fits into, to receive it in."""
    return [torch.empty(spec.shape, dtype=spec.torch_dtype) for spec in parse(header).tensors]


def apply(objects: Mapping[str, Stateful], header: bytes, tensors: Sequence[Tensor]) -> None:
    """Put the state into the objects. `tensors` may be on any device; they are copied, never kept.

    Raises ValueError, before any object changed, for a damaged header, tensors that are not the header's, other names,
    other shapes or dtypes, other ties between parameters. What a user's own `load_state_dict` raises comes through.
    """
    parsed = parse(header)
    _check_tensors(parsed, tensors)
    trees = dict(parsed.objects)
    if set(trees) != set(objects):
        raise ValueError(f"the state is of {sorted(trees)}, protected here are {sorted(objects)}")
    loads = [
        inplace.prepare(name, objects[name], unpack(tree, tensors.__getitem__), parsed.tensors, tensors)
        for name, tree in trees.items()
    ]
    with torch.no_grad():
        for load in loads:
            load()


def _check_tensors(parsed: Header, tensors: Sequence[Tensor]) -> None:
    if len(tensors) != len(parsed.tensors):
        raise ValueError(f"the header names {len(parsed.tensors)} tensors, {len(tensors)} were given")
    for number, (spec, tensor) in enumerate(zip(parsed.tensors, tensors, strict=True)):
        if tuple(tensor.shape) != spec.shape or tensor.dtype is not spec.torch_dtype:
            given = describe(tensor.shape, dtype_name(tensor.dtype))
            raise ValueError(f"tensor {number} is {spec} by the header, and {given} was given")

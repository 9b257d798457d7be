"""The typed tree of a state dict: what may occur in one, as msgpack, with each tensor replaced by a number.

Plain scalars stand for themselves; everything else is a list that starts with a tag. Types are kept exactly (a tuple
comes back as a tuple, a numpy scalar as one), because schedulers and generators check them. There is no tag for "any
Python object": nothing that arrives can run code.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from everstep.state.local import is_sharded, local

MAX_DEPTH = 64  # an object that contains itself would be walked for ever
MAPPINGS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "n"}
SEQUENCES: dict[type, str] = {list: "l", tuple: "t"}
PLAIN = (type(None), bool, float, str, bytes)
KEYS = (*PLAIN, int, tuple)
ALLOWED = "a tensor, number, string, bytes, list, tuple, dict or numpy array"


class TensorSpec(msgspec.Struct, array_like=True, frozen=True):
    """One tensor of the list: `storage` is equal for tensors that share memory. `device` is a type, as "cpu".

    `sharded`: this member's part of a DTensor; shape and memory are those of the part.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str
    storage: int
    sharded: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_named(self.dtype)

    def __str__(self) -> str:
        return describe(self.shape, self.dtype)


def describe(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype} of shape {tuple(shape)}"


def dtype_named(name: object) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Packer:
    """Turns values into nodes and collects their tensors: the live ones, each once however many names it has."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.specs: list[TensorSpec] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._storages: dict[int, int] = {}

    def pack(self, value: Any, path: str, depth: int = 0) -> Any:
        """The node of a value. Raises ValueError that names the path of what cannot travel."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 63 else ["i", str(value)]
        if isinstance(value, Tensor):
            return ["T", self.number(value, path)]
        if depth >= MAX_DEPTH:
            raise ValueError(f"{path[:200]}...: nested more than {MAX_DEPTH} deep, or contains itself")
        if kind in MAPPINGS or kind is defaultdict:  # a default factory is code: the plain dict travels
            return [MAPPINGS.get(kind, "d"), [self._item(key, item, path, depth) for key, item in value.items()]]
        if kind in SEQUENCES:
            return [SEQUENCES[kind], [self.pack(part, self.join(path, i), depth + 1) for i, part in enumerate(value)]]
        return pack_leaf(value, path)

    def join(self, path: str, key: Any) -> str:
        return f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"

    def _item(self, key: Any, value: Any, path: str, depth: int) -> list[Any]:
        path = self.join(path, key)
        if type(key) not in KEYS:
            raise ValueError(f"{path}: a key of type {type_name(key)} cannot travel: use strings or numbers")
        node = key if type(key) is str else Packer().pack(key, path, depth + 1)
        return [node, self.pack(value, path, depth + 1)]

    def number(self, tensor: Tensor, path: str) -> int:
        """What stands for the tensor in the tree."""
        sharded, tensor = is_sharded(tensor), local(tensor)
        check_tensor(tensor, path)
        tensor = tensor.detach()
        address = tensor.untyped_storage().data_ptr()
        key = (address, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        index = len(self.tensors)
        if tensor.numel():  # empty ones all have the address 0
            index = self._known.setdefault(key, index)
        if index == len(self.tensors):
            storage = self._storages.setdefault(address, len(self._storages)) if tensor.numel() else -1
            dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
            self.specs.append(TensorSpec(dtype, shape, tensor.device.type, storage, sharded))
            self.tensors.append(tensor)
        return index


def check_tensor(tensor: Tensor, path: str) -> None:
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
            raise ValueError(f"{path}: has no shape yet: run one forward of the lazy module before")
        raise ValueError(f"{path}: a tensor of type {type_name(tensor)} cannot travel: give its plain tensors")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{path}: a tensor of layout {tensor.layout} cannot travel: give it as a dense tensor")
    if tensor.is_quantized or tensor.is_meta:
        raise ValueError(f"{path}: a quantized tensor, or one without memory, cannot travel")


def type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def pack_leaf(value: Any, path: str) -> list[Any]:
    kind = type(value)
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is torch.dtype:
        return ["D", dtype_name(value)]
    if kind is torch.Size:
        return ["Z", list(value)]
    if kind is torch.device:
        return ["V", str(value)]
    if kind is np.ndarray or isinstance(value, np.generic):
        if value.dtype.hasobject or value.dtype.fields:
            raise ValueError(f"{path}: a numpy value of dtype {value.dtype} cannot travel: give its plain arrays")
        return ["A" if kind is np.ndarray else "S", value.dtype.str, list(value.shape), value.tobytes()]
    raise ValueError(f"{path}: an object of type {type_name(value)} cannot travel: give it as {ALLOWED}")


def unpack(node: Any, take: Callable[[int], Any]) -> Any:
    """The value of a node; `take(index)` gives a tensor, or what shall stand for one.

    Raises ValueError for what `Packer` never writes.
    """
    if not isinstance(node, list):
        return node
    try:
        return _unpack(node, take)
    except (TypeError, IndexError, RuntimeError, OverflowError) as error:
        raise ValueError(f"not a node of a state tree: {str(node)[:80]}") from error


def _unpack(node: list[Any], take: Callable[[int], Any]) -> Any:
    tag, *rest = node
    for kind, name in MAPPINGS.items():
        if tag == name:
            return kind({unpack(key, take): unpack(value, take) for key, value in rest[0]})
    for kind, name in SEQUENCES.items():
        if tag == name:
            return kind(unpack(part, take) for part in rest[0])
    if tag == "T":
        return take(rest[0])
    if tag in ("A", "S"):
        return _numpy(tag, *rest)
    leaves: dict[str, Callable[..., Any]] = {
        "i": int, "c": complex, "D": dtype_named, "Z": torch.Size, "V": torch.device,
    }  # fmt: skip
    if tag not in leaves:
        raise ValueError(f"unknown tag {tag!r} in a state tree")
    return leaves[tag](*rest)


def _numpy(tag: str, dtype: str, shape: list[int], data: bytes) -> Any:
    kind = np.dtype(dtype)
    if kind.hasobject or len(data) != kind.itemsize * math.prod(shape):
        raise ValueError(f"a numpy value of dtype {dtype} and shape {shape} with {len(data)} bytes")
    array = np.frombuffer(data, kind).reshape(shape).copy()
    return array if tag == "A" else array[()]

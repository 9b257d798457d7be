"""The names which tensors have in the whole job, whatever part of it this process holds.

A module's are "<object>.<fqn>", without the prefixes of wrappers (DistributedDataParallel, torch.compile). An
optimizer's are "<object>.state.<fqn>.<key>", where fqn is the parameter's name in the one protected module; with
several modules it is "<module's object>.<fqn>", and "param.<number>" for a parameter of none. Those are the names which
stock `torch.distributed.checkpoint.state_dict.get_state_dict` gives, flattened by dots. All other objects:
"<object>.<path in its state dict>".

Tied weights are one part with several names, and so is the optimizer's state of a tied weight.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from everstep.state.flatten import Stateful
from everstep.state.inplace import plain
from everstep.state.local import extent, local
from everstep.state.tree import MAX_DEPTH, PLAIN, Packer, check_tensor


class Kind(Enum):
    PARAMETER = "parameter"
    MOMENT = "moment"  # state of an optimizer
    BUFFER = "buffer"
    OTHER = "other"


class Part(NamedTuple):
    """One tensor of the state as this process holds it: the live one, all of it or its part of a DTensor."""

    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    kind: Kind


@dataclass(frozen=True)
class Named:
    """The state of named objects.

    names: (name, index of its part), in the order of the trees; a tensor in a tree is ["T", index in names].
    leaves: the values without tensors, under the names that stock PyTorch gives them.
    """

    parts: list[Part] = field(default_factory=list)
    names: list[tuple[str, int]] = field(default_factory=list)
    trees: list[tuple[str, Any]] = field(default_factory=list)
    leaves: list[tuple[str, Any]] = field(default_factory=list)


def name(objects: Mapping[str, Stateful]) -> Named:
    """Raises ValueError which names what cannot be saved."""
    namer = Namer(objects)
    for key, thing in objects.items():
        namer.add(key, thing)
    seen: set[str] = set()
    for title, _ in namer.named.names:
        if title in seen:
            raise ValueError(f"two tensors of the protected objects have the name {title}: rename one")
        seen.add(title)
    return namer.named


def parameters(objects: Mapping[str, Stateful]) -> dict[int, list[str]]:
    """id of each parameter -> the names by which optimizers know it; several for a tied weight, the first one first."""
    modules = {key: thing for key, thing in objects.items() if isinstance(thing, nn.Module)}
    known: dict[int, list[str]] = {}
    for key, module in modules.items():
        wrapped = wrappers(module)
        for path, parameter in module.named_parameters(remove_duplicate=False):
            fqn = unwrapped(path, wrapped)
            known.setdefault(id(parameter), []).append(fqn if len(modules) == 1 else f"{key}.{fqn}")
    return known


def fqns(optimizer: Optimizer, known: Mapping[int, list[str]]) -> list[tuple[Tensor, list[str]]]:
    """An optimizer's parameters in its order, each with its names."""
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(parameter, known.get(id(parameter)) or [f"param.{i}"]) for i, parameter in enumerate(listed)]


def wrappers(module: nn.Module) -> list[str]:
    """The prefixes which wrappers around modules add to names."""
    compiled = sys.modules.get("torch._dynamo.eval_frame")
    found = []
    for path, inner in module.named_modules(remove_duplicate=False):
        lead = f"{path}." if path else ""
        if isinstance(inner, DistributedDataParallel):
            found.append(f"{lead}module.")
        elif compiled is not None and isinstance(inner, compiled.OptimizedModule):
            found.append(f"{lead}_orig_mod.")
    return found


def unwrapped(path: str, wrapped: list[str]) -> str:
    for prefix in reversed(wrapped):  # the innermost first: the outer prefixes of the same list are still in the path
        if path.startswith(prefix):
            path = prefix[: prefix[:-1].rfind(".") + 1] + path[len(prefix) :]
    return path


class Namer(Packer):
    """Walks objects; trees as Packer's, with global names for the tensors."""

    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        super().__init__()
        self.named = Named()
        self.fqns = parameters(objects)
        self._parts: dict[tuple[Any, ...], int] = {}
        self._kinds = kinds(objects)
        self._other = Kind.OTHER
        self._in_leaf = False

    def add(self, key: str, thing: Stateful) -> None:
        self._other = Kind.BUFFER if isinstance(thing, nn.Module) else Kind.OTHER
        if isinstance(thing, nn.Module):
            tree = self._module(key, thing)
        elif isinstance(thing, Optimizer) and plain(thing):
            tree = self._optimizer(key, thing)
        else:
            tree = self.pack(thing.state_dict(), key)
        self.named.trees.append((key, tree))

    def _module(self, key: str, module: nn.Module) -> Any:
        wrapped = wrappers(module)
        items = [(unwrapped(path, wrapped), value) for path, value in module.state_dict().items()]
        return ["d", [[fqn, self.pack(value, f"{key}.{fqn}")] for fqn, value in items]]

    def _optimizer(self, key: str, optimizer: Optimizer) -> Any:
        listed = fqns(optimizer, self.fqns)
        names = {id(parameter): names for parameter, names in listed}
        entries = [(known, optimizer.state[at]) for at, known in listed if at in optimizer.state]
        entries += [([str(at)], values) for at, values in optimizer.state.items() if id(at) not in names]
        state = []
        for (first, *others), values in entries:  # in the order of the parameters, not in that of their first steps
            state.append([first, self.pack(values, f"{key}.state.{first}")])
            state += [[other, self._silent(values, f"{key}.state.{other}")] for other in others]
        groups = [
            self._group(f"{key}.param_groups.{i}", group, names) for i, group in enumerate(optimizer.param_groups)
        ]
        return ["d", [["state", ["d", state]], ["param_groups", ["l", groups]]]]

    def _group(self, path: str, group: dict[str, Any], names: dict[int, list[str]]) -> Any:
        """Its tree has all names of a tied weight, and for stock PyTorch the first one."""
        options = {option: value for option, value in group.items() if option not in ("params", "param_names")}
        listed = [names[id(parameter)] for parameter in group["params"]]
        node = self.pack(options, path)
        self.named.leaves.append((f"{path}.params", [first for first, *_ in listed]))
        node[1].append(["params", ["l", [name for known in listed for name in known]]])
        return node

    def _silent(self, value: Any, path: str) -> Any:
        """Without leaves."""
        before, self._in_leaf = self._in_leaf, True
        try:
            return self.pack(value, path)
        finally:
            self._in_leaf = before

    def join(self, path: str, key: Any) -> str:
        return f"{path}.{key}"

    def pack(self, value: Any, path: str, depth: int = 0) -> Any:
        if self._in_leaf or isinstance(value, Tensor | Mapping) or traversed(value):
            return super().pack(value, path, depth)
        self.named.leaves.append((path, value))
        return self._silent(value, path) if type(value) not in PLAIN else value

    def number(self, tensor: Tensor, path: str) -> int:
        part = local(tensor)
        check_tensor(part, path)
        part = part.detach()
        address = part.data_ptr()
        shape, offsets = extent(tensor)
        key = (address, part.dtype, shape, offsets, part.shape, part.stride(), part.device) if part.numel() else (path,)
        index = self._parts.setdefault(key, len(self.named.parts))
        if index == len(self.named.parts):
            kind = self._kinds.get(address, self._other)
            self.named.parts.append(Part(part, shape, offsets, kind))
        self.named.names.append((path, index))
        return len(self.named.names) - 1


def kinds(objects: Mapping[str, Stateful]) -> dict[int, Kind]:
    """By address: what only the optimizer's step changes. A forward pass may change all else."""
    found: dict[int, Kind] = {}
    for thing in objects.values():
        if isinstance(thing, nn.Module):
            found |= {local(tensor).data_ptr(): Kind.PARAMETER for tensor in thing.parameters()}
        elif isinstance(thing, Optimizer):
            states = [state for state in thing.state.values() if isinstance(state, Mapping)]
            tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
            found |= {local(tensor).data_ptr(): Kind.MOMENT for tensor in tensors}
    return found


def traversed(value: Any, depth: int = 0) -> bool:
    """Whether stock PyTorch gives the items of this value names of their own."""
    if isinstance(value, Mapping):
        return True
    if type(value) is not list or depth > MAX_DEPTH:
        return False
    return any(isinstance(item, Tensor) or traversed(item, depth + 1) for item in value)

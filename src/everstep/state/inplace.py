"""Putting received state into living objects: modules and optimizers in place, all others by their load_state_dict.

`torch.optim.Optimizer.load_state_dict` is not used where it can be helped: it replaces the tensors, keeps the received
ones, and casts the state of a bfloat16 parameter to bfloat16, so that float32 moments come back rounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.state.local import like, local
from everstep.state.tree import MAPPINGS, TensorSpec, describe, dtype_name

HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def prepare(
    name: str, target: Any, tree: Any, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]
) -> Callable[[], object]:
    """Check that the tree fits the target; what is returned puts it in. Raises ValueError; touches nothing."""
    kinds = {id(tensor): spec for tensor, spec in zip(tensors, specs, strict=True)}
    if isinstance(target, nn.Module) and isinstance(tree, dict):
        check_module(name, target, tree)
        return lambda: load_module(target, tree)
    if isinstance(target, Optimizer) and plain(target):
        check_optimizer(name, target, tree)
        return lambda: load_optimizer(target, tree, kinds)
    return lambda: target.load_state_dict(own(tree))


def own(value: Any, clones: dict[int, Tensor] | None = None) -> Any:
    """The same tree with copies of its tensors; one copy of a tensor which occurs several times."""
    clones = {} if clones is None else clones
    if isinstance(value, Tensor):
        if id(value) not in clones:
            clones[id(value)] = value.clone()
        return clones[id(value)]
    if type(value) in MAPPINGS:
        return type(value)({key: own(item, clones) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(own(item, clones) for item in value)
    return value


def check_names(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    missing, extra = [key for key in here if key not in there], [key for key in there if key not in here]
    parts = [f"the state lacks {name}.{missing[0]} ({len(missing)} such)"] if missing else []
    parts += [f"there is no {name}.{extra[0]} here ({len(extra)} such)"] if extra else []
    if parts:
        raise ValueError(f"the state does not fit {name}: {'; '.join(parts)}")


def check_tensor(path: str, here: Tensor, there: Any) -> None:
    if not isinstance(there, Tensor):
        raise ValueError(f"{path} is a tensor here, and a {type(there).__name__} in the state")
    here = local(here)
    if here.shape != there.shape or here.dtype is not there.dtype:
        mine, other = describe(here.shape, dtype_name(here.dtype)), describe(there.shape, dtype_name(there.dtype))
        raise ValueError(f"{path} is {mine} here, and {other} in the state")


def check_module(name: str, module: nn.Module, tree: dict[str, Any]) -> None:
    here = module.state_dict()
    check_names(name, here, tree)
    mine: dict[Any, str] = {}
    theirs: dict[int, str] = {}
    for key, whole in here.items():
        if not isinstance(whole, Tensor):
            continue
        value = local(whole)
        check_tensor(f"{name}.{key}", value, tree[key])
        if value.numel():  # the first name under which each of the two sides knows this memory
            first = mine.setdefault((value.data_ptr(), value.shape, value.stride()), key)
            other = theirs.setdefault(id(tree[key]), key)
            if first != other:
                tied, where, free = (first, "here", "in the state") if first != key else (other, "in the state", "here")
                raise ValueError(f"{name}.{key} is the same tensor as {name}.{tied} {where}, but not {free}")


def load_module(module: nn.Module, tree: dict[str, Any]) -> None:
    """By the module's own method, which copies into its tensors and calls its hooks."""
    here = module.state_dict()
    tensors = {key: whole for key, whole in here.items() if isinstance(whole, Tensor)}
    state = OrderedDict((key, like(tensors[key], v) if key in tensors else own(v)) for key, v in tree.items())
    if hasattr(here, "_metadata"):  # versions of the modules; without them old formats would be guessed
        state._metadata = here._metadata  # type: ignore[attr-defined]
    module.load_state_dict(state)


def plain(optimizer: Optimizer) -> bool:
    """Nothing but torch's own methods makes and reads its state dict."""
    own_methods = ("state_dict", "load_state_dict")
    overridden = any(getattr(type(optimizer), name) is not getattr(Optimizer, name) for name in own_methods)
    return not overridden and not any(getattr(optimizer, hooks) for hooks in HOOKS)


def check_optimizer(name: str, optimizer: Optimizer, tree: Any) -> None:
    groups = optimizer.param_groups
    sizes = [len(group["params"]) for group in groups]
    try:
        theirs = [len(group["params"]) for group in tree["param_groups"]]
        state = tree["state"].items()
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the state of {name} is not that of an optimizer") from error
    if sizes != theirs:
        raise ValueError(f"{name} has groups of {sizes} parameters here, and of {theirs} in the state")
    for number, (group, saved) in enumerate(zip(groups, tree["param_groups"], strict=True)):
        ours = group.get("param_names")
        if ours != saved.get("param_names", ours):
            raise ValueError(f"{name}.param_groups[{number}] has other parameters here than in the state")
    parameters = by_number(optimizer, tree)
    for key, values in state:
        here = optimizer.state.get(parameters.get(key, key), {})
        for field, value in here.items() if isinstance(values, dict) else ():
            if isinstance(value, Tensor) and isinstance(values.get(field), Tensor):
                check_tensor(f"{name}.state[{key}].{field}", value, values[field])


def by_number(optimizer: Optimizer, tree: dict[str, Any]) -> dict[Any, Tensor]:
    """The parameters by the numbers that stand for them in the state dict."""
    numbers = [number for group in tree["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return dict(zip(numbers, parameters, strict=True))


def load_optimizer(optimizer: Optimizer, tree: dict[str, Any], kinds: dict[int, TensorSpec]) -> None:
    """Entries come in the order of the state, so that two optimizers with equal state give equal state dicts."""
    parameters = by_number(optimizer, tree)
    old = dict(optimizer.state)
    optimizer.state.clear()
    for number, values in tree["state"].items():
        key = parameters.get(number, number)
        optimizer.state[key] = merge(old.get(key), values, parameters.get(number), kinds)
    for group, saved in zip(optimizer.param_groups, tree["param_groups"], strict=True):
        kept = {field: group[field] for field in ("params", "param_names") if field in group}
        options = {field: merge(group.get(field), value, None, kinds) for field, value in saved.items()}
        group.clear()
        group.update(options | kept)


def merge(old: Any, value: Any, parameter: Tensor | None, kinds: dict[int, TensorSpec]) -> Any:
    """The value, in the tensors and dicts of `old` where they fit."""
    if isinstance(value, Tensor):
        if isinstance(old, Tensor) and local(old).shape == value.shape and old.dtype is value.dtype:
            local(old).copy_(value)
            return old
        return new_tensor(value, parameter, kinds[id(value)])
    if isinstance(value, dict) and type(value) in MAPPINGS:
        known = old if isinstance(old, dict) else {}
        merged = {key: merge(known.get(key), item, parameter, kinds) for key, item in value.items()}
        if type(old) is not type(value):
            return type(value)(merged)
        old.clear()
        old.update(merged)
        return old
    if type(value) in (list, tuple):
        items = old if type(old) is type(value) and len(old) == len(value) else [None] * len(value)
        return type(value)(merge(o, v, parameter, kinds) for o, v in zip(items, value, strict=True))
    return value


def new_tensor(value: Tensor, parameter: Tensor | None, kind: TensorSpec) -> Tensor:
    """State which the optimizer does not have yet: beside its parameter, in that one's memory format."""
    target = torch.device("cpu") if parameter is None or kind.device == "cpu" else parameter.device
    if kind.sharded and parameter is not None:
        return like(parameter, value.to(target, copy=True))
    if parameter is not None and parameter.shape == value.shape:
        return torch.empty_like(parameter, dtype=value.dtype, device=target, requires_grad=False).copy_(value)
    return torch.empty(value.shape, dtype=value.dtype, device=target).copy_(value)

"""Saved state into living objects: any saved layout into any other, straight into the memory of the parameters.

`load` first looks at everything that is wanted here, by its global name, and at what the saved shards have of it; only
if all of it is there anything is touched. State that a new optimizer does not have yet is created where it will stay,
so at no time there is a second copy.

A source whose bytes turn out damaged (`Damaged`, `OSError`) leaves some tensors written and some not: load again, from
another source.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.state import naming, reading
from everstep.state.flatten import Stateful
from everstep.state.image import Piece, Source
from everstep.state.inplace import plain
from everstep.state.local import extent, is_sharded, like, local
from everstep.state.reading import Read
from everstep.state.reshape import Box, cover
from everstep.state.tree import MAPPINGS, describe, dtype_name, dtype_named, unpack

NUM_NAMED = 3  # in the text of an error


class Ref(NamedTuple):
    """Stands for a tensor in an unpacked tree."""

    source: int
    piece: Piece


def load(objects: Mapping[str, Stateful], sources: Sequence[Source], *, num_threads: int | None = None) -> None:
    """Of tensors and values that several sources have, the first one's are taken: give the nearest ones first.

    Names that are saved but not wanted here are left alone: a stage takes its own layers. Raises ValueError, before
    anything changed, which names what is missing, of another shape or dtype. What a user's own `load_state_dict`
    raises comes through, as do Damaged and OSError.
    """
    with torch.no_grad():
        loading = Loading(objects, sources)
        finishes = [loading.prepare(key, thing) for key, thing in objects.items()]
        loading.check()
        reading.fill(sources, loading.reads, num_threads)
        for finish in finishes:
            finish()


class Loading:
    """What has to be read, and what does not fit: collected object by object before anything changes."""

    def __init__(self, objects: Mapping[str, Stateful], sources: Sequence[Source]) -> None:
        self.reads: list[Read] = []
        self.problems: list[str] = []
        self._parameters = naming.parameters(objects)
        self._pieces: dict[str, list[Ref]] = {}
        self._trees: dict[str, list[Any]] = {}
        for number, source in enumerate(sources):
            index = source.index
            for piece in index.pieces:
                self._pieces.setdefault(piece.name, []).append(Ref(number, piece))
            refs = [Ref(number, piece) for piece in index.pieces]
            for key, tree in index.objects:
                self._trees.setdefault(key, []).append(unpack(tree, partial(getitem, refs)))

    def check(self) -> None:
        if self.problems:
            more = len(self.problems) - NUM_NAMED
            text = "; ".join(self.problems[:NUM_NAMED]) + (f"; and {more} more" if more > 0 else "")
            raise ValueError(f"what was saved does not fit: {text}")

    def prepare(self, key: str, thing: Stateful) -> Callable[[], object]:
        """Notes what to read; the result puts in what is not a tensor, when all is read."""
        trees = self._trees.get(key, [])
        if not trees:
            self.problems.append(f"{key} was not saved")
            return lambda: None
        if isinstance(thing, nn.Module):
            return self._module(key, thing, trees)
        if isinstance(thing, Optimizer) and plain(thing):
            return self._optimizer(key, thing, trees)
        value = self.value(trees[0], shapes(thing.state_dict()), None)
        return lambda: thing.load_state_dict(value)

    def want(self, names: Sequence[str], tensor: Tensor, prefer: int | None = None) -> None:
        """Note that a tensor (all of it, or the local part) takes what was saved under the first known of the names."""
        title = next((name for name in names if name in self._pieces), names[0])
        refs = self._pieces.get(title, [])
        shape, offsets = extent(tensor)
        part = local(tensor)
        if not refs:
            self.problems.append(f"{title} was not saved")
            return
        saved = refs[0].piece
        if (saved.global_shape, saved.dtype) != (shape, dtype_name(part.dtype)):
            here = describe(shape, dtype_name(part.dtype))
            self.problems.append(f"{title} is {here} here, and {describe(saved.global_shape, saved.dtype)} was saved")
            return
        refs = sorted(refs, key=lambda ref: ref.source != prefer)
        boxes = [Box(ref.piece.offsets, ref.piece.shape) for ref in refs]
        taken, missing = cover(Box(offsets, tuple(part.shape)), boxes)
        if missing:
            self.problems.append(f"{title}: {sum(box.size for box in missing)} elements are in no saved shard given")
        self.reads += [Read(refs[number].source, refs[number].piece, box, part, offsets) for number, box in taken]

    def _want_equal(self, names: Sequence[str], tensor: Tensor) -> None:
        """Copies of a tied weight (of the first and the last stage) must not have drifted apart before they are one."""
        first, *others = [name for name in names if name in self._pieces] or [""]
        places = {(ref.source, ref.piece.start) for ref in self._pieces.get(first, [])}
        for name in others:
            if any((ref.source, ref.piece.start) not in places for ref in self._pieces[name]):
                begin = len(self.reads)
                self.want([name], tensor)
                self.reads[begin:] = [read._replace(only_compare=True) for read in self.reads[begin:]]

    def _module(self, key: str, module: nn.Module, trees: list[Any]) -> Callable[[], object]:
        """By its own method in the end, for hooks and extra state; its tensors are then there, and copied no more."""
        here, wrapped = module.state_dict(), naming.wrappers(module)
        saved = merged(trees)
        live = {local(tensor).data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        memory: dict[Any, tuple[Tensor, list[str]]] = {}
        state: OrderedDict[str, Any] = OrderedDict()
        for path, value in here.items():
            fqn = naming.unwrapped(path, wrapped)
            if isinstance(value, Tensor):
                part = local(value)
                if part.data_ptr() not in live:  # made by a hook for this state dict
                    value = like(value, torch.empty_like(part))
                    part = local(value)
                same = (part.data_ptr(), part.shape, part.stride()) if part.numel() else path
                memory.setdefault(same, (value, []))[1].append(f"{key}.{fqn}")
                state[path] = value
            elif fqn in saved:
                state[path] = self.value(saved[fqn], None, None)
            else:
                self.problems.append(f"{key}.{fqn} was not saved")
        for value, names in memory.values():
            self.want(names, value)
            self._want_equal(names, value)
        if hasattr(here, "_metadata"):  # versions of the modules; without them old formats would be guessed
            state._metadata = here._metadata  # type: ignore[attr-defined]
        return lambda: module.load_state_dict(state)

    def _optimizer(self, key: str, optimizer: Optimizer, trees: list[Any]) -> Callable[[], object]:
        names = {id(parameter): fqns for parameter, fqns in naming.fqns(optimizer, self._parameters)}
        saved = merged(tree["state"] for tree in trees)
        groups = {fqn: group for tree in reversed(trees) for group in tree["param_groups"] for fqn in group["params"]}
        state: list[tuple[Any, Any]] = []
        options: list[dict[str, Any]] = []
        for number, group in enumerate(optimizer.param_groups):
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                fqns = names[id(parameter)]
                found = next((fqn for fqn in fqns if fqn in saved), None)
                if found is not None:
                    place = Place(parameter, on_device)
                    state.append((parameter, self.value(saved[found], optimizer.state.get(parameter), place)))
                elif not any(fqn in groups for fqn in fqns):
                    self.problems.append(f"{key} had no parameter {fqns[0]}")
            options.append(self._options(f"{key}.param_groups[{number}]", group, names, groups))
        known = {fqn for fqns in names.values() for fqn in fqns}
        others = [title for title in saved if title not in groups and title not in known]
        state += [(title, self.value(saved[title], optimizer.state.get(title), None)) for title in others]
        return lambda: put(optimizer, state, options)

    def _options(
        self, key: str, group: dict[str, Any], names: dict[int, list[str]], groups: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """The options of the saved group that the parameters were in."""
        fqns = [fqn for parameter in group["params"] for fqn in names[id(parameter)] if fqn in groups]
        found: list[dict[str, Any]] = []
        for saved in {id(groups[fqn]): groups[fqn] for fqn in fqns}.values():
            settings = {option: value for option, value in saved.items() if option != "params"}
            if not found or plain_values(settings) != plain_values(found[0]):
                found.append(settings)
        if len(found) > 1:
            self.problems.append(f"the parameters of {key} were in groups with different options")
        elif found:
            return {option: self.value(value, group.get(option), None) for option, value in found[0].items()}
        return {option: value for option, value in group.items() if option not in ("params", "param_names")}

    def value(self, saved: Any, old: Any, place: Place | None) -> Any:
        """The value, in the tensors of `old` where they fit, else in new ones; all of them to be read."""
        if isinstance(saved, Ref):
            return self._tensor(saved, old, place)
        if type(saved) in MAPPINGS:
            known = old if isinstance(old, Mapping) else {}
            return type(saved)({key: self.value(item, known.get(key), place) for key, item in saved.items()})
        if type(saved) in (list, tuple):
            items = old if type(old) is type(saved) and len(old) == len(saved) else [None] * len(saved)
            return type(saved)(self.value(item, was, place) for item, was in zip(saved, items, strict=True))
        return saved

    def _tensor(self, saved: Ref, old: Any, place: Place | None) -> Tensor:
        piece = saved.piece
        dtype = dtype_named(piece.dtype)
        fits = isinstance(old, Tensor) and old.dtype is dtype and tuple(old.shape) == piece.global_shape
        tensor = old if fits else new_tensor(piece.global_shape, dtype, place)
        self.want([piece.name], tensor, saved.source)
        return tensor


class Place(NamedTuple):
    """The parameter whose state is to be made. `on_device`: its scalars are where it is, not in host memory."""

    parameter: Tensor
    on_device: bool


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, place: Place | None) -> Tensor:
    """As torch's optimizers make their state: like the parameter, if of its shape; else beside it, but for scalars."""
    if place is None:
        return torch.empty(shape, dtype=dtype)
    parameter = place.parameter
    if tuple(parameter.shape) == shape and (shape or place.on_device):
        return like(parameter, torch.empty_like(local(parameter), dtype=dtype, requires_grad=False))
    return torch.empty(shape, dtype=dtype, device=parameter.device if shape or place.on_device else "cpu")


def put(optimizer: Optimizer, state: list[tuple[Any, Any]], options: list[dict[str, Any]]) -> None:
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, new in zip(optimizer.param_groups, options, strict=True):
        kept = {field: group[field] for field in ("params", "param_names") if field in group}
        group.clear()
        group.update(new | kept)


def merged(trees: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    """The first tree's entries, then what only later ones have."""
    union: dict[Any, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            union.setdefault(key, value)
    return union


def plain_values(settings: dict[str, Any]) -> dict[str, str]:
    """What two groups must have in common; as text, so that NaN equals NaN. Tensors are of their own source."""
    return {option: "a tensor" if isinstance(value, Ref) else repr(value) for option, value in settings.items()}


def shapes(value: Any) -> Any:
    """Only the DTensors of a state dict, empty ones: how what is read for them has to be split."""
    if is_sharded(value):
        return like(value, torch.empty_like(local(value)))
    if isinstance(value, Mapping):
        return {key: shapes(item) for key, item in value.items()}
    return type(value)(map(shapes, value)) if type(value) in (list, tuple) else None

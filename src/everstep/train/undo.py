"""What a step may have changed before it was committed, kept so that the step can be done again.

Parameters and optimizer state change only in the optimizer's step, which comes after the commit; with several
optimizers the earlier ones' are copied first. Buffers change in a forward pass; an optimizer's settings (a schedule
changes its learning rate) and the user's objects at any time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from everstep.state.flatten import Stateful


class Shadow:
    """A buffer and its copy, which is refreshed only when the buffer was changed since."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.copy = buffer.detach().clone()
        self.version = buffer._version
        # PyTorch counts changes of a tensor in its version, but for running statistics: they are told by their values.
        self.silent = buffer.dim() == 1 and buffer.is_floating_point()

    @property
    def changed(self) -> bool:
        if self.buffer._version != self.version:
            return True
        if self.buffer.is_cpu:
            return self.silent and not torch.equal(self.buffer, self.copy)
        return self.silent  # a look at the values would wait for the device

    def refresh(self) -> None:
        if self.changed:
            self.copy.copy_(self.buffer)
            self.version = self.buffer._version

    def restore(self) -> None:
        if self.changed:
            self.buffer.copy_(self.copy)
            self.version = self.buffer._version


class Undo:
    """Begun anew with each step; `restore` goes back to that moment."""

    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        self._modules = [thing for thing in objects.values() if isinstance(thing, torch.nn.Module)]
        tensors = (torch.nn.Module, torch.optim.Optimizer)
        self._others = [thing for thing in objects.values() if not isinstance(thing, tensors)]
        optimizers = [thing for thing in objects.values() if isinstance(thing, torch.optim.Optimizer)]
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._settings: list[dict[str, Any]] = []
        self._shadows: list[Shadow] = []
        self._states: list[dict[str, Any]] = []
        self._optimizers: list[tuple[torch.optim.Optimizer, dict[str, Any], list[torch.Tensor]]] = []

    @torch.no_grad()
    def begin(self) -> None:
        buffers = [buffer for module in self._modules for buffer in module.buffers()]
        if [id(buffer) for buffer in buffers] != [id(shadow.buffer) for shadow in self._shadows]:
            self._shadows = [Shadow(buffer) for buffer in buffers]
        for shadow in self._shadows:
            shadow.refresh()
        self._states = [copy.deepcopy(thing.state_dict()) for thing in self._others]
        self._settings = [_settings(group) for group in self._groups]
        self._optimizers = []

    def keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step although the step is not committed yet."""
        parameters = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        self._optimizers.append((optimizer, copy.deepcopy(optimizer.state_dict()), parameters))

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Of all protected modules, in an order that is the same on every member."""
        return [shadow.buffer for shadow in self._shadows]

    def changed(self) -> list[int]:
        """Positions of the buffers that this step changed."""
        return [place for place, shadow in enumerate(self._shadows) if shadow.changed]

    @torch.no_grad()
    def restore(self) -> None:
        for shadow in self._shadows:
            shadow.restore()
        for optimizer, state, parameters in reversed(self._optimizers):
            live = (p for group in optimizer.param_groups for p in group["params"])
            for parameter, kept in zip(live, parameters, strict=True):
                parameter.copy_(kept)
            optimizer.load_state_dict(state)
        for thing, state in zip(self._others, self._states, strict=True):
            thing.load_state_dict(state)
        for group, settings in zip(self._groups, self._settings, strict=True):
            for name, value in settings.items():
                if isinstance(group.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[name].copy_(value)  # a captured graph may hold on to it
                else:
                    group[name] = value


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of all but the parameters."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}

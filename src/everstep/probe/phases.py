"""What a worker is busy with: start, training, evaluation, save, load; seen through PyTorch's own functions.

A phase tells the hang detector which limit applies. Saves and loads lie over everything else while they run;
evaluation lies over training only, so that a frozen `teacher.eval()` before the first step does not end the
start. Only the thread that trains changes the phase: an asynchronous save in the background is counted, but
the worker is still training.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from everstep.core.page import Word
from everstep.core.trace import Kind
from everstep.core.types import Phase
from everstep.probe.owntime import Account, OwnTime

Hook = Callable[..., Any]  # a function of PyTorch, or ours in its place: whatever arguments, whatever result


class Words(Protocol):
    """A page, or a dict where there is nobody to tell."""

    def __getitem__(self, word: Word, /) -> int: ...

    def __setitem__(self, word: Word, value: int, /) -> None: ...


class Phases:
    """Keeps Word.PHASE, and counts saves and loads. `words` may be exchanged at any time."""

    def __init__(self, words: Words, own: OwnTime) -> None:
        self._own = own
        self.begin(words)

    def begin(self, words: Words) -> None:
        self.words = words
        self._owner = threading.main_thread().ident
        self._base = Phase.START
        self._evaluating = False
        self._inside: list[Phase] = []
        self._depth = {Phase.SAVE: 0, Phase.LOAD: 0}  # over all threads: nested calls count once

    def again(self) -> None:
        """A new start in the same process."""
        self.begin(self.words)
        self._show()

    def _show(self) -> None:
        if self._inside:
            phase = self._inside[-1]
        elif self._evaluating and self._base is Phase.TRAIN:
            phase = Phase.EVAL
        else:
            phase = self._base
        words, now = self.words, time.monotonic_ns()
        if words[Word.PHASE] != phase:
            if words[Word.PHASE] == Phase.EVAL:
                self._own.trace.evaluated(words[Word.PHASE_NS])
            words[Word.PHASE] = phase
            words[Word.PHASE_NS] = now
        words[Word.LIFE_NS] = now

    def trained(self) -> None:
        """An optimizer step was made by this thread: it is the one whose phase counts."""
        self._owner = threading.get_ident()
        if self._base is not Phase.TRAIN or self._evaluating:
            self._base, self._evaluating = Phase.TRAIN, False
            self._show()

    def evaluating(self, on: bool) -> None:
        if on != self._evaluating and threading.get_ident() == self._owner:
            self._evaluating = on
            self._show()

    def done(self) -> None:
        """The script ended, or an error escaped it."""
        self._base, self._evaluating, self._inside = Phase.DONE, False, []
        self._show()

    @contextlib.contextmanager
    def inside(self, phase: Phase, counted: bool = True) -> Iterator[None]:
        """A save or a load runs. It counts when it ends without an error and lies in no other of its kind."""
        owned = threading.get_ident() == self._owner
        step = self.words[Word.STEPS]
        if owned:
            self._inside.append(phase)
            self._show()
        self._depth[phase] += counted
        outermost = counted and self._depth[phase] == 1
        began_ns = time.monotonic_ns()
        timed = phase is Phase.SAVE and self._own.enter(Account.SAVE, Kind.SAVE)
        try:
            yield
            if outermost:
                self._count(phase, step)
        finally:
            if timed:
                self._own.leave()
            else:  # a load is whoever's time it was needed for, and a save in the background is none of it
                self._own.trace.span(Kind[phase.name], began_ns, time.monotonic_ns())
            self._depth[phase] -= counted
            if owned and self._inside:
                self._inside.pop()
                self._show()

    def _count(self, phase: Phase, step: int) -> None:
        if phase is Phase.SAVE:
            self.words[Word.SAVED_STEP] = step + 1
            self.words[Word.SAVES] += 1
        else:
            self.words[Word.LOADS] += 1


def during(phases: Phases, phase: Phase, original: Hook, counted: bool = True) -> Hook:
    """`original` in a phase. A save into memory is a copy, not a checkpoint: it is not counted."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        in_memory = any(isinstance(value, io.BytesIO) for value in (*args, *kwargs.values()))
        with phases.inside(phase, counted and not in_memory):
            return original(*args, **kwargs)

    return call


def patch_torch(phases: Phases) -> None:
    """torch.save, torch.load, load_state_dict of modules and optimizers, train() and eval()."""
    import torch

    torch.save = torch.serialization.save = during(phases, Phase.SAVE, torch.save)
    torch.load = torch.serialization.load = during(phases, Phase.LOAD, torch.load)
    module: Any = torch.nn.Module
    optimizer: Any = torch.optim.Optimizer
    for holder in (module, optimizer):
        holder.load_state_dict = during(phases, Phase.LOAD, holder.load_state_dict)
    original, is_compiling = module.train, torch.compiler.is_compiling

    @functools.wraps(original)
    def train(self: Any, mode: bool = True) -> Any:
        # eval() is train(False); both call themselves on every child, where nothing changes any more.
        if not is_compiling():
            phases.evaluating(not mode)
        return original(self, mode)

    module.train = train


def patch_checkpoint(phases: Phases) -> None:
    """torch.distributed.checkpoint, once the script has imported it."""
    import torch.distributed.checkpoint as package
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    # An asynchronous save in a thread ends in `save`, which counts it there.
    for module, name, phase in (
        (state_dict_saver, "save", Phase.SAVE),
        (state_dict_saver, "async_save", Phase.SAVE),
        (state_dict_loader, "load", Phase.LOAD),
    ):
        hooked = during(phases, phase, getattr(module, name), counted=name != "async_save")
        setattr(module, name, hooked)
        setattr(package, name, hooked)


def patch_safetensors(phases: Phases) -> None:
    """safetensors.torch, once it is imported: what the Hugging Face libraries write and read."""
    import importlib

    module = importlib.import_module("safetensors.torch")
    for name, phase in (
        ("save_file", Phase.SAVE),
        ("save_model", Phase.SAVE),
        ("load_file", Phase.LOAD),
        ("load_model", Phase.LOAD),
    ):
        setattr(module, name, during(phases, phase, getattr(module, name)))

"""Puts the probe into a worker: `install(page)` before the script runs.

The functions of torch are exchanged once a process, as soon as torch is imported: at once in a zygote (and
in all its forks), or when the script imports it. Until `install`, and in processes which the worker forks,
they tick into nothing.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from everstep.core.page import Page, Word
from everstep.core.trace import Kind
from everstep.probe import foreign, loaders, owntime, phases, progress
from everstep.probe.owntime import Account
from everstep.probe.termination import Termination
from everstep.probe.values import Values

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_progress = progress.Progress()
_termination = Termination(_progress)
_values = Values()
_installed: Page | None = None


@functools.cache
def prepare() -> None:
    """Exchange PyTorch's functions, now or when the script imports them. Once a process; forks inherit it."""
    after_import("torch", _patch_torch)
    after_import("torch.utils.data._utils.worker", loaders.patch_torch)
    after_import("torch.distributed.checkpoint", lambda: phases.patch_checkpoint(_progress.phases))
    after_import("safetensors.torch", lambda: phases.patch_safetensors(_progress.phases))
    for name in foreign.PLACES:
        after_import(name, functools.partial(foreign.patch, name, _overheard))
    _termination.install()


def _patch_torch() -> None:
    progress.patch_torch(_progress)
    phases.patch_torch(_progress.phases)
    owntime.patch_torch(_progress.own)


def install(page: Page) -> None:
    """From now on this process is the worker of `page`."""
    global _installed, _values
    prepare()
    _progress.attach(page)
    _values = Values()
    _installed = page


def leave() -> None:
    """In a process forked by the worker: it must not tick, nor keep the page."""
    global _installed
    _progress.detach()
    if _installed is not None:
        _installed.close()
        _installed = None


def committed(steps: int) -> None:
    """A session committed a step; `steps` of the job are committed by now."""
    _progress.committed(steps)


def restored(steps: int) -> None:
    """A session is at this many steps of the job now, without having made one."""
    _progress.restored(steps)


def kept(steps: int) -> None:
    """This worker put its part of the state after so many steps into the vault of its node. From any thread."""
    _progress.words[Word.KEPT_STEP] = steps + 1


def logged(epoch: int, step: int, values: Mapping[str, float]) -> None:
    """What the script logged of a committed step, counted from 1. `epoch`: of the session's formation."""
    if _installed is not None:
        _values.tell(_installed, epoch, step, values)


def _overheard(values: Mapping[str, float]) -> None:
    """A session that logs itself knows better which steps count: the script has its trackers besides."""
    if not _values.of_session:
        logged(0, _progress.steps(), values)


def waiting(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: in there a member waits for others, so it is none of its own time."""
    return waits_for("wait")(function)


def waits_for(kind: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The same, with what it is called in the trace (core.trace.Kind)."""
    return functools.partial(_progress.own.during, Account.WAIT, kind=Kind[kind.upper()])


def saving(function: Callable[P, R]) -> Callable[P, R]:
    return _progress.own.during(Account.SAVE, function, Kind.SAVE)


def traced(kind: str, amount: Callable[..., int] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: each call is a span of the trace, in whatever thread. amount: of the span, from the arguments."""
    return functools.partial(_progress.own.trace.traced, Kind[kind.upper()], amount)


def reading(items: Iterator[tuple[T, Any]]) -> Iterator[tuple[T, Any]]:
    """See OwnTime.reading."""
    return _progress.own.reading(items)


def waits_in(work: Any) -> None:
    """`work.wait` of this class of operations is a wait. torch.distributed's own are hooked from the start."""
    if not hasattr(work.wait, "__wrapped__"):
        work.wait = owntime.waiting(_progress.own, work.wait, Kind.WAIT)


def undone(epoch: int = 0) -> None:
    """The step under way is begun again, or in this epoch: how long it took says nothing."""
    _progress.own.forget()
    _progress.own.trace.undone(epoch)


def repeated(took_s: float) -> None:
    """The step under way is computed once more, after a pass that took so long: an audit wants that."""
    _progress.batch()  # up to five passes and no step are no silence
    _progress.own.repeated(took_s)


def lengths(lengths: Iterable[int]) -> None:
    """The script tells the lengths of the sequences of the step under way, before its optimizer's step.

    So that long sequences are not taken for a slow worker. Needed where shapes do not tell it: packed sequences,
    batches that do not begin with token ids. Several calls in a step add up. Raises ValueError for a negative length.
    """
    _progress.own.lengths(lengths)


def save_asked() -> int:
    """How often a person wanted the state on disk."""
    return _progress.save_asked


def hold_sigterm(commits: bool = False) -> None:
    """A session is open: SIGTERM waits for the end of a step. `commits`: it tells of each step."""
    _termination.hold()
    _progress.own.trace.commits = commits


def release_sigterm() -> bool:
    """It is closed. True: SIGTERM came meanwhile, and did not do what it does."""
    return _termination.release()


def stop_due() -> bool:
    """Between two steps: whether the job stops here."""
    return _termination.due()


def die_of_sigterm() -> None:
    _termination.die()


def again(on_first: Callable[[], None]) -> float:
    """The script is entered again: see Progress.again."""
    return _progress.again(on_first)


def steps() -> int:
    """Of the job, as its optimizer counts them, else those of this entry or attempt."""
    return _progress.steps()


def done() -> None:
    """The script has ended, or waits for the others to end."""
    _progress.phases.done()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls back when a module has been executed, and before anybody can take names from it."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        callback = self.waiting.pop(fullname, None)
        if callback is None:
            return None
        spec = importlib.util.find_spec(fullname)  # asks us again, and we are no longer interested
        loader: Any = spec.loader if spec else None
        if spec is None or loader is None:
            self.waiting[fullname] = callback
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            callback()

        # Set on the loader's instance, which belongs to this one module: its type stays what others expect.
        loader.exec_module = exec_module
        return spec


@functools.cache
def _finder() -> _AfterImport:
    finder = _AfterImport()
    sys.meta_path.insert(0, finder)
    return finder


def after_import(name: str, callback: Callable[[], None]) -> None:
    """Call back now when the module is imported already, else right after its import."""
    if name in sys.modules:
        callback()
    else:
        _finder().waiting[name] = callback

"""A worker's own time in each step: all of it but the waits for other workers, and what of it went to data and saves.

In synchronous training all steps take as long as the slowest worker's, so only own time tells who is slow. The thread
that trains is at each moment in one of four accounts; what began last counts (a barrier inside a save is a wait). Waits
are torch.distributed's functions, `Work.wait`, and the end of backward under DistributedDataParallel: a callback that
the engine calls when this worker's gradients are complete, and before DDP's own, which waits for the others.

On a device the host's time is measured: waits for other workers that happen there are not told apart from its work.
"""

from __future__ import annotations

import enum
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

from everstep.core.page import Page
from everstep.core.trace import Kind
from everstep.probe.trace import Recorder

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Hook = Callable[..., Any]


class Account(enum.IntEnum):
    """What the training thread is busy with."""

    COMPUTE = 0  # everything else
    WAIT = 1
    DATA = 2
    SAVE = 3


class OwnTime:
    """The accounts of one worker. Only the thread that trains counts: at first the main thread. What it does in them is
    told to its trace."""

    def __init__(self) -> None:
        self.trace = Recorder()
        self.reduces = False  # a DistributedDataParallel was made in this process
        self.begin(None)

    def begin(self, page: Page | None) -> None:
        """A new attempt. None: there is nobody to tell."""
        self.page = page
        self._owner = threading.main_thread().ident
        self._open: list[tuple[Account, Kind, int]] = []  # the last: what it is in the trace, and since when
        self._turned_ns = 0
        self._step = 0
        self._twice_ns = 0
        self.forget()

    def forget(self) -> None:
        """The step under way is no measure: the first one, one that a fault undid."""
        self._whole, self._twice_ns = False, 0
        self._empty()

    def repeated(self, took_s: float) -> None:
        """The step under way is computed once more, though nothing is wrong: only the last time is its measure."""
        self._twice_ns += int(took_s * 1e9)
        self._empty()
        self.trace.undone(0)

    def _empty(self) -> None:
        self._mark = time.monotonic_ns()
        self._spent = [0, 0, 0, 0]
        self._tokens = self._squares = 0
        self._told = False  # the script said how long its sequences are, so shapes do not count

    def enter(self, account: Account, kind: Kind) -> bool:
        """From here on until `leave`. False: not the thread that trains, so there is nothing to leave.

        kind: what it is in the trace.
        """
        if threading.get_ident() != self._owner:
            return False
        self._charge()
        self._open.append((account, kind, self._mark))
        self.trace.entered(kind, self._mark)
        return True

    def leave(self, amount: int = 0) -> None:
        self._charge()
        if not self._open:  # a new attempt has begun inside
            return
        _, kind, began_ns = self._open.pop()
        if self._turned_ns and kind is Kind.BACKWARD:
            self.trace.span(Kind.SUMS, self._turned_ns, self._mark)
            self._turned_ns = 0
        self.trace.left(kind, began_ns, self._mark, self._open[-1][1:] if self._open else None, amount)

    def turn(self, account: Account) -> None:
        """What was entered last goes on as this. From any thread: a device has one of its own in backward."""
        self._charge()
        if self._open:
            self._open[-1] = account, *self._open[-1][1:]
            self._turned_ns = self._mark

    def _charge(self) -> None:
        now = time.monotonic_ns()
        self._spent[self._open[-1][0] if self._open else Account.COMPUTE] += now - self._mark
        self._mark = now

    def updated(self) -> None:
        """An optimizer has made its step. Not in the midst of a backward, which some do for each parameter."""
        if not self._open and threading.get_ident() == self._owner:
            self.trace.updated()

    def stepped(self, step: int) -> None:
        """This thread has made the step of that number, which ends here."""
        self._owner = threading.get_ident()
        self._charge()
        if self._whole and self.page is not None and step == self._step + 1:  # else a session went back, or on
            compute, _, data, save = self._spent
            self.page.log_work(step, compute + data + save, data, save, self._tokens, self._squares, self._twice_ns)
        self._whole, self._step, self._twice_ns = True, step, 0
        self._empty()

    def lengths(self, lengths: Iterable[int]) -> None:
        """Of sequences of the step under way, from the script itself."""
        if not self._told:
            self._told, self._tokens, self._squares = True, 0, 0
        for length in map(int, lengths):
            if length < 0:
                raise ValueError(f"a sequence of length {length}")
            self._tokens += length
            self._squares += length * length

    def batch(self, batch: Any) -> None:
        """A batch was read. Its shape tells how much work it is."""
        if not self._told and not any(
            account is Account.DATA for account, *_ in self._open
        ):  # else a reader in a reader: it is counted outside
            sequences, length = _shape(batch)
            self._tokens += sequences * length
            self._squares += sequences * length * length

    # Around functions -----------------------------------------------------------------------------------

    def during(self, account: Account, function: Callable[P, R], kind: Kind) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not self.enter(account, kind):
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return call

    def reading(self, iterator: Iterator[tuple[T, Any]]) -> Iterator[tuple[T, Any]]:
        """The same items, of which the second part is a batch. What it takes to get them is the data's time."""
        following = self.during(Account.DATA, lambda: next(iterator, None), Kind.DATA)
        while (item := following()) is not None:
            self.batch(item[1])
            yield item


def _shape(batch: Any) -> tuple[int, int]:
    """Sequences and their common length, padding included, which costs as much. Of what is no batch of token ids:
    samples, each of length 1, for members may have unequal shares. Zeros: no tensor is found."""
    torch: Any = sys.modules["torch"]
    if isinstance(batch, Mapping):
        batch = batch.get("input_ids", next(iter(batch.values()), None))
    elif isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if not isinstance(batch, torch.Tensor) or not batch.dim():
        return 0, 0
    tokens = batch.dim() == 2 and batch.dtype in (torch.int64, torch.int32)
    return int(batch.shape[0]), int(batch.shape[1]) if tokens else 1


# PyTorch's functions ------------------------------------------------------------------------------------


def patch_torch(own: OwnTime) -> None:
    """The end of backward, loaders, and DDP's buffers. Collectives are hooked where they are counted."""
    import torch
    from torch.utils.data import dataloader

    autograd: Any = torch.autograd
    autograd.backward = _backward(own, autograd.backward)
    iterator: Any = dataloader._BaseDataLoaderIter
    iterator.__next__ = _next(own, iterator.__next__)
    if not torch.distributed.is_available():
        return
    work: Any = torch.distributed.Work
    work.wait = waiting(own, work.wait, Kind.WAIT)
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    ddp.__init__ = _made(own, ddp.__init__)
    if hasattr(ddp, "_sync_buffers"):  # broadcasts them before forward
        ddp._sync_buffers = waiting(own, ddp._sync_buffers, Kind.BUFFERS)


def waiting(own: OwnTime, original: Hook, kind: Kind) -> Hook:
    """As OwnTime.during; what is being compiled is left alone."""
    import torch

    is_compiling, plain = torch.compiler.is_compiling, (torch.Tensor, torch.nn.Parameter)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not own.enter(Account.WAIT, kind):
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            own.leave(args[0].numel() * args[0].element_size() if args and type(args[0]) in plain else 0)

    return call


def _next(own: OwnTime, original: Hook) -> Hook:
    read = own.during(Account.DATA, original, Kind.DATA)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        batch = read(*args, **kwargs)
        own.batch(batch)
        return batch

    return call


def _made(own: OwnTime, original: Hook) -> Hook:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        own.reduces = True
        return original(*args, **kwargs)

    return call


def _backward(own: OwnTime, original: Hook) -> Hook:
    import torch

    is_compiling = torch.compiler.is_compiling

    @functools.wraps(original)
    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # Compiled autograd would trace the hook into its graph.
        if is_compiling() or _compiled_backward() or not own.enter(Account.COMPUTE, Kind.BACKWARD):
            return original(tensors, *args, **kwargs)
        handle = _at_the_end(own, tensors) if own.reduces else None
        try:
            return original(tensors, *args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()
            own.leave()

    return call


def _at_the_end(own: OwnTime, root: Any) -> Any:
    """A hook on the loss runs as the first of backward, so the callback it queues comes before those of DDP."""
    import torch

    if not isinstance(root, torch.Tensor) or root.grad_fn is None:
        return None
    engine: Any = torch.autograd.Variable._execution_engine
    through = functools.partial(own.turn, Account.WAIT)
    return root.register_hook(lambda gradient: engine.queue_callback(through))  # type: ignore[no-untyped-call]


def _compiled_backward() -> bool:
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))

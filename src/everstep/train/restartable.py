"""`@everstep.restartable`: a function that is entered again, in the same processes, after a fault of one of them.

    @everstep.restartable
    def main():
        dist.init_process_group("gloo")      # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are those of this entry
        ...                                  # build, load the own checkpoint, train

For code that owns its training loop. When a member dies or raises, the others leave the function wherever they are;
what it left behind is cleared up, and all enter it again together. Three levels: a member whose function raised is
entered again in its process; one that does not get out of it, or whose callback raises, ends its process and gets a
new one; what follows when that does not help is the job's (its restart budget).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import torch.distributed as dist

from everstep.comms import group
from everstep.control import sockets
from everstep.core import identity
from everstep.core.errors import EpochBroken
from everstep.probe import boot
from everstep.train.entrance import Entrance, Ranks, serve_store
from everstep.train.waker import Waker

LIMIT_S = 10.0
FAILURE_CHARS = 500
OURS = (__file__, sys.modules[Waker.__module__].__file__)
NETWORK = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "TCPStore")

P = ParamSpec("P")
R = TypeVar("R")


class Entry(NamedTuple):
    """What a callback is told. `number`: of this process's entries, from 0. Before the first: rank -1 of 0."""

    number: int
    rank: int
    world_size: int


Callback = Callable[[Entry], None]


class Callbacks(NamedTuple):
    """See `restartable`."""

    initialise: Callback | None = None
    abort: Callback | None = None
    finalise: Callback | None = None
    health_check: Callback | None = None


@overload
def restartable(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def restartable(
    *,
    initialise: Callback | None = None,
    abort: Callback | None = None,
    finalise: Callback | None = None,
    health_check: Callback | None = None,
    limit_s: float = LIMIT_S,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def restartable(
    function: Callable[P, R] | None = None,
    /,
    *,
    initialise: Callback | None = None,
    abort: Callback | None = None,
    finalise: Callback | None = None,
    health_check: Callback | None = None,
    limit_s: float = LIMIT_S,
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Enter the function again, with the same arguments, until all members of the job returned from it.

    health_check: before the worker offers itself for an entry, the first one included.
    initialise: in each entry, when the members have met, before the function.
    abort: as soon as an entry is over, in a thread of its own while the function may still run: end what it may be
        waiting for. Process groups of gloo, NCCL and everstep are taken care of.
    finalise: when the function was left and its process groups are gone.
    limit_s: a function that is not left so long after its entry was over takes its process along.

    A callback that raises ends this process; for `initialise` it counts as the function's own failure.
    """
    if limit_s <= 0:
        raise ValueError(f"limit_s is {limit_s}: a function needs some time to be left")
    callbacks = Callbacks(initialise, abort, finalise, health_check)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return _call(functools.partial(function, *args, **kwargs), callbacks, limit_s, function.__qualname__)

        return call

    return decorate(function) if function is not None else decorate


_running = False
_former: list[Any] = []  # under a launcher: the one function that ran here; a store that it serves lives as long


def _call(function: Callable[[], R], callbacks: Callbacks, limit_s: float, name: str) -> R:
    global _running
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(f"{name}: a restartable function belongs to the main thread, which a fault can interrupt")
    if _running:
        raise ValueError(f"{name}: a restartable function cannot call another one: mark the outer one only")
    if _former:
        raise ValueError(
            f"{name}: a script has one restartable function and calls it once: its members enter it together"
        )
    if dist.is_initialized():
        raise ValueError(
            f"{name}: init_process_group belongs into the restartable function: each entry has its own groups"
        )
    me = identity.mine()
    _running = True
    try:
        if me is None:
            return _alone(function, callbacks)
        member = Member(function, callbacks, limit_s, name, me)
        _former.append(member)
        result: R = member.run()
        return result
    finally:
        _running = False


def present() -> Member | None:
    """Who is in its restartable function right now."""
    return _former[0] if _running and _former else None


# Without `everstep run` -------------------------------------------------------------------------------------


def _alone(function: Callable[[], R], callbacks: Callbacks) -> R:
    """Called once: there is nobody to be entered again with. A launcher's environment is used, else a world of one."""
    if "RANK" in os.environ:
        entry = Entry(0, int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1")))
        return _once(function, callbacks, entry)
    store = serve_store("127.0.0.1")
    ranks = Ranks(0, 1, f"127.0.0.1:{store.port}", 0, frozenset(), frozenset())
    with _environment({**ranks.environment(), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        return _once(function, callbacks, Entry(0, 0, 1))


def _once(function: Callable[[], R], callbacks: Callbacks, entry: Entry) -> R:
    _tell(callbacks.health_check, entry)
    _tell(callbacks.initialise, entry)
    return function()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _tell(callback: Callback | None, entry: Entry) -> None:
    if callback is not None:
        callback(entry)


# Under it ---------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """Why an entry ended. `failure`: what the function raised while it was not over; empty: nothing."""

    failure: str = ""


class Member:
    """One worker's entries into its function."""

    def __init__(
        self, function: Callable[[], Any], callbacks: Callbacks, limit_s: float, name: str, me: identity.Identity
    ) -> None:
        self._function, self._callbacks, self._name = function, callbacks, name
        self._waker = Waker(limit_s, self._unblock)
        self._entrance = Entrance(me, self._waker.fire)
        self._ranks: Ranks | None = None
        self._entry = Entry(0, -1, 0)
        self._before_s = 0.0  # the last step of the entry before
        self._kept: frozenset[int] = frozenset()  # sockets that are older than this entry
        self._abort_told = False
        self._groups: list[Any] = []  # see `_hold`
        self._leave: Callable[[bool], None] | None = None

    @property
    def entrance(self) -> Entrance:
        return self._entrance

    def at_leave(self, call: Callable[[bool], None]) -> None:
        """When this entry is left: whether the function returned."""
        self._leave = call

    def run(self) -> Any:
        self._waker.open()
        self._entrance.open()
        fault, steps = Fault(), -1
        try:
            while True:
                _tell(self._callbacks.health_check, self._entry)
                self._begin(self._entrance.enter(fault.failure, steps))
                left = self._enter()
                if not isinstance(left, Fault):
                    return left[0]
                fault, steps = left, boot.steps() or max(0, steps)
        finally:
            self._leave_behind(returned=False)
            self._waker.close()
            self._entrance.close()

    def _begin(self, ranks: Ranks) -> None:
        number = self._entry.number + (self._ranks is not None)
        self._ranks, self._entry = ranks, Entry(number, ranks.rank, ranks.world_size)
        os.environ.update(ranks.environment())
        self._kept = sockets.own()
        self._abort_told = False
        self._before_s = boot.again(self._stepped)
        self._waker.arm()
        if (why := self._entrance.over) is not None:  # before there was somebody to wake
            self._waker.fire(why)

    def _stepped(self) -> None:
        """The first optimizer step of this entry."""
        self._hold()
        gap_s = time.monotonic() - self._before_s if self._before_s else -1.0
        self._entrance.resumed(boot.steps(), gap_s)

    def _hold(self) -> None:
        """Outlive what the function holds: a group whose last owner is a reducer of DDP is destroyed with Python's lock
        held, and waits for a thread of gloo that may want the lock to let go of a tensor (seen in 2 of 40 ends).
        """
        self._groups += group.everyone()

    def _body(self) -> Any:
        _tell(self._callbacks.initialise, self._entry)
        result = self._function()
        self._leave_behind(returned=True)
        return result

    def _leave_behind(self, returned: bool) -> None:
        if self._leave is not None:
            self._leave(returned)
            self._leave = None

    def _enter(self) -> tuple[Any] | Fault:
        """What the function returned, or why it has to be entered again."""
        try:
            result = self._waker.run(self._body)
            self._groups.clear()
            if self._finished():
                return (result,)
            fault = Fault()
        except (SystemExit, KeyboardInterrupt):
            raise  # an end of the script, not of the entry
        except BaseException as error:  # noqa: BLE001 - whatever it is: it ends the entry, not the process
            fault = self._left(error)
        self._clear_up()
        return fault

    def _finished(self) -> bool:
        boot.done()
        if self._waker.fired is None:
            self._entrance.resumed(boot.steps())
        return self._entrance.finish()

    def _left(self, error: BaseException) -> Fault:
        """By an exception: of the world's making if the entry was over, else the function's own."""
        text = f"{type(error).__name__}: {error}".strip()[:FAILURE_CHARS]
        over = self._waker.fired
        head = f"everstep: rank {self._entry.rank}, entry {self._entry.number} of {self._name}"
        if over is not None:
            print(f"{head} is over: {over}", file=sys.stderr)
        elif _of_network(error):
            print(f"{head} lost a connection: {text.splitlines()[0]}", file=sys.stderr)
        else:
            print(f"{head} failed:", file=sys.stderr)
            traceback.print_exception(type(error), error, _own_frames_dropped(error.__traceback__))
        self._waker.fire("its function raised")
        self._hold()
        _let_go(error)
        return Fault("" if over is not None else text)

    def _clear_up(self) -> None:
        """Nothing of the entry may reach the next one: its groups, its reducers, who waits in them."""
        self._waker.fire("its function returned, and others did not")
        self._leave_behind(returned=False)
        group.forget_all()
        gc.collect()  # reducers and their groups hold each other
        self._groups.clear()
        _tell(self._callbacks.finalise, self._entry)
        self._waker.clear()

    def _unblock(self) -> None:
        """In the waker's thread."""
        if not self._abort_told:
            self._abort_told = True
            _tell(self._callbacks.abort, self._entry)
        group.abort_all()
        ranks = self._ranks
        assert ranks is not None
        sockets.cut_own(ranks.hosts | sockets.local_addresses(), ranks.ports, lambda inode: inode not in self._kept)


def _of_network(error: BaseException) -> bool:
    if isinstance(error, (EpochBroken, ConnectionError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in NETWORK)


def _own_frames_dropped(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in OURS:
        trace = trace.tb_next
    return trace


def _let_go(error: BaseException | None) -> None:
    """Of what the frames hold that the exception came through: models, groups, loaders."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        error = todo.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            todo += [error.__context__, error.__cause__]

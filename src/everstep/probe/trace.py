"""Writes down what this worker does, span by span, for `everstep trace`: into the ring at the end of its page.

No lock, and no system call but the clock, which the hooks read anyway. The agent owns that memory, so what a worker did
last is there when it was killed, and no disk can hold a worker up (control.tracing writes the file).
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from everstep.core import trace as form
from everstep.core.page import Page
from everstep.core.trace import RECORDS, STAMPS, Kind

SHORT_NS = 20_000  # looking whether there is something to save is no save, and so on
PASSED = frozenset((Kind.SAVE, Kind.AGREE, Kind.BUFFERS))  # most calls find nothing to do
BORDERS = frozenset((Kind.DATA, Kind.BACKWARD, Kind.SAVE, Kind.AGREE))  # no forward reaches over these

P = ParamSpec("P")
R = TypeVar("R")

_pack, _SIZE = form.RECORD.pack_into, form.RECORD.size
_pack_open = form.OPEN.pack_into


class Recorder:
    """The trace of this process. Spans may come from any thread; those of one thread lie in each other, or apart."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, page: Page | None) -> None:
        """This process is the worker of that page from here on. None, or a page without a ring: nobody is told."""
        self._ring = page.ring if page is not None and len(page.ring) == form.RING_BYTES else None
        self._numbers = itertools.count()  # `next` is one step of the interpreter: no two threads get the same
        self._tracks = threading.local()
        self._others: dict[str, int] = {}
        self._lock = threading.Lock()
        self.epoch = int(os.environ.get("EVERSTEP_EPOCH", 0)) if page is not None else 0
        self.step = int(os.environ.get("RANK", 0)) if page is not None else 0
        self.commits = False  # steps are a session's: what its optimizers do is a part of them
        self.moment(Kind.BEGAN, os.getpid())
        self.again()

    def again(self) -> None:
        """The script begins anew in this process."""
        self.step = 0  # the one under way, counted from 1
        self._first = True
        self._border_ns = 0
        self._stepped_ns = time.monotonic_ns()

    def span(self, kind: Kind, began_ns: int, ended_ns: int, amount: int = 0) -> None:
        ring = self._ring
        if ring is None:
            return
        try:
            track = self._tracks.number
        except AttributeError:
            track = self._new_track()
        number = next(self._numbers)
        _pack(
            ring, number % RECORDS * _SIZE,
            began_ns, ended_ns, amount, self.step, self.epoch, kind, track, (number + 1) % STAMPS,
        )  # fmt: skip

    def moment(self, kind: Kind, amount: int = 0) -> None:
        now = time.monotonic_ns()
        self.span(kind, now, now, amount)

    def traced(self, kind: Kind, amount: Callable[..., int] | None, function: Callable[P, R]) -> Callable[P, R]:
        """The same function, and each call is a span."""

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._ring is None:
                return function(*args, **kwargs)
            began_ns = time.monotonic_ns()
            try:
                return function(*args, **kwargs)
            finally:
                size = amount(*args, **kwargs) if amount is not None else 0
                self.span(kind, began_ns, time.monotonic_ns(), size)

        return call

    def _new_track(self) -> int:
        """A thread's first span. Threads of one name follow each other, and share a track."""
        if threading.current_thread() is threading.main_thread():
            number = form.MAIN_TRACK
        else:
            name = threading.current_thread().name
            with self._lock:
                fresh = min(form.FIRST_OTHER + len(self._others), form.MOST_TRACKS - 1)
                number = form.THREADS.get(name) or self._others.setdefault(name, fresh)
        self._tracks.number = number
        return number

    # The thread that trains -------------------------------------------------------------------------------

    def entered(self, kind: Kind, now_ns: int) -> None:
        """If it does not get out of this, the agent finds it here."""
        if self._ring is not None:
            _pack_open(self._ring, form.OPEN_AT, kind + 1, now_ns)

    def left(
        self, kind: Kind, began_ns: int, ended_ns: int, around: tuple[Kind, int] | None = None, amount: int = 0
    ) -> None:
        """It was in this. `around`: what that was in, and since when."""
        if self._ring is None:
            return
        if around is not None:
            _pack_open(self._ring, form.OPEN_AT, around[0] + 1, around[1])
        else:
            _pack_open(self._ring, form.OPEN_AT, 0, 0)
            if kind is Kind.BACKWARD and self._border_ns:
                self.span(Kind.FORWARD, self._border_ns, began_ns)
            if kind in BORDERS:
                self._border_ns = ended_ns
        if kind not in PASSED or ended_ns - began_ns >= SHORT_NS:
            self.span(kind, began_ns, ended_ns, amount)

    def updated(self) -> None:
        """An optimizer has made its step."""
        now = time.monotonic_ns()
        if self._border_ns:
            self.span(Kind.UPDATE, self._border_ns, now)
        self._border_ns = now

    def stepped(self, steps: int) -> None:
        """So many steps are made by now; the last one ends here."""
        now = time.monotonic_ns()
        self.step = steps
        self.span(Kind.START if self._first else Kind.STEP, self._stepped_ns, now)
        self._first, self.step, self._stepped_ns = False, steps + 1, now
        self._border_ns = now

    def restored(self, steps: int) -> None:
        """It stands at so many steps, without having made one."""
        self.step = steps + 1

    def evaluated(self, began_ns: int) -> None:
        self._border_ns = now = time.monotonic_ns()
        self.span(Kind.EVAL, began_ns, now)

    def undone(self, epoch: int) -> None:
        """The step under way begins again; in this epoch, if it is not 0."""
        self.epoch = epoch or self.epoch
        self.moment(Kind.EPOCH if epoch else Kind.UNDONE)

"""Gets the main thread out of a function whose entry is over, wherever it is, and ends the process if that fails.

What the main thread may be inside of, and what helps:

- Python code, and waits of Python (a sleep, a lock, a queue, select, a child process): a signal of our own, whose
  handler raises `Interrupted` there. An exception set from another thread (PyThreadState_SetAsyncExc) ends no wait.
- a collective, or a wait for the store, in C++: `unblock` shuts what it waits on.
- a call that heeds neither: after `limit_s` the process ends itself, and its place gets a new one.

The handler raises only while the main thread is inside the function: never in what clears up behind it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, TypeVar

WAKE_SIGNAL = signal.SIGRTMIN + 10  # to this process's main thread, from itself
PROCESS_LEVEL = 75  # exit code (EX_TEMPFAIL) of a process that gives up, so that a new one takes its place
REPEAT_S = 1.0  # between two tries to interrupt: the function may have swallowed one, or clear up behind it
FIRST_PAUSE_S = 0.01
LAST_PAUSE_S = 0.2

R = TypeVar("R")


class Interrupted(BaseException):
    """Raised inside a restartable function when its entry is over. Not an Exception: it is not for handling."""


class Waker:
    """For one entry after the other: `arm`, `run`, and `clear` once all is cleared up. `fire` is for any thread.

    unblock: ends waits in C; called again until `clear`, because the main thread may begin another one meanwhile.
    """

    def __init__(self, limit_s: float, unblock: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._unblock = unblock
        self._lock = threading.Lock()
        self._armed = False
        self._inside = False  # the main thread's own
        self._why: str | None = None
        self._cleared = threading.Event()
        self._thread: threading.Thread | None = None
        self._handler_before: Any = None

    @property
    def fired(self) -> str | None:
        """Why the entry is over; None while it is not."""
        return self._why

    def open(self) -> None:
        """Take the signal. In the main thread."""
        self._handler_before = signal.signal(WAKE_SIGNAL, self._interrupt)

    def close(self) -> None:
        self.clear()
        signal.signal(WAKE_SIGNAL, self._handler_before)

    def arm(self) -> None:
        """An entry begins."""
        with self._lock:
            self._armed, self._why = True, None
            self._cleared.clear()

    def run(self, call: Callable[[], R]) -> R:
        """Call it here, in the main thread. Raises Interrupted, or whatever came of the waits that were ended."""
        try:
            self._inside = True
            return call()
        finally:
            self._inside = False

    def fire(self, why: str) -> None:
        """The entry is over. Without effect the second time, and between entries."""
        with self._lock:
            if self._armed and self._why is None:
                self._why = why
                self._thread = threading.Thread(target=self._work, args=(why,), name="everstep-waker", daemon=True)
                self._thread.start()

    def clear(self) -> None:
        """Nothing of the entry is left: nobody has to be woken any more."""
        with self._lock:
            self._armed = False
            thread, self._thread = self._thread, None
        self._cleared.set()
        if thread is not None:
            thread.join()

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._inside and self._why is not None:
            raise Interrupted(self._why)

    def _work(self, why: str) -> None:
        main = threading.main_thread().ident
        assert main is not None
        began = time.monotonic()
        interrupt_at, pause_s = began, FIRST_PAUSE_S
        while True:
            try:
                self._unblock()
            except Exception:  # noqa: BLE001 - whatever it is, this thread has nobody above it
                traceback.print_exc()
                self._give_up("what should have ended its waits failed")
            now = time.monotonic()
            if self._inside and now >= interrupt_at:
                signal.pthread_kill(main, WAKE_SIGNAL)
                interrupt_at = now + REPEAT_S
            if self._cleared.wait(pause_s):
                return
            if now - began > self._limit_s:
                where = "did not leave" if self._inside else "left, but could not be cleared up behind"
                self._give_up(f"the function {where} within {self._limit_s:g} s after its entry was over ({why})")
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _give_up(self, text: str) -> NoReturn:
        """From this thread: the main one may be anywhere."""
        sys.stderr.write(f"everstep: {text}: this process ends, a new one takes its place\n")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(PROCESS_LEVEL)

"""Death noticed by the kernel: a robust mutex in the page which a worker and its agent share.

The worker's main thread locks it and never unlocks. A thread of the agent waits for it; when the worker
begins to exit, for whatever reason, the kernel marks the mutex and wakes the waiter with EOWNERDEAD. That is
before the memory is unmapped: milliseconds where a pidfd takes half a second for a process of a few
gigabytes. An exec() also gives the mutex up, so a program that is not Python holds none.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
import time
from collections.abc import Callable

from everstep.core.page import MUTEX_OFFSET, Page, Word

PTHREAD_PROCESS_SHARED = 1
PTHREAD_MUTEX_ROBUST = 1
SLICE_S = 1.0  # close() waits at most this long
READY_POLL_S = (0.005, 0.05)  # until the worker is ready: at first, and after the first two seconds


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: object) -> None:
    """One pthread function, which returns its error instead of setting errno."""
    code = getattr(_libc(), name)(*args)
    if code:
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mutex(page: Page) -> ctypes.c_void_p:
    # The temporary is dropped at once: while it lived, the mapping could not be closed.
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page.memory, MUTEX_OFFSET)))


def init(page: Page) -> None:
    """Prepare the mutex of a new page. Raises OSError where the platform has no robust mutexes."""
    attributes = ctypes.create_string_buffer(64)
    _call("pthread_mutexattr_init", attributes)
    _call("pthread_mutexattr_setpshared", attributes, PTHREAD_PROCESS_SHARED)
    _call("pthread_mutexattr_setrobust", attributes, PTHREAD_MUTEX_ROBUST)
    _call("pthread_mutex_init", _mutex(page), attributes)
    _call("pthread_mutexattr_destroy", attributes)


def lock(page: Page) -> None:
    """Hold the mutex until this thread, the process's main thread, ends.

    The page is kept mapped for good: the kernel finds the mutex through the mapping at the very end,
    after the interpreter has freed its objects.
    """
    _call("pthread_mutex_lock", _mutex(page))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))


class DeathWatch:
    """Waits in a thread for the worker of a page to begin its exit; `on_death(monotonic_ns)` runs in that thread.

    The thread touches the mutex only after Word.READY_NS is set, which a worker does when it holds it. A
    worker that dies before is reported by whoever reaps it. `close()` must come before `page.close()`.
    """

    def __init__(self, page: Page, on_death: Callable[[int], None]) -> None:
        self._page = page
        self._on_death = on_death
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"death-watch-{page.fd}", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        if self._wait_ready() and self._wait_dead():
            self._on_death(time.monotonic_ns())

    def _wait_ready(self) -> bool:
        patient_at = time.monotonic() + 2
        while not self._page[Word.READY_NS]:
            if self._closed.wait(READY_POLL_S[time.monotonic() > patient_at]):
                return False
        return True

    def _wait_dead(self) -> bool:
        mutex, clock_lock = _mutex(self._page), _libc().pthread_mutex_clocklock
        while not self._closed.is_set():
            until = time.monotonic() + SLICE_S
            slice_end = _Timespec(int(until), int(until % 1 * 1e9))
            code = clock_lock(mutex, time.CLOCK_MONOTONIC, ctypes.byref(slice_end))
            if code == errno.EOWNERDEAD:
                # Unlocked without being made consistent: nobody can take it again.
                _call("pthread_mutex_unlock", mutex)
                return True
            assert code == errno.ETIMEDOUT, f"a worker said it was ready without the mutex: {os.strerror(code)}"
        return False

    def close(self) -> None:
        """Stop waiting. Returns when the thread has ended; never called from `on_death` itself."""
        self._closed.set()
        self._thread.join()

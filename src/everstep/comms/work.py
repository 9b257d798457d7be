"""Operations of a process group: what torch holds of one that is under way, and who carries them out in order.

A lane is one order of operations. What may go on while the caller computes is done by the lane's thread; what the
caller waits for anyhow he does himself, when those before it are through, and saves two changes of thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everstep.core.errors import EpochBroken

IDLE_S = 5.0  # a lane's thread ends when it had nothing to do for so long

_futures_lock = threading.Lock()  # for a moment only: a future is asked for while its work ends


class Work(dist.Work):
    """One operation. Ends with the tensors it fills, or with an error, which every `wait` raises."""

    def __init__(self, name: str, body: Callable[[], None], tensors: Sequence[Any], timeout_s: float) -> None:
        super().__init__()
        self.name = name
        self.timeout_s = timeout_s
        self.begun_s = 0.0  # 0: it waits for its turn
        self._body: Callable[[], None] | None = body
        self._tensors = tensors
        self._error: Exception | None = None
        self._ended = False
        self._latch = threading.Lock()  # held until the end: half the price of an Event
        self._latch.acquire()
        self._future: torch.futures.Future[Any] | None = None

    def run(self) -> None:
        """Do it, once. An Exception is kept for `wait`; an interrupt of this thread is raised as well."""
        body = self._body
        assert body is not None, "work is done once"
        self.begun_s = time.monotonic()
        try:
            with torch.no_grad():
                body()
        except Exception as error:  # noqa: BLE001 whoever waits raises it
            self._end(error)
        except BaseException as error:
            self._end(dist.DistBackendError(f"{self.name} was interrupted by {type(error).__name__}"))
            raise
        else:
            self._end(None)

    def give_up(self, why: str) -> None:
        """It will not be done."""
        self._end(dist.DistBackendError(f"{self.name} was not begun: {why}"))

    def _end(self, error: Exception | None) -> None:
        if isinstance(error, EpochBroken):
            told = dist.DistBackendError(f"{self.name} failed: {error}")
            told.__cause__ = error
            error = told
        with _futures_lock:
            self._body, self._error, self._ended = None, error, True
            future = self._future
        self._latch.release()
        if future is not None:
            future.set_result(self._tensors)

    # As torch knows it --------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises what it failed with, and DistBackendError after `timeout` (0: none)."""
        if not self._ended:
            limit_s = timeout.total_seconds()
            if not self._latch.acquire(timeout=limit_s if limit_s > 0 else -1):
                raise dist.DistBackendError(f"{self.name} did not end within {limit_s:g} s")
            self._latch.release()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended

    def is_success(self) -> bool:
        return self._ended and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self._tensors)

    def get_future(self) -> torch.futures.Future[Any]:
        with _futures_lock:
            future = self._future
            fresh = future is None
            if future is None:
                future = self._future = torch.futures.Future()
            ended = self._ended
        if fresh and ended:
            future.set_result(self._tensors)
        # An exception set on a future is a value for C++, and DDP would take it for gradients. What a callback raises
        # is an error there too.
        return future.then(self._checked)

    def _checked(self, future: torch.futures.Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return future.value()


class Together(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda _: self.result())


class Lane:
    """Works, one after the other."""

    def __init__(self, name: str) -> None:
        self.current: Work | None = None
        self._name = name
        self._queue: deque[Work] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = ""

    def post(self, work: Work) -> None:
        """Have it done by the lane's thread."""
        with self._changed:
            self._refuse_if_closed(work)
            self._queue.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def call(self, work: Work) -> None:
        """Do it here, after what was posted before."""
        with self._changed:
            while self.current is not None or self._queue:
                self._changed.wait()
            self._refuse_if_closed(work)
            self.current = work
        try:
            work.run()
        finally:
            with self._changed:
                self.current = None
                self._changed.notify_all()

    def close(self, why: str) -> threading.Thread | None:
        """Begin nothing any more. The thread that may be at work still."""
        with self._changed:
            self._closed = why
            left, thread = list(self._queue), self._thread
            self._queue.clear()
            self._changed.notify_all()
        for work in left:
            work.give_up(why)
        return thread

    def _refuse_if_closed(self, work: Work) -> None:
        if self._closed:
            raise dist.DistBackendError(f"{work.name}: {self._closed}")

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            try:
                work.run()
            finally:
                with self._changed:
                    self.current = None
                    self._changed.notify_all()

    def _next(self) -> Work | None:
        """None: the thread has to end."""
        with self._changed:
            while self.current is not None or not self._queue:
                if self._closed or not (self._changed.wait(IDLE_S) or self._queue or self.current):
                    self._thread = None
                    return None
            self.current = self._queue.popleft()
            return self.current

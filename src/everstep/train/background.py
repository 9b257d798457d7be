"""One thread beside backward which reduces buckets, in the order they are handed over."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from everstep.train.buckets import Bucket


class Background:
    """`work(bucket)` says whether all of it is finite. After an error the buckets that follow are skipped."""

    def __init__(self, work: Callable[[Bucket], bool]) -> None:
        self._work = work
        self._inbox: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._num_pending = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="everstep-reduce", daemon=True)

    def submit(self, bucket: Bucket) -> None:
        """Raises what an earlier bucket ended with."""
        if self._error is not None:
            raise self._error
        if self._thread.ident is None:
            self._thread.start()
        self._num_pending += 1
        self._inbox.put(bucket)

    def results(self) -> list[bool]:
        """Of all buckets since the last call, once they are through. Raises what one of them ended with."""
        results = []
        while self._num_pending:
            results.append(self._outbox.get())
            self._num_pending -= 1
        if self._error is not None:
            raise self._error
        return results

    def cancel(self) -> None:
        """Wait for the one at work, skip the others, forget errors."""
        self._error = self._error or RuntimeError("the step was dropped")
        while self._num_pending:
            self._outbox.get()
            self._num_pending -= 1
        self._error = None

    def close(self) -> None:
        if self._thread.ident is not None:
            self._inbox.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (bucket := self._inbox.get()) is not None:
            finite = False
            if self._error is None:
                try:
                    finite = self._work(bucket)
                except Exception as error:  # noqa: BLE001 - raised again by whoever waits
                    self._error = error
            self._outbox.put(finite)

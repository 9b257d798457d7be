"""A firm hold on one process: a pidfd, which never points at another process when the number is reused.

It becomes readable when the last thread has exited, so death wakes the event loop without polling, and a
signal sent through it cannot hit a stranger. Works on processes that are not our children.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable
from typing import Self

from everstep.control import procfs


def open_pidfd(pid: int) -> int:
    """A close-on-exec pidfd. Raises ProcessLookupError when there is no such process."""
    return os.pidfd_open(pid)


class ProcessHandle:
    """One process by pidfd. Raises ProcessLookupError when it is gone already (a zombie can still be held).

    With `start_ticks` (of an earlier `procfs.sample`) it refuses a process that got the number since then.
    """

    def __init__(self, pid: int, start_ticks: int | None = None) -> None:
        self.pid = pid
        self.fd = open_pidfd(pid)
        self._loop: asyncio.AbstractEventLoop | None = None
        if start_ticks is not None:
            now = procfs.sample(pid)
            if now is None or now.start_ticks != start_ticks:
                self.close()
                raise ProcessLookupError(f"process {pid} is another one now")

    def send(self, signum: int) -> bool:
        """Signal the process; False when it is gone. Raises PermissionError when it is not ours."""
        try:
            signal.pidfd_send_signal(self.fd, signum)
        except ProcessLookupError:
            return False
        return True

    def gone(self, timeout_s: float = 0.0) -> bool:
        """Whether it has exited, waiting (and blocking the caller) at most `timeout_s`."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def watch(self, on_exit: Callable[[int], None]) -> None:
        """Call `on_exit(pid)` once in the running event loop when the process has exited."""
        assert self._loop is None, "already watched"
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fd, self._readable, on_exit)

    def _readable(self, on_exit: Callable[[int], None]) -> None:
        self.unwatch()
        on_exit(self.pid)

    def unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.fd)
        self._loop = None

    async def wait(self, timeout_s: float) -> bool:
        """Whether it exits within `timeout_s`, without blocking the loop. Not together with `watch`."""
        done = asyncio.get_running_loop().create_future()
        self.watch(lambda _pid: done.set_result(None) if not done.done() else None)
        try:
            await asyncio.wait([done], timeout=timeout_s)
        finally:
            self.unwatch()
        return done.done()

    def close(self) -> None:
        if self.fd >= 0:
            self.unwatch()
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

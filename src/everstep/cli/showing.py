"""The dashboard that `everstep run` starts: a process of low priority beside the launcher, whose death ends nothing.

The launcher listens, so that the address is known at once and stays the same when the process is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from everstep.control import transport
from everstep.core.config import RunConfig
from everstep.core.errors import UsageError

NEEDED = ("starlette", "uvicorn")
LIVES = 5  # a page that breaks this often does not come back
PAUSE_S = 1.0
NICE = 10
GOODBYE_S = 5.0  # it has low priority, and goes at once when nobody looks
LOG = "dashboard.log"


def missing() -> str:
    """What to do when the packages are not there; empty: they are."""
    absent = [name for name in NEEDED if find_spec(name) is None]
    return f"it needs {' and '.join(absent)}: pip install 'everstep[dashboard]'" if absent else ""


def listen_near(host: str, port: int) -> socket.socket:
    """A listening socket at this port, or at any free one when it is taken. Raises UsageError."""
    try:
        return transport.listen(host, port)
    except transport.AddressInUse:
        return transport.listen(host, 0)


def url(listener: socket.socket, host: str) -> str:
    """What to type into a browser's address line."""
    shown = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
    return f"http://{transport.shown(shown, listener.getsockname()[1])}/"


class Showing:
    """One dashboard. `die_with_us` is run in its process before anything else."""

    def __init__(
        self, config: RunConfig, run_dir: Path, listener: socket.socket, die_with_us: Callable[[], None]
    ) -> None:
        self._settings, self._run_dir, self._listener = config.dashboard, run_dir, listener
        self._die_with_us = die_with_us
        self._closing = False
        self.url = url(listener, config.dashboard.host)
        self.process: asyncio.subprocess.Process | None = None

    @classmethod
    def open(cls, config: RunConfig, run_dir: Path, die_with_us: Callable[[], None]) -> Showing | None:
        """None, after a line that says why, when there can be none here: the job goes on without."""
        if not config.dashboard.enabled:
            return None
        try:
            if why := missing():
                raise UsageError(why)
            showing = cls(config, run_dir, listen_near(config.dashboard.host, config.dashboard.port), die_with_us)
        except UsageError as error:
            print(f"everstep: no dashboard: {error}", file=sys.stderr)
            return None
        print(f"everstep: dashboard at {showing.url}", file=sys.stderr)
        return showing

    async def mind(self) -> None:
        """Keep one alive."""
        for _ in range(LIVES):
            self.process = await self._start()
            status = await self.process.wait()
            if self._closing:
                return
            await asyncio.sleep(PAUSE_S)
        self._listener.close()
        log = self._run_dir / LOG
        print(f"everstep: the dashboard died {LIVES} times, the last time with {status}; see {log}", file=sys.stderr)

    async def _start(self) -> asyncio.subprocess.Process:
        settings, fd = self._settings, self._listener.fileno()
        names = [word for name in settings.names for word in ("--name", name)]
        with self._log() as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "everstep", "dashboard", str(self._run_dir)),
                *("--host", settings.host, "--fd", str(fd), *names),
                pass_fds=[fd],
                preexec_fn=self._begin,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # signals to the launcher's group are for the job
            )

    def _begin(self) -> None:
        self._die_with_us()
        os.nice(NICE)

    @contextlib.contextmanager
    def _log(self) -> Iterator[BinaryIO | int]:
        try:
            file = (self._run_dir / LOG).open("ab")
        except OSError:  # a full disk
            yield asyncio.subprocess.DEVNULL
            return
        with file:
            yield file

    async def close(self) -> None:
        """Let the pages see the end of the job, if they take it soon."""
        self._closing = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()

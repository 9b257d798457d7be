"""The dashboard that `everstep run` starts: a process of low priority beside the launcher, whose death ends nothing.

The launcher listens, so that the address is known at once and stays the same when the process is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from everstep.control import transport
from everstep.core.config import RunConfig
from everstep.core.errors import UsageError

NEEDED = ("starlette", "uvicorn")
DEATHS = 5  # one soon after the other; then it does not come back
SOON_S = 60.0
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
        deaths = 0  # one soon after the other
        while deaths < DEATHS:
            began_s = time.monotonic()
            try:
                self.process = await self._start()
            except (OSError, subprocess.SubprocessError) as error:  # too many processes, say
                print(f"everstep: the dashboard cannot be started: {error}", file=sys.stderr)
                break
            status = await self.process.wait()
            if self._closing:
                return
            deaths = deaths + 1 if time.monotonic() < began_s + SOON_S else 1
            print(f"everstep: the dashboard died (status {status}; {self._run_dir / LOG})", file=sys.stderr)
            await asyncio.sleep(PAUSE_S)
        print("everstep: the dashboard does not come back", file=sys.stderr)
        self._listener.close()

    async def _start(self) -> asyncio.subprocess.Process:
        settings, fd = self._settings, self._listener.fileno()
        more = [word for name in settings.names for word in ("--name", name)]
        more += ["--private"] if settings.private else []
        more += ["--otlp", settings.otlp] if settings.otlp else []
        with self._log() as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "everstep", "dashboard", str(self._run_dir)),
                *("--host", settings.host, "--fd", str(fd), *more),
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

"""How a launcher finds a job whose controller runs elsewhere: it waits for the controller, and for the token.

Nodes are started in any order, so what is not there yet is no error before the join time-out: neither the controller,
nor its name, nor a token file which the first launcher makes. What is awaited is said once, what is found instead too.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from everstep.cli.seat import Seat
from everstep.control.tls import client_context
from everstep.control.token import read_token
from everstep.control.transport import backoff, connect, knock, shown
from everstep.core import wire
from everstep.core.config import RunConfig
from everstep.core.errors import Unreachable, UsageError

SAY_S = 1.0  # a wait that is over by then needs no words
MOST_S = 0.5  # between two tries

T = TypeVar("T")


class Joined(NamedTuple):
    """The job at the controller, and this machine's address as the controller sees it."""

    job: str
    address: str


def join(config: RunConfig, seat: Seat) -> Joined | signal.Signals:
    """Wait for the job as long as a join may take; the signal that ended the wait, if one did.

    Raises Unreachable when no controller came in time or it refused us, UsageError for a token file that is no good.
    """
    return asyncio.run(_unless_signalled(_find(config, seat), config.restart.signals))


async def _unless_signalled(work: Coroutine[Any, Any, T], names: tuple[str, ...]) -> T | signal.Signals:
    task = asyncio.create_task(work)
    came: list[signal.Signals] = []

    def stop(signum: signal.Signals) -> None:
        if not came:
            print(f"everstep: {signum.name}: stopped before there was a job to join", file=sys.stderr)
        came.append(signum)
        task.cancel()

    for name in names:
        asyncio.get_running_loop().add_signal_handler(signal.Signals[name], stop, signal.Signals[name])
    try:
        return await task
    except asyncio.CancelledError:
        if not came:
            raise
        return came[0]


async def _find(config: RunConfig, seat: Seat) -> Joined:
    wait = _Wait(seat, config.control.join_timeout_s)
    tls = client_context(config.control.tls_cert)
    path = Path(seat.token)
    token = read_token(path) if config.control.token_file or _written(path) else b""
    if not token:  # the first launcher makes it before it starts the controller
        await wait.for_controller(lambda: knock(seat.host, seat.port, tls=tls))
        token = await wait.for_token(path)
    hello = wire.Hello(role="launcher", node="", incarnation="", job="")
    link = await wait.for_controller(lambda: connect(seat.host, seat.port, token, hello, tls=tls))
    link.close()
    return Joined(link.job, link.local_host)


def _written(path: Path) -> bool:
    """Whether the file is there; an empty one is being written."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UsageError(f"cannot read token file {path}: {error.strerror}") from error


class _Wait:
    """One deadline for all that is awaited. Lines for a person: what it is, and what is found in its place."""

    def __init__(self, seat: Seat, limit_s: float) -> None:
        self.where = shown(seat.host, seat.port)
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self.found = ""
        self.announced = False

    async def for_controller(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer. Raises Unreachable when that does not help, or takes too long."""
        timer = asyncio.get_running_loop().call_later(SAY_S, self._announce)
        waits = backoff(most_s=MOST_S)
        try:
            while True:
                await asyncio.sleep(next(waits))
                try:
                    return await ask()
                except Unreachable as error:
                    if error.refused:
                        raise
                    if time.monotonic() > self.deadline:
                        raise Unreachable(f"{error}; gave up after {self.limit_s:g} s (the join time-out)") from error
                    self._find(str(error))
        finally:
            timer.cancel()

    def _announce(self) -> None:
        if not self.announced:
            self.announced = True
            why = self.found.removeprefix(f"no controller at {self.where}")
            text = f"waiting for the controller at {self.where} (up to {self.limit_s:g} s){why}"
            print(f"everstep: {text}", file=sys.stderr)

    def _find(self, found: str) -> None:
        if self.announced and found != self.found:
            print(f"everstep: {found}", file=sys.stderr)
        self.found = found

    async def for_token(self, path: Path) -> bytes:
        """Its text, as soon as the file is there and as it should be. Raises UsageError when that takes too long."""
        before, said = "", {f"cannot read token file {path}: {os.strerror(errno.ENOENT)}"}
        waits = backoff(most_s=MOST_S)
        while True:
            try:
                return read_token(path)
            except UsageError as error:
                if time.monotonic() > self.deadline:
                    raise UsageError(f"{error}; gave up after {self.limit_s:g} s (the join time-out)") from error
                found = str(error)
            if not before:
                how = "the first launcher makes it in a home directory all share; else copy it, or use --token-file"
                print(f"everstep: waiting for the token in {path} (up to {self.limit_s:g} s): {how}", file=sys.stderr)
            elif found == before and found not in said:  # not just half copied
                said.add(found)
                print(f"everstep: {found}", file=sys.stderr)
            before = found
            await asyncio.sleep(next(waits))

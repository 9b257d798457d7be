"""The agent's end of the socket to one worker's session: formations down, reports up.

The socket pair is made before the fork, so it needs no name and no proof. Both directions carry whole states: of
formations that wait for a worker which does not read, only the newest is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable

from everstep.core import wire
from everstep.core.formation import Formation, SessionReport

READ_BYTES = 1 << 16


class Channel:
    """`theirs` goes to the worker. `on_report` is called in the event loop."""

    def __init__(self, worker: str, on_report: Callable[[SessionReport], None]) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._ours.setblocking(False)
        self._worker = worker
        self._on_report = on_report
        self._reader = wire.FrameReader(worker, trusted=True)
        self._sending = b""  # rest of a frame
        self._next: Formation | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._readable)

    @property
    def theirs(self) -> int:
        return self._theirs.fileno()

    def handed_over(self) -> None:
        """The worker has its own copy of the descriptor."""
        self._theirs.close()

    def tell(self, formation: Formation) -> None:
        self._next = formation
        if not self._sending:
            self._writable()

    def _writable(self) -> None:
        try:
            while self._sending or self._next is not None:
                if not self._sending:
                    assert self._next is not None
                    self._sending, self._next = wire.encode(self._next), None
                self._sending = self._sending[self._ours.send(self._sending) :]
        except BlockingIOError:
            self._loop.add_writer(self._ours, self._writable)
            return
        except (BrokenPipeError, ConnectionResetError):  # it is gone, or closed everything; the reaper tells
            self._sending, self._next = b"", None
        self._loop.remove_writer(self._ours)

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            messages: list[wire.Message] = []
            try:
                data = self._ours.recv(READ_BYTES)
                messages = self._reader.feed(data)
            except ConnectionResetError:  # it is gone; the reaper tells
                data = b""
            except wire.WireError as error:
                print(f"everstep: {self._worker}: {error}", file=sys.stderr)
                data = b""
            if not data:
                self._loop.remove_reader(self._ours)
            for message in messages:
                if isinstance(message, SessionReport):
                    self._on_report(message)

    def close(self) -> None:
        self._loop.remove_reader(self._ours)
        self._loop.remove_writer(self._ours)
        self._ours.close()
        self._theirs.close()

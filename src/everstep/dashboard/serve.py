"""The dashboard's process: a web server on a socket that listens already, until it is told to end.

Peers that take their time cost a connection for a while and nothing else: how many there are is bounded, and so is how
long one may take to say what it wants, or to take what it is sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from everstep.dashboard.gate import Gate
from everstep.dashboard.notes import Notes
from everstep.dashboard.stream import Stream

REQUEST_S = 10.0  # from a connection, or the first byte of its next request, to the end of the headers
TAKING_S = 30.0  # a peer that reads too slowly for its buffer to empty within this is given up
IDLE_S = 20.0  # an open connection without a request
MAX_CONNECTIONS = 256
MAX_HEADERS = 16 << 10
GOODBYE_S = 3.0  # for pages to take the last news


def run(app: Gate, listener: socket.socket, stream: Stream, notes: Notes) -> None:
    """Serve until SIGTERM or SIGINT, which is raised again when all is closed."""
    asyncio.run(serve(app, listener, stream, notes))


async def serve(
    app: Gate, listener: socket.socket, stream: Stream, notes: Notes, ending: asyncio.Event | None = None
) -> None:
    """As `run`, in an event loop of the caller, who may end it by an event too."""
    _log_to(notes)
    config = uvicorn.Config(
        app,
        http=_patient(notes),
        ws="none",
        lifespan="off",
        loop="asyncio",
        access_log=False,  # a token may stand in an address
        log_config=None,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=int(GOODBYE_S),
        h11_max_incomplete_event_size=MAX_HEADERS,
    )
    server = _Server(config, ending or asyncio.Event())
    following = asyncio.create_task(_follow(stream, server))
    closing = asyncio.create_task(server.see_off(stream))
    try:
        await server.serve(sockets=[listener])
    finally:
        closing.cancel()
        following.cancel()
        await asyncio.wait([following])  # unlike an await of it, tells its cancellation from ours: Ctrl-C
        if not following.cancelled():
            following.result()


async def _follow(stream: Stream, server: _Server) -> None:
    """Without views there is nothing to serve: what ends the following ends the process, with its traceback."""
    try:
        await stream.run()
    finally:
        server.should_exit = True


class _Server(uvicorn.Server):
    """Tells the pages the last news before it closes their connections."""

    def __init__(self, config: uvicorn.Config, ending: asyncio.Event) -> None:
        super().__init__(config)
        self._loop = asyncio.get_running_loop()
        self._ending = ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._captured_signals.append(sig)
        self._loop.call_soon_threadsafe(self._ending.set)

    async def see_off(self, stream: Stream) -> None:
        await self._ending.wait()
        try:
            async with asyncio.timeout(GOODBYE_S):
                await stream.close()
        finally:
            self.should_exit = True


def _log_to(notes: Notes) -> None:
    for name in ("uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [notes], False
        logger.setLevel(logging.WARNING)


def _patient(notes: Notes) -> type[H11Protocol]:
    """uvicorn's connection, with an end to its patience."""

    class Patient(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _stuck: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > MAX_CONNECTIONS:
                self._give_up("there are too many connections")
            else:
                self._late = self._after(REQUEST_S, "it did not say what it wants")

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._late = _cancelled(self._late)
            elif self._late is None:
                self._late = self._after(REQUEST_S, "it did not say what else it wants")

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stuck = self._stuck or self._after(TAKING_S, "it does not take what it is sent")

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stuck = _cancelled(self._stuck)

        def connection_lost(self, exc: Exception | None) -> None:
            self._late, self._stuck = _cancelled(self._late), _cancelled(self._stuck)
            super().connection_lost(exc)

        def _after(self, seconds: float, why: str) -> asyncio.TimerHandle:
            return self.loop.call_later(seconds, self._give_up, why)

        def _give_up(self, why: str) -> None:
            notes.say(f"connection of {self.client[0] if self.client else 'somebody'} closed: {why}")
            self.transport.abort()

    return Patient


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None

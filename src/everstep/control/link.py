"""One connection that carries messages both ways: the half of the transport which does not care who called whom.

Sending never waits: the kernel takes what it can, the rest is buffered, and a peer that takes nothing for `stall_s`
loses its connection. Receiving is iteration; it ends when the connection does, and `ended` says why.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

from everstep.core import wire

STALL_S = 10.0
MAX_UNSENT = 2 * wire.MAX_FRAME  # bytes buffered for a peer before it is given up at once
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_TRIES = 5, 2, 3
TURN = 64  # messages taken in a row before others in the event loop get their turn

M = TypeVar("M", bound=wire.Message)


class Refusal(Exception):
    """One side does not accept the other; the text says why."""


class Link(asyncio.Protocol):
    """`async for message in link`, `link.send(message)`, `link.close()`; for one task to read from.

    `peer` names the other side, `job` and `term` are what the greeting told, `ended` why the link is over.
    The protocol's callbacks are for the event loop only.
    """

    def __init__(self, on_open: Callable[[Link], None] | None = None, stall_s: float = STALL_S) -> None:
        self.peer = "?"
        self.job = ""
        self.term = 0
        self.ended = ""
        self._on_open = on_open
        self._stall_s = stall_s
        self._reader = wire.FrameReader(self.peer)
        self._transport: asyncio.Transport
        self._over = False  # nothing will come any more
        self._news = asyncio.Event()
        self._reading_paused = False
        self._in_a_row = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._written = 0
        self._stall: asyncio.TimerHandle | None = None

    @property
    def local_host(self) -> str:
        """This side's address: how the other side's host reaches us."""
        return str(self._transport.get_extra_info("sockname")[0])

    # Sending --------------------------------------------------------------------------------------------

    def send(self, message: wire.Message) -> bool:
        """Send without waiting. False when the link is over: the message is lost, and iteration ends too.

        Raises WireError for a message that is too long.
        """
        frame = wire.encode(message)
        if self._transport.is_closing():
            return False
        self._written += len(frame)  # first: `write` may call pause_writing
        self._transport.write(frame)
        if self._transport.get_write_buffer_size() > MAX_UNSENT:
            self.abort(f"{self.peer} left {MAX_UNSENT:,} bytes unread")
        return not self._transport.is_closing()

    async def drained(self) -> None:
        """Until the kernel (with TLS: its layer) has taken everything that was sent, or the link is over."""
        await self._writable.wait()

    # Receiving ------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> wire.Message:
        try:
            message = await self._receive()
        except wire.WireError as error:
            self.close(str(error))
            raise StopAsyncIteration from error
        if isinstance(message, wire.Bye):
            self._finish(f"{self.peer} said: {message.why}")
            message = None
        if message is None:
            raise StopAsyncIteration
        return message

    async def expect(self, kind: type[M]) -> M:
        """The next message, which has to be of this kind.

        Raises Refusal when it is one, WireError for another, ConnectionError when the link is over.
        """
        message = await self._receive()
        if message is None:
            raise ConnectionError(self.ended)
        if isinstance(message, wire.Refused):
            raise Refusal(message.why)
        if not isinstance(message, kind):
            raise wire.WireError(f"{self.peer} sent {type(message).__name__} where {kind.__name__} was due")
        return message

    async def _receive(self) -> wire.Message | None:
        """The next message; None at the end. What came before the other side's end is still given out."""
        self._in_a_row += 1
        if self._in_a_row >= TURN:
            self._in_a_row = 0
            await asyncio.sleep(0)
        while True:
            self._news.clear()
            message = self._reader.pop()
            if message is not None:
                return message
            if self._over:
                return None
            if self._reading_paused:
                self._reading_paused = False
                self._transport.resume_reading()
            self._in_a_row = 0
            await self._news.wait()

    # Ends -----------------------------------------------------------------------------------------------

    def trust(self, peer: str) -> None:
        """The other side proved the token, and this is what it calls itself."""
        self.peer = self._reader.sender = f"{peer} ({self.peer})"
        self._reader.trust()

    def close(self, why: str = "") -> None:
        """End the link from this side; what was sent still goes out. With `why` the other side is told."""
        if why and not self._transport.is_closing():
            self.send(wire.Bye(why[: wire.MAX_WHY]))
        self._finish(why or "closed by this side")

    def refuse(self, why: str) -> None:
        """End the greeting with a reason that trying again will not change."""
        self.send(wire.Refused(why[: wire.MAX_WHY]))
        self._finish(why)

    def abort(self, why: str) -> None:
        """End the link at once; what is unsent is lost."""
        self._end(why)
        self._transport.abort()

    def _finish(self, why: str) -> None:
        self._end(why)
        if not self._transport.is_closing():  # closing twice breaks a TLS transport that still has to flush
            self._transport.close()

    def _end(self, why: str) -> None:
        self.ended = self.ended or why
        self._over = True
        self._reader.clear()
        self._news.set()

    # Callbacks of the event loop ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Tell us as soon as the kernel does not take everything; TLS counts "at least", plain TCP "more than".
        high = 0 if transport.get_extra_info("ssl_object") is None else 1
        self._transport.set_write_buffer_limits(high=high, low=0)
        _tune(transport.get_extra_info("socket"), self._stall_s)
        host, port = (transport.get_extra_info("peername") or ("?", 0))[:2]  # none when it was reset already
        self.peer = self._reader.sender = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if self._on_open is not None:
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._reader.push(data)
        self._news.set()
        if self._reader.full and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        why = f"{self.peer}: {exc}" if exc else f"{self.peer} closed the connection"
        if isinstance(exc, TimeoutError):  # the kernel's own watch, see _tune
            why = f"{self.peer} read nothing for {self._stall_s + 1:g} s, or its host is gone"
        self.ended = self.ended or why
        self._over = True
        self._news.set()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writable.clear()
        self._watch_stall()

    def resume_writing(self) -> None:
        self._writable.set()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _watch_stall(self) -> None:
        loop = asyncio.get_running_loop()
        self._stall = loop.call_later(self._stall_s, self._judge_stall, self._taken())

    def _taken(self) -> int:
        """Bytes the kernel has accepted so far."""
        return self._written - self._transport.get_write_buffer_size()

    def _judge_stall(self, taken_before: int) -> None:
        if self._taken() > taken_before:
            self._watch_stall()  # slow, but reading
        else:
            self.abort(f"{self.peer} read nothing for {self._stall_s:g} s")


def _tune(sock: Any, stall_s: float) -> None:
    """Small messages at once, and a peer whose host vanished is found by the kernel."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_TRIES)
    # Without it unacknowledged data is repeated for a quarter of an hour before the connection counts as lost. A second
    # more than ours: it also ends links to a peer that does not read. TLS hides its last bytes from our own watch.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int((stall_s + 1) * 1000))

"""How two workers get to trust each other on a new TCP connection, and what they agree on.

The dialer says Hello, the other side challenges; both prove the job's token with a MAC over both of these messages as
they travelled, so over names, version, channel and nonces; then the other side says Welcome, where a door is named if
the two can share memory (`door.py`), the dialer tells how that went, and Ready ends it. Nothing is unpickled: frames
are short msgpack structs. Neither side waits longer than HANDSHAKE_S, and whatever a stranger sends costs it its
connection only.

This authenticates, it does not encrypt: who can change packets between the hosts can still change what is sent later.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec

from everstep.core.endpoint import parse_endpoint
from everstep.core.proof import new_nonce, prove, proves

VERSION = 1  # of the handshake, the frames and the board
HANDSHAKE_S = 5.0
MAX_MESSAGE_BYTES = 1024
MAX_WHY = 200
DIALER, LISTENER = b"everstep link dialer", b"everstep link listener"


class LinkError(Exception):
    """No link to a worker; the text says why."""

    def __init__(self, worker: str, why: str) -> None:
        super().__init__(f"no link to worker {worker}: {why}")
        self.worker = worker
        self.why = why


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(_Message, frozen=True):
    """Who dials whom, for which epoch and channel. `call`: only to ask the other side to dial."""

    version: int
    worker: str
    peer: str
    host: str
    epoch: int
    channel: int
    call: bool
    shared_memory: bool
    nonce: bytes
    endpoint: str  # where the dialer listens


class Challenge(_Message, frozen=True):
    worker: str
    nonce: bytes


class Proof(_Message, frozen=True):
    mac: bytes


class Refused(_Message, frozen=True):
    why: str


class Welcome(_Message, frozen=True):
    """Where boards are exchanged: name of an abstract Unix socket, and what to say there. Empty: on no account."""

    door: str = ""
    ticket: bytes = b""


class Settled(_Message, frozen=True):
    shared: bool  # the dialer has the other's board, and has given its own


class Ready(_Message, frozen=True):
    pass


NewSocket = Callable[[Callable[[], socket.socket]], socket.socket]
M = TypeVar("M", bound=_Message)
_decoder = msgspec.msgpack.Decoder(Hello | Challenge | Proof | Refused | Welcome | Settled | Ready)


class Garbage(Exception):
    """What came is no message, or not one that is due here."""


class Refusal(Exception):
    """The other side does not want this link, or is not who it should be."""


class Wire:
    """Messages of the handshake over a socket; reads not a byte more than them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop = asyncio.get_running_loop()

    async def send(self, message: _Message) -> bytes:
        """Returns the bytes, which go into the proofs."""
        data = msgspec.msgpack.encode(message)
        await self._loop.sock_sendall(self._sock, len(data).to_bytes(4, "big") + data)
        return data

    async def expect(self, kind: type[M]) -> tuple[M, bytes]:
        """The next message, which must be of this kind, and its bytes. Raises Refusal, Garbage, OSError."""
        size = int.from_bytes(await self._read(4), "big")
        if size > MAX_MESSAGE_BYTES:
            raise Garbage("what it sent is no message")
        data = await self._read(size)
        try:
            message = _decoder.decode(data)
        except (ValueError, RecursionError) as error:
            raise Garbage("what it sent is no message") from error
        if isinstance(message, Refused):
            raise Refusal(message.why)
        if not isinstance(message, kind):
            raise Garbage(f"it sent {type(message).__name__} where {kind.__name__} was due")
        return message, data

    async def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = await self._loop.sock_recv(self._sock, size - len(data))
            if not part:
                raise ConnectionError("it closed the connection")
            data += part
        return data


async def introduce(wire: Wire, token: bytes, hello: Hello) -> Welcome:
    """The dialer's part, up to the welcome. Raises Refusal, Garbage, OSError."""
    said = await wire.send(msgspec.structs.replace(hello, nonce=new_nonce()))
    challenge, asked = await wire.expect(Challenge)
    await wire.send(Proof(prove(token, DIALER, (said, asked))))
    proof, _ = await wire.expect(Proof)
    if not proves(proof.mac, token, LISTENER, (said, asked)):
        raise Refusal("it could not prove that it holds the job's token")
    if challenge.worker != hello.peer:
        raise Refusal(f"worker {challenge.worker} listens there")
    return (await wire.expect(Welcome))[0]


async def admit(wire: Wire, token: bytes, worker: str, wanted: Callable[[Hello], str]) -> Hello:
    """The listener's part, up to the welcome. `wanted` says why a proven dialer is not; empty: it is.

    Raises Refusal, after telling the dialer, Garbage, OSError.
    """
    hello, said = await wire.expect(Hello)
    if hello.version != VERSION:
        raise await _refuse(wire, f"its links have version {VERSION}, ours {hello.version}")
    asked = await wire.send(Challenge(worker, new_nonce()))
    proof, _ = await wire.expect(Proof)
    if not proves(proof.mac, token, DIALER, (said, asked)):
        raise await _refuse(wire, "the token is not the one of the job that runs there")
    await wire.send(Proof(prove(token, LISTENER, (said, asked))))
    # A worker that ended may have left its port to another: the dialer sees that by our name, too.
    why = f"worker {worker} listens there" if hello.peer != worker else wanted(hello)
    if why:
        raise await _refuse(wire, why)
    return hello


async def _refuse(wire: Wire, why: str) -> Refusal:
    with contextlib.suppress(OSError):  # it is gone already
        await wire.send(Refused(why[:MAX_WHY]))
    return Refusal(why)


async def connect(endpoint: str, new_socket: NewSocket) -> socket.socket:
    """A new connection. Raises OSError, and ValueError for what is no endpoint."""
    loop = asyncio.get_running_loop()
    host, port = parse_endpoint(endpoint, 0, "endpoint")
    try:  # a number needs no resolver, and so no thread to wait for one
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, proto, _, address = found[0]
    sock = new_socket(lambda: socket.socket(family, kind, proto))
    with contextlib.ExitStack() as undo:
        undo.enter_context(sock)
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        # A port of the ephemeral range that nobody listens on can be connected to itself.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
        undo.pop_all()
    return sock


def told(error: Exception) -> str:
    """What went wrong, for people."""
    if isinstance(error, TimeoutError):
        return f"no answer within {HANDSHAKE_S:g} s"
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)

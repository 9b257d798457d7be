"""What controller, agents, launchers and the command line say to each other, and how it is framed.

A frame is a big-endian 32-bit length and that many bytes of msgpack: one tagged struct. `FrameReader` takes bytes as
they come, does no I/O, and refuses what is too long before it is stored. A connection is untrusted until both sides
proved the job's token: until then frames are short, and only the few flat types of the greeting exist.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, Literal

import msgspec

from everstep.core.checkup import Arrived, Examined, RingAsked, RingDone
from everstep.core.errors import EverstepError
from everstep.core.formation import Formation, SessionReport
from everstep.core.types import Directive, NodeProgress, NodeReport, StacksAsked, StacksTaken

VERSION = 1  # raised by every change an older reader cannot take
MAX_FRAME = 16 << 20  # bytes, once the sender proved the token
MAX_GREETING = 1 << 10  # bytes, before
MAX_WHY = 200  # characters of a refusal, so that it fits a greeting whatever the script

_HEADER = struct.Struct("!I")
_MALFORMED = (ValueError, OverflowError, RecursionError)  # what the decoder raises; its own errors are ValueErrors


class WireError(EverstepError):
    """Bytes that are no message, from whom, and what is wrong with them. Its connection is to be closed."""


@functools.cache
def everstep_version() -> str:
    """Version of the installed package. Read once, when first needed: importing the reader is slow."""
    from importlib.metadata import version

    return version("everstep")


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages defined here; those about nodes and workers are in core.types."""


# The greeting: client says Hello, server challenges, both prove, server welcomes -------------------------


class Hello(_Message, frozen=True):
    """First message of a client. `job` empty: whichever runs there. `nonce` is filled in by the transport."""

    role: Literal["agent", "cli", "launcher"]
    node: str
    incarnation: str
    job: str
    version: int = VERSION
    everstep_version: str = msgspec.field(default_factory=everstep_version)
    nonce: bytes = b""


class Challenge(_Message, frozen=True):
    nonce: bytes
    job: str = ""


class Proof(_Message, frozen=True):
    """Sender holds the token: a MAC over both nonces and what was claimed."""

    mac: bytes


class Welcome(_Message, frozen=True):
    """Last message of the greeting. `term` counts the lives of the controller."""

    job: str
    term: int


class Refused(_Message, frozen=True):
    """The server does not want this client, and a second try would end the same way."""

    why: str


# Afterwards ---------------------------------------------------------------------------------------------


class Query(_Message, frozen=True):
    what: Literal["status"] = "status"


class Reply(_Message, frozen=True):
    """Answer to a query: plain data."""

    payload: dict[str, Any]


class StopRequest(_Message, frozen=True):
    """Somebody wants the job to end: `signal` is what they were sent, `grace_s` what the workers are given."""

    why: str
    signal: int = 15
    grace_s: float = 30.0


class DrainRequest(_Message, frozen=True):
    """Somebody wants a node, or one worker of it, out of the job. `undo`: such a place is to be filled again.

    The Reply has `target`, or why not: `refused`.
    """

    target: str
    undo: bool = False


class SaveRequest(_Message, frozen=True):
    """Somebody wants the job's state on disk. The Reply has `asked`, which wish this is, or why not: `refused`."""


class LookRequest(_Message, frozen=True):
    """Somebody wants to see where workers are: their stacks, or where one of them spends the next `seconds`.

    `workers`: ranks, node/local_rank or nodes; none: all. The Reply comes when it is there: `file` (in the run folder),
    `what` it shows, `summary` and `notes`; or `nothing`, and why; or why it was not tried: `refused`.
    """

    what: Literal["stacks", "profile"]
    workers: tuple[str, ...] = ()
    seconds: float = 5.0
    threads: bool = False


class NodeDied(_Message, frozen=True):
    """A launcher saw an agent's process end. `status`: exit status, or minus the signal."""

    node: str
    incarnation: str
    status: int


class Bye(_Message, frozen=True):
    """The sender closes the connection, and says why."""

    why: str


Greeting = Hello | Challenge | Proof | Welcome | Refused
Talk = (
    Query
    | Reply
    | StopRequest
    | DrainRequest
    | SaveRequest
    | LookRequest
    | NodeDied
    | Bye
    | NodeReport
    | NodeProgress
    | Directive
    | StacksAsked
    | StacksTaken
    | Formation
    | SessionReport
    | Arrived
    | RingAsked
    | RingDone
    | Examined
)
Message = Greeting | Talk

_encoder = msgspec.msgpack.Encoder()
_greeting: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Greeting)
_talk: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Talk)


def encode(message: Message) -> bytes:
    """One frame. Raises WireError when the message is longer than a receiver takes."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"{type(message).__name__} of {len(body):,} bytes: a message has at most {MAX_FRAME:,}")
    return _HEADER.pack(len(body)) + body


class FrameReader:
    """Bytes of one connection in, messages out. `sender` names it in errors. After a WireError it is of no use."""

    def __init__(self, sender: str, trusted: bool = False) -> None:
        self.sender = sender
        self._trusted = trusted
        self._buffer = bytearray()

    def trust(self) -> None:
        """The sender proved the token: from here on no greeting, but everything else."""
        self._trusted = True

    @property
    def full(self) -> bool:
        """Enough is stored for the longest frame: read no more from the connection before `pop`."""
        return len(self._buffer) >= _HEADER.size + self._most

    @property
    def _most(self) -> int:
        return MAX_FRAME if self._trusted else MAX_GREETING

    def feed(self, data: bytes) -> list[Message]:
        """Store `data`; all messages that are whole by now. Raises WireError."""
        self.push(data)
        return list(iter(self.pop, None))

    def push(self, data: bytes) -> None:
        self._buffer += data

    def clear(self) -> None:
        self._buffer.clear()

    def pop(self) -> Message | None:
        """The next message, or None when there is none in whole. Raises WireError."""
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > self._most:
            raise WireError(
                f"{self.sender} announced a frame of {length:,} bytes, the limit is {self._most:,}"
                f"{_guess(bytes(self._buffer[: _HEADER.size]))}"
            )
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        message = self._decode(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return message

    def _decode(self, body: bytearray) -> Message:
        try:
            message = (_talk if self._trusted else _greeting).decode(body)
        except _MALFORMED as error:
            raise WireError(
                f"{self.sender} sent {len(body)} bytes which are no message of wire version {VERSION}: {error}"
            ) from error
        if isinstance(message, Hello) and message.version != VERSION:
            raise WireError(
                f"{self.sender} speaks wire version {message.version} (everstep {message.everstep_version}), this side "
                f"version {VERSION} (everstep {everstep_version()}): install the same everstep on both"
            )
        return message


def _guess(head: bytes) -> str:
    """What else the first bytes of a connection may be: a wrong port or a forgotten setting is the usual reason."""
    if head[0] in (0x15, 0x16) and head[1] == 0x03:
        return "; it looks like TLS: one side uses it, the other does not"
    if head in (b"GET ", b"POST", b"HEAD", b"HTTP", b"PUT "):
        return "; it looks like HTTP: this is not a web address"
    return ""

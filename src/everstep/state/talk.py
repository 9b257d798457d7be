"""What a vault, its workers and other vaults say to each other, how it is framed, and how they prove to be of one job.

A frame is a big-endian 32-bit length and that many bytes of msgpack. Before both sides proved the job's secret only the
three short messages of the greeting exist. Data of images is raw bytes behind a frame which says how many.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, TypeVar

import msgspec

from everstep.core.proof import new_nonce, prove, proves
from everstep.state.slots import News, Shard, State

T = TypeVar("T")
VERSION = 1
MAX_GREETING = 512
MAX_FRAME = 256 << 20  # an index of a million tensors
PATIENCE_S = 20.0  # for a peer that does not move
CLIENT, SERVER = b"everstep vault client", b"everstep vault server"
_LENGTH = struct.Struct("!I")


class TalkError(Exception):
    """The other side is not one of ours, or does not keep to the rules; the text says how."""


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(_Message, frozen=True):
    version: int
    nonce: bytes


class Challenge(_Message, frozen=True):
    nonce: bytes


class Proof(_Message, frozen=True):
    mac: bytes


class Refused(_Message, frozen=True):
    """`needed`, `free`, `budget`, `busy` in bytes when it is for want of memory."""

    number: int
    why: str
    needed_bytes: int = 0
    free_bytes: int = 0
    budget_bytes: int = 0
    busy_bytes: int = 0


Greeting = Hello | Challenge | Proof | Refused

# Of a worker to its node's vault: each has a number, the answer has the same ------------------------------


class Persist(msgspec.Struct, frozen=True):
    """Write the image to disk. `settings`: of retention, as {"newest": 2}; none: all checkpoints stay."""

    where: str
    settings: dict[str, Any] = {}


class Endpoint(_Message, frozen=True):
    number: int


class Slot(_Message, frozen=True):
    number: int
    num_bytes: int


class Seal(_Message, frozen=True):
    number: int
    image: int
    index: bytes  # encoded
    peers: tuple[str, ...]
    persist: Persist | None


class GiveUp(_Message, frozen=True):
    number: int
    image: int


class List(_Message, frozen=True):
    number: int


class Open(_Message, frozen=True):
    """For reading, once its sums are known."""

    number: int
    shard: Shard
    step: int


class Close(_Message, frozen=True):
    number: int
    image: int


class Verify(_Message, frozen=True):
    number: int
    shard: Shard
    step: int


class Pull(_Message, frozen=True):
    """Get an image from the vault at that endpoint."""

    number: int
    endpoint: str
    shard: Shard
    step: int


Request = Endpoint | Slot | Seal | GiveUp | List | Open | Close | Verify | Pull

# Answers and news to a worker ---------------------------------------------------------------------------


class Kept(msgspec.Struct, frozen=True):
    """An image in a vault's memory."""

    step: int
    shard: int
    num_shards: int
    state: State
    epoch: int
    num_bytes: int


class Ok(_Message, frozen=True):
    number: int


class Told(_Message, frozen=True):
    number: int
    endpoint: str


class Given(_Message, frozen=True):
    """A descriptor comes with it unless the worker has that memory already."""

    number: int
    image: int
    memory: int
    capacity_bytes: int
    has_descriptor: bool


class Opened(_Message, frozen=True):
    """A read-only descriptor comes with it."""

    number: int
    image: int
    index: bytes


class Listed(_Message, frozen=True):
    number: int
    kept: tuple[Kept, ...]


class Sums(_Message, frozen=True):
    number: int
    sums: tuple[int, ...]


class Spoilt(_Message, frozen=True):
    """An answer: the image is not what was written."""

    number: int
    why: str


class Unmap(_Message, frozen=True):
    """The vault does not have that memory any more."""

    memory: int


Answer = Refused | Ok | Told | Given | Opened | Listed | Sums | Spoilt | Unmap | News

# Between vaults -----------------------------------------------------------------------------------------


class Offer(_Message, frozen=True):
    """An image, with its sums; asks which chunks are wanted."""

    index: bytes


class Want(_Message, frozen=True):
    """Chunks to send, in this order; without any the image is there already."""

    chunks: tuple[int, ...]


class Chunk(_Message, frozen=True):
    """`num_bytes` raw bytes follow."""

    number: int
    num_bytes: int


class Got(_Message, frozen=True):
    """The chunk arrived and its sum is right."""

    number: int


class Whole(_Message, frozen=True):
    """The image is complete and kept."""


class Fetch(_Message, frozen=True):
    """Send that image: an Offer comes, then all goes on as if it had been offered."""

    shard: Shard
    step: int


Between = Offer | Want | Chunk | Got | Whole | Fetch | Refused | Spoilt

_encoder = msgspec.msgpack.Encoder()
greeting: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
between: msgspec.msgpack.Decoder[Between] = msgspec.msgpack.Decoder(Between)


def frame(message: object) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise TalkError(f"{type(message).__name__} of {len(body):,} bytes: a message has at most {MAX_FRAME:,}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Bytes of one connection in, bodies of frames out. `most`: bytes of a body, raised once the sender is known."""

    def __init__(self) -> None:
        self.most = MAX_GREETING
        self._bytes = bytearray()

    def push(self, data: bytes) -> None:
        self._bytes += data

    def pop(self) -> bytes | None:
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self.most:
            raise TalkError(f"a frame of {length:,} bytes was announced, the limit is {self.most:,}")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return body


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """Raises TalkError."""
    try:
        return decoder.decode(body)
    except (ValueError, OverflowError, RecursionError) as error:
        raise TalkError(f"{len(body)} bytes which are no message of version {VERSION}: {error}") from error


# Blocking connections -----------------------------------------------------------------------------------


def read_exactly(sock: socket.socket, into: memoryview) -> None:
    """Raises TalkError when the other side ends first, OSError."""
    while into:
        got = sock.recv_into(into)
        if not got:
            raise TalkError("it closed the connection")
        into = into[got:]


def receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any], most: int = MAX_FRAME) -> Any:
    """The next message, and not a byte more. Raises TalkError, OSError."""
    head = bytearray(_LENGTH.size)
    read_exactly(sock, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > most:
        raise TalkError(f"a frame of {length:,} bytes was announced, the limit is {most:,}")
    body = bytearray(length)
    read_exactly(sock, memoryview(body))
    return decode(decoder, bytes(body))


def greet(sock: socket.socket, secret: bytes) -> None:
    """The client's part: both sides hold the secret, or TalkError. Raises OSError too."""
    mine = new_nonce()
    sock.sendall(frame(Hello(VERSION, mine)))
    challenge = _expect(sock, Challenge)
    sock.sendall(frame(Proof(prove(secret, CLIENT, [mine, challenge.nonce]))))
    proof = _expect(sock, Proof)
    if not proves(proof.mac, secret, SERVER, [mine, challenge.nonce]):
        raise TalkError("it does not know the secret of this job")


def _expect(sock: socket.socket, kind: type[T]) -> T:
    message = receive(sock, greeting, MAX_GREETING)
    if isinstance(message, Refused):
        raise TalkError(message.why)
    if not isinstance(message, kind):
        raise TalkError(f"a {type(message).__name__} in place of a {kind.__name__}")
    return message


class Doorkeeper:
    """The server's part of a greeting: what to answer to each message. Raises TalkError for a stranger."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonces: list[bytes] = []
        self.known = False

    def answer(self, message: Greeting) -> Challenge | Proof:
        match message:
            case Hello(version, nonce) if not self._nonces:
                if version != VERSION:
                    raise TalkError(f"it speaks version {version}, this vault speaks version {VERSION}")
                self._nonces = [nonce, new_nonce()]
                return Challenge(self._nonces[1])
            case Proof(mac) if self._nonces and proves(mac, self._secret, CLIENT, self._nonces):
                self.known = True
                return Proof(prove(self._secret, SERVER, self._nonces))
        raise TalkError("it does not know the secret of this job")


def admit(sock: socket.socket, secret: bytes) -> None:
    """The server's part on a blocking connection. Raises TalkError, OSError."""
    keeper = Doorkeeper(secret)
    while not keeper.known:
        sock.sendall(frame(keeper.answer(receive(sock, greeting, MAX_GREETING))))

"""Images from one vault to another, over TCP between vaults which proved the job's secret to each other.

Only chunks which the receiver does not have from an older image of the shard are sent. It checks each chunk, and makes
an image of them when all are there: what breaks off before leaves nothing. The sender yields to the job's own traffic:
few bytes on the way, a low class of service, and a rate if one is set.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TypeVar

from everstep.core.endpoint import parse_endpoint
from everstep.state import memory, talk
from everstep.state.image import Damaged, Index, chunk_span, decode, encode
from everstep.state.keeper import Cancelled, Keeper, NoRoom, NotKept
from everstep.state.slots import Shard
from everstep.state.talk import TalkError

IN_FLIGHT = 4  # chunks sent and not acknowledged
CONNECT_S = 5.0
LOW_PRIORITY = 0x20  # the class "scavenger" (CS1)
T = TypeVar("T")


class Peers:
    """Talks to other vaults for one. `rate`: bytes per second of each transfer; 0: as fast as it goes."""

    def __init__(self, secret: bytes, rate: float) -> None:
        self._secret, self._rate = secret, rate

    def send(self, endpoint: str, index: Index, view: memoryview, cancelled: threading.Event) -> None:
        """A copy of an image for the vault there. Raises Cancelled, Damaged (what arrived is), OSError, TalkError."""
        with self._connect(endpoint) as sock:
            self._offer(sock, index, view, cancelled)

    def pull(self, keeper: Keeper, endpoint: str, shard: Shard, step: int) -> None:
        """A copy of an image of the vault there. Raises NotKept, NoRoom, Damaged, OSError, TalkError."""
        with self._connect(endpoint) as sock:
            sock.sendall(talk.frame(talk.Fetch(shard, step)))
            match talk.receive(sock, talk.between):
                case talk.Offer(encoded):
                    index = decode(encoded)
                    if (index.shard, index.num_shards, index.step) != (*shard, step):
                        raise TalkError(f"step {index.step}, shard {index.shard} was sent in place of {step}, {shard}")
                    self._take(sock, keeper, index)
                case talk.Refused(why=why):
                    raise NotKept(why)
                case other:
                    raise TalkError(f"a {type(other).__name__} in answer to a Fetch")

    def serve(self, sock: socket.socket, keeper: Keeper) -> None:
        """One connection of another vault, which has proved to be one, to its end."""
        with contextlib.suppress(TalkError, OSError, Damaged, NoRoom, NotKept):  # the other side is told, or is gone
            match talk.receive(sock, talk.between):
                case talk.Offer(encoded):
                    self._take(sock, keeper, decode(encoded))
                case talk.Fetch(shard, step):
                    self._give(sock, keeper, shard, step)

    def prepare(self, sock: socket.socket) -> None:
        sock.settimeout(talk.PATIENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):  # of no kind of network that knows it
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOW_PRIORITY)

    def _connect(self, endpoint: str) -> socket.socket:
        sock = socket.create_connection(parse_endpoint(endpoint, 0, "endpoint of a vault"), timeout=CONNECT_S)
        try:
            talk.greet(sock, self._secret)
            self.prepare(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    # Giving ---------------------------------------------------------------------------------------------

    def _give(self, sock: socket.socket, keeper: Keeper, shard: Shard, step: int) -> None:
        try:
            with keeper.reading(shard, step) as (_, index, view):
                self._offer(sock, index, view, threading.Event(), rate=0)  # somebody waits for it
        except NotKept as error:
            sock.sendall(talk.frame(talk.Refused(0, str(error))))
        except Damaged:
            keeper.verify(shard, step)

    def _offer(
        self, sock: socket.socket, index: Index, view: memoryview, cancelled: threading.Event, rate: float | None = None
    ) -> None:
        sock.sendall(talk.frame(talk.Offer(encode(index))))
        want = _answer(sock, talk.Want)
        if not all(0 <= chunk < index.num_chunks for chunk in want.chunks):
            raise TalkError("it wants chunks which there are not")
        pace = _Pace(self._rate if rate is None else rate, cancelled)
        for sent, chunk in enumerate(want.chunks):
            data = memory.chunk_of(index, view, chunk)
            pace.wait(len(data))
            if sent >= IN_FLIGHT:
                _answer(sock, talk.Got)
            sock.sendall(talk.frame(talk.Chunk(chunk, len(data))))
            sock.sendall(data)
        for _ in range(min(IN_FLIGHT, len(want.chunks))):
            _answer(sock, talk.Got)
        _answer(sock, talk.Whole)

    # Taking ---------------------------------------------------------------------------------------------

    def _take(self, sock: socket.socket, keeper: Keeper, index: Index) -> None:
        """Raises what went wrong, after telling the other side."""
        try:
            self._receive(sock, keeper, index)
        except NoRoom as error:
            sizes = (error.needed_bytes, error.free_bytes, error.budget_bytes, error.busy_bytes)
            sock.sendall(talk.frame(talk.Refused(0, str(error), *sizes)))
            raise
        except Damaged as error:
            sock.sendall(talk.frame(talk.Spoilt(0, str(error))))
            raise

    def _receive(self, sock: socket.socket, keeper: Keeper, index: Index) -> None:
        if len(index.sums) != index.num_chunks or not 0 <= index.shard < index.num_shards:
            raise Damaged("the index of an image without sums, or of a shard which there is not")
        shard = Shard(index.shard, index.num_shards)
        known = keeper.index(shard, index.step)
        if known is not None and known.epoch == index.epoch and known.sums == index.sums:
            sock.sendall(talk.frame(talk.Want(())) + talk.frame(talk.Whole()))
            return
        image, _, region = keeper.ask(keeper.name(), index.num_bytes)
        try:
            wanted = _missing(keeper, index, shard, region.view)
            sock.sendall(talk.frame(talk.Want(wanted)))
            for chunk in wanted:
                self._chunk(sock, index, chunk, region.view)
            keeper.seal(image, index)
        except BaseException:
            keeper.give_up(image)
            raise
        sock.sendall(talk.frame(talk.Whole()))

    def _chunk(self, sock: socket.socket, index: Index, chunk: int, view: memoryview) -> None:
        said = _answer(sock, talk.Chunk)
        data = memory.chunk_of(index, view, chunk)
        if (said.number, said.num_bytes) != (chunk, len(data)):
            raise TalkError(f"chunk {said.number} of {said.num_bytes} bytes in place of {chunk} of {len(data)}")
        talk.read_exactly(sock, data)
        memory.check(index, chunk, data, "what arrived")
        sock.sendall(talk.frame(talk.Got(chunk)))


def _missing(keeper: Keeper, index: Index, shard: Shard, view: memoryview) -> tuple[int, ...]:
    """Chunks to send; the others are copied from our newest image of the shard."""
    everything = range(index.num_chunks)
    step = keeper.newest(shard)
    if step is None:
        return tuple(everything)
    wanted = []
    try:
        with keeper.reading(shard, step) as (_, old, old_view):
            for chunk in everything:
                same = chunk < old.num_chunks and chunk_span(old, chunk) == chunk_span(index, chunk)
                if not same or old.sums[chunk] != index.sums[chunk] or not _copied(index, chunk, old_view, view):
                    wanted.append(chunk)
    except NotKept:  # it went meanwhile
        return tuple(everything)
    return tuple(wanted)


def _copied(index: Index, chunk: int, old: memoryview, new: memoryview) -> bool:
    """Whether the chunk was whole, and is copied."""
    data = memory.chunk_of(index, new, chunk)
    data[:] = memory.chunk_of(index, old, chunk)
    try:
        memory.check(index, chunk, data, "an older image")
    except Damaged:
        return False
    return True


def _answer(sock: socket.socket, kind: type[T]) -> T:
    message = talk.receive(sock, talk.between)
    if isinstance(message, talk.Spoilt):
        raise Damaged(message.why)
    if isinstance(message, talk.Refused):
        raise TalkError(f"the peer refuses: {message.why}")
    if not isinstance(message, kind):
        raise TalkError(f"a {type(message).__name__} in place of a {kind.__name__}")
    return message


class _Pace:
    """Keeps a transfer to a rate, and notices that it is not wanted any more. Raises Cancelled."""

    def __init__(self, rate: float, cancelled: threading.Event) -> None:
        self._rate, self._cancelled = rate, cancelled
        self._due_s = time.monotonic()

    def wait(self, num_bytes: int) -> None:
        early_s = self._due_s - time.monotonic() if self._rate else 0.0
        if self._cancelled.wait(max(0.0, early_s)) if early_s > 0 else self._cancelled.is_set():
            raise Cancelled
        if self._rate:
            self._due_s = max(self._due_s, time.monotonic()) + num_bytes / self._rate

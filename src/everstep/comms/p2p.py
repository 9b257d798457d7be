"""Messages from one member to another: in order for each (sender, communicator, tag), whatever comes in between.

On one host they flow through a ring on the sender's board, which only the two use; long ones in pieces, while both
sides go on. A message for another tag that is in front is put aside in memory, so no tag waits for another. To another
host they go over a stream. All of it belongs to one epoch, and is gone with it.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from everstep.comms.board import (
    LINE_BYTES,
    MAX_COMMUNICATORS,
    MAX_LOCAL,
    RING_BYTES,
    ROUND_BITS,
    sent_word,
    taken_word,
)
from everstep.comms.signature import code_of, dtype_of
from everstep.comms.table import Table
from everstep.comms.words import store, wait_for
from everstep.core.errors import EpochBroken

CHUNK_BYTES = RING_BYTES // 4
TAGS = range(1 << 32)

_RING_LINES = RING_BYTES // LINE_BYTES
_MARK = struct.Struct("=QQ")


class Header(NamedTuple):
    """One line in front of each message in a ring."""

    communicator: int
    tag: int
    num_bytes: int
    dtype: int

    def pack(self) -> Tensor:
        return torch.tensor(self, dtype=torch.int64).view(torch.uint8)

    @classmethod
    def unpack(cls, line: Tensor) -> Header:
        return cls(*line.view(torch.int64).tolist())


class _Box:
    """One end of a ring. `count`: lines that went through it in this epoch, on this side."""

    def __init__(self, table: Table, role: int) -> None:
        own, peer = table.peer(table.role).board, table.peer(role).board
        assert own is not None and peer is not None, "rings are between workers of one host"
        host = [r for r, seat in enumerate(table.seats) if seat.host == table.seats[role].host]
        if len(host) > MAX_LOCAL:
            raise ValueError(f"{len(host)} workers on one host; at most {MAX_LOCAL} can send to each other")
        self.table, self.role, self.own, self.peer = table, role, own, peer
        self.my_place, self.peer_place = host.index(table.role), host.index(role)
        self.base = table.epoch << ROUND_BITS
        self.count = 0

    def wait_for_peer(self, word: int, count: int) -> int:
        """The peer's count, once it is at least this."""
        value = wait_for(self.table, self.peer, word, self.base + count) - self.base
        if value >> ROUND_BITS:
            self.table.check()
            raise EpochBroken(self.table.epoch, f"role {self.role} is in a later epoch")
        return value


class Outbox(_Box):
    """The sending end. Messages of several threads take turns."""

    def __init__(self, table: Table, role: int) -> None:
        super().__init__(table, role)
        self._lock = threading.Lock()
        self._ring = self.own.ring(self.peer_place)
        self._sent, self._taken = sent_word(self.peer_place), taken_word(self.my_place)
        store(self.own, self._sent, self.base)

    def send(self, header: Header, data: Tensor) -> None:
        with self._lock, _breaking(self.table):
            self._put(header.pack())
            self._put(data)

    def _put(self, data: Tensor) -> None:
        done = 0
        while done < len(data):
            position = self.count % _RING_LINES * LINE_BYTES
            length = min(CHUNK_BYTES, len(data) - done, RING_BYTES - position)
            lines = -(-length // LINE_BYTES)
            self.table.check()
            if (needed := self.count + lines - _RING_LINES) > 0:
                self.wait_for_peer(self._taken, needed)
            self._ring[position : position + length].copy_(data[done : done + length])
            self.count += lines
            done += length
            store(self.own, self._sent, self.base + self.count)


class Inbox(_Box):
    """The receiving end. One thread at a time empties the ring, for itself and for those who wait meanwhile."""

    def __init__(self, table: Table, role: int) -> None:
        super().__init__(table, role)
        self._aside: defaultdict[tuple[int, int], deque[tuple[int, Tensor]]] = defaultdict(deque)
        self._busy = False
        self._turn = threading.Condition()
        self._ring = self.peer.ring(self.my_place)
        self._sent, self._taken = sent_word(self.my_place), taken_word(self.peer_place)
        store(self.own, self._taken, self.base)

    def receive(self, wanted: Header, out: Tensor) -> None:
        """Raises ValueError when the next message of this tag is another than was wanted; it is gone then."""
        while True:
            with self._turn:
                while self._busy and not self._aside[wanted.communicator, wanted.tag]:
                    self._turn.wait()  # an abort ends this too: it ends the wait of the busy one
                self.table.check()
                if self._aside[wanted.communicator, wanted.tag]:
                    dtype, message = self._aside[wanted.communicator, wanted.tag].popleft()
                    break
                self._busy = True
            if self._take_next(wanted, out):
                return
        came = wanted._replace(num_bytes=len(message), dtype=dtype)
        if came != wanted:
            raise _unwanted(self.role, wanted, came.num_bytes, came.dtype)
        out.copy_(message)

    def _take_next(self, wanted: Header, out: Tensor) -> bool:
        """Straight to where it is wanted, or aside; whether it was the wanted one."""
        try:
            with _breaking(self.table):
                line = torch.empty(LINE_BYTES // 2, dtype=torch.uint8)
                self._take(line)
                header = Header.unpack(line)
                if header == wanted:
                    self._take(out)
                    return True
                message = torch.empty(header.num_bytes, dtype=torch.uint8)
                self._take(message)
                self._aside[header.communicator, header.tag].append((header.dtype, message))
                return False
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def _take(self, out: Tensor) -> None:
        done = 0
        while done < len(out):
            position = self.count % _RING_LINES * LINE_BYTES
            self.table.check()
            there = self.wait_for_peer(self._sent, self.count + 1) - self.count
            length = min(there * LINE_BYTES, len(out) - done, RING_BYTES - position)
            out[done : done + length].copy_(self._ring[position : position + length])
            self.wait_for_peer(self._sent, self.count)  # what we read was of this epoch
            self.count += -(-length // LINE_BYTES)
            done += length
            store(self.own, self._taken, self.base + self.count)


class Mail:
    """All boxes of one epoch, which communicators share."""

    def __init__(self, table: Table) -> None:
        self._table = weakref.proxy(table)
        self._lock = threading.Lock()
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._counts: Counter[tuple[str, int, int, int]] = Counter()

    def outbox(self, role: int) -> Outbox:
        with self._lock:
            if role not in self._outboxes:
                self._outboxes[role] = Outbox(self._table, role)
            return self._outboxes[role]

    def inbox(self, role: int) -> Inbox:
        with self._lock:
            if role not in self._inboxes:
                self._inboxes[role] = Inbox(self._table, role)
            return self._inboxes[role]

    def next(self, way: str, role: int, index: int, tag: int) -> int:
        """Number of the next message over a stream: the tag, and a count of its own."""
        with self._lock:
            self._counts[way, role, index, tag] += 1
            return tag << 32 | self._counts[way, role, index, tag]


_mail: weakref.WeakKeyDictionary[Table, Mail] = weakref.WeakKeyDictionary()
_mail_lock = threading.Lock()


def send(table: Table, index: int, role: int, tag: int, data: Tensor, dtype: torch.dtype) -> None:
    """Returns when the data is on its way, and may be changed."""
    table.check()
    header = Header(index, _checked(tag), len(data), code_of(dtype))
    if table.peer(role).board is not None:
        _mail_of(table).outbox(role).send(header, data)
        return
    number = _mail_of(table).next("to", role, index, tag)
    mark = _MARK.pack(header.dtype, header.num_bytes)
    table.exchange(MAX_COMMUNICATORS + index, number, mark, {role: data.numpy().data}, {})


def recv(table: Table, index: int, role: int, tag: int, out: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError when the next message of this tag has another length or dtype."""
    table.check()
    wanted = Header(index, _checked(tag), len(out), code_of(dtype))
    if table.peer(role).board is not None:
        _mail_of(table).inbox(role).receive(wanted, out)
        return
    number = _mail_of(table).next("from", role, index, tag)
    mark = _MARK.pack(wanted.dtype, wanted.num_bytes)
    came = table.exchange(MAX_COMMUNICATORS + index, number, mark, {}, {role: out.numpy().data})[role]
    if came != mark:
        code, num_bytes = _MARK.unpack(came)
        raise _unwanted(role, wanted, num_bytes, code)


def _mail_of(table: Table) -> Mail:
    with _mail_lock:
        mail = _mail.get(table)
        if mail is None:
            mail = _mail[table] = Mail(table)
        return mail


def _checked(tag: int) -> int:
    if tag not in TAGS:
        raise ValueError(f"tag {tag}: must be from 0 to {TAGS[-1]}")
    return tag


def _unwanted(role: int, wanted: Header, num_bytes: int, code: int) -> ValueError:
    return ValueError(
        f"role {role} sent {num_bytes} bytes of {dtype_of(code)} with tag {wanted.tag}, "
        f"but {wanted.num_bytes} bytes of {dtype_of(wanted.dtype)} were to be received"
    )


@contextmanager
def _breaking(table: Table) -> Iterator[None]:
    """Half a message is none: whatever broke it off, this epoch cannot go on here."""
    try:
        yield
    except BaseException as error:
        table.abort(str(error) or type(error).__name__)
        raise

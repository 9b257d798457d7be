"""Messages over TCP connections between workers: one stream per pair and channel, and the loop that waits for them.

`exchange` sends to and receives from any number of streams at once, so it cannot dead-lock with the other sides, and it
ends with the epoch. All I/O on a stream happens in there; the frames are the business of its halves (`halves.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from everstep.comms.flag import Flag
from everstep.comms.halves import Receiver, Sender, StreamEnded
from everstep.core.errors import EpochBroken

FAREWELL_S = 5.0  # for a side that lives and reads; one that died is known at once, one that hangs costs this once
TICK_S = 0.002
_DROP_BYTES = 64 << 10
_CLOSING = (4, 9, 11)  # states of a connection whose last byte was not acknowledged: FIN_WAIT1, LAST_ACK, CLOSING


class Epoch(Protocol):
    """What a wait has to know of the epoch it began in."""

    epoch: int
    gate: Flag  # raised when it is aborted

    def check(self) -> None:
        """Raise EpochBroken once it was aborted."""

    def abort(self, why: str) -> None: ...


class Connection(socket.socket):
    """A socket that is closed with its last reference, without a word: so nobody ever polls another's descriptor."""

    def __del__(self) -> None:
        self.close()


class Stream:
    """A proven connection to `worker` for one channel. Only `end` closes it, and both sides notice at once."""

    def __init__(self, sock: Connection, worker: str, channel: int) -> None:
        self.worker, self.channel = worker, channel
        self.ended = False
        self._sock = sock
        sock.setblocking(False)
        self.sender, self.receiver = Sender(sock, channel), Receiver(sock, channel)

    def fileno(self) -> int:
        return self._sock.fileno()

    def end(self) -> None:
        """No more from either side. Any thread may call it, and more than once."""
        self.ended = True
        with contextlib.suppress(OSError):  # the other side was faster
            self._sock.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """No more from this side. What was sent stays on its way."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def delivered(self) -> bool:
        """After `finish`: whether the other side has received all that was sent, or never will.

        What still comes is thrown away: closing a connection with something unread in it resets it, and what is on its
        way to the other side is lost.
        """
        try:
            while self._sock.recv(_DROP_BYTES, socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            pass
        except OSError:
            return True
        return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in _CLOSING


async def farewell(streams: Iterable[Stream]) -> None:
    """Send no more on these, and wait until the other sides have what was sent before, for a while at most."""
    waiting = [stream for stream in streams if not stream.ended]
    for stream in waiting:
        stream.finish()
    deadline = time.monotonic() + FAREWELL_S
    while (waiting := [stream for stream in waiting if not stream.delivered()]) and time.monotonic() < deadline:
        # The kernel has no event for an acknowledgement; closing with SO_LINGER waits for it, but in this one thread,
        # one after the other, and not if something came meanwhile.
        await asyncio.sleep(TICK_S)


def exchange(
    table: Epoch,
    number: int,
    mark: bytes,
    sends: Mapping[int, tuple[Stream, memoryview]],
    receives: Mapping[int, tuple[Stream, memoryview]],
) -> dict[int, bytes]:
    """One message to each role of `sends`, one from each of `receives`, all at once; see `Table.exchange`."""
    outs = {role: stream.sender for role, (stream, _) in sends.items()}
    ins = {role: stream.receiver for role, (stream, _) in receives.items()}
    with _held([*outs.values(), *ins.values()]):
        table.check()
        try:
            for role, sender in outs.items():
                sender.begin(table.epoch, number, mark, sends[role][1])
            for role, receiver in ins.items():
                receiver.begin(table.epoch, number, mark, receives[role][1])
            return _drive(table, {role: stream for role, (stream, _) in (*sends.items(), *receives.items())}, outs, ins)
        except BaseException as error:
            # Whatever it is, an interrupt too: a message is missing now, so this epoch cannot go on here.
            table.abort(getattr(error, "why", "") or str(error) or type(error).__name__)
            raise
        finally:
            for sender in outs.values():
                sender.give_up()
            for receiver in ins.values():
                receiver.give_up()


@contextlib.contextmanager
def _held(halves: list[Sender | Receiver]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for half in sorted(halves, key=id):  # in one order everywhere, so that two threads never wait for each other
            stack.enter_context(half.lock)
        yield


def _drive(
    table: Epoch, streams: Mapping[int, Stream], outs: dict[int, Sender], ins: dict[int, Receiver]
) -> dict[int, bytes]:
    """The one loop that waits: for room, for data, and for the end of the epoch."""
    marks: dict[int, bytes] = {}
    outs, ins = dict(outs), dict(ins)
    while True:
        for role in [*outs, *ins]:
            try:
                if role in outs and outs[role].pump():
                    del outs[role]
                if role in ins and (mark := ins[role].pump()) is not None:
                    marks[role] = mark
                    del ins[role]
            except StreamEnded as error:
                table.check()
                raise _lost(table, streams[role], str(error)) from error
        if not outs and not ins:
            return marks
        poll = select.poll()
        poll.register(table.gate, select.POLLIN)
        for role in {**outs, **ins}:
            # Who only sends is not told of an end by POLLOUT while the other side's window is full.
            events = select.POLLIN if role in ins else select.POLLRDHUP
            poll.register(streams[role], events | (select.POLLOUT if role in outs else 0))
        ready = {fd for fd, event in poll.poll() if event & select.POLLRDHUP}
        table.check()
        for role in outs:
            if streams[role].fileno() in ready:
                raise _lost(table, streams[role], "closed")


def _lost(table: Epoch, stream: Stream, why: str) -> EpochBroken:
    stream.end()
    return EpochBroken(table.epoch, f"lost the link to {stream.worker}: {why}")


def over(streams: Iterable[Stream]) -> list[Stream]:
    """Those which one of the sides has ended."""
    poll = select.poll()
    by_number = {stream.fileno(): stream for stream in streams}
    for number in by_number:
        poll.register(number, select.POLLRDHUP)
    return [by_number[number] for number, _ in poll.poll(0)]

"""The two halves of a stream: messages in frames, one way, over a connection which outlives the epochs.

A message is named by (epoch, number), carries a mark of 16 bytes, and travels in frames of a header, a payload and a
trailer byte. A sender that gives a message up in the middle of a frame fills the frame with zeros before whatever it
sends next, and marks it void in the trailer; a receiver drops what is left of a frame nobody wants any more, and whole
frames of older epochs. So both sides find the next message again, whatever broke off, and never take filling for data.

Nothing here waits. A half is for one thread at a time: whoever holds its lock.
"""

from __future__ import annotations

import socket
import struct
import threading

from everstep.core.errors import EpochBroken

FRAME_BYTES = 4 << 20  # at most so much filling after an abort
STAGE_BYTES = 64 << 10  # small messages come with one system call
MARK_BYTES = 16
_HEADER = struct.Struct(f"!QQ{MARK_BYTES}sQIi")  # epoch, number, mark, bytes of the message, of this frame, channel
_SOUND, _VOID = b"\x01", b"\x00"
_FILLING = memoryview(bytes(1 << 20))
_NOTHING = memoryview(b"")


class StreamEnded(ConnectionError):
    """The other side closed the connection, died, or cannot be reached any more."""


class Sender:
    """The half of a stream that sends."""

    def __init__(self, sock: socket.socket, channel: int) -> None:
        self.lock = threading.Lock()
        self._sock, self._channel = sock, channel
        self._name = (0, 0, b"")
        self._message = _NOTHING
        self._fresh = False  # no frame of the message was opened yet
        self._unsent = 0  # bytes of it which are in no frame yet
        self._head = _NOTHING  # what is left of the open frame: its header,
        self._body = _NOTHING  # the payload it was opened for,
        self._filling = 0  # the payload that was given up,
        self._tail = _NOTHING  # the trailer

    def begin(self, epoch: int, number: int, mark: bytes, message: memoryview) -> None:
        self._name, self._message = (epoch, number, mark), message
        self._fresh, self._unsent = True, len(message)

    def give_up(self) -> None:
        """Forget the message; the caller may use its memory again. Harmless when it is out."""
        if self._body:
            self._filling, self._tail = len(self._body), memoryview(_VOID)
        self._body = self._message = _NOTHING
        self._unsent, self._fresh = 0, False

    def pump(self) -> bool:
        """Send what the kernel takes; whether it took all. Raises StreamEnded."""
        while True:
            if not self._tail:
                if not self._fresh and not self._unsent:
                    return True
                self._open_frame()
            filling = _FILLING[: self._filling]
            parts = [self._head, filling, self._body, self._tail if self._filling <= len(filling) else _NOTHING]
            try:
                taken = self._sock.sendmsg(parts, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as error:
                raise StreamEnded(error.strerror) from error
            self._advance(taken, len(filling))

    def _open_frame(self) -> None:
        length = min(self._unsent, FRAME_BYTES)
        total = len(self._message)
        self._head = memoryview(_HEADER.pack(*self._name, total, length, self._channel))
        self._body = self._message[total - self._unsent : total - self._unsent + length]
        self._tail = memoryview(_SOUND)
        self._unsent -= length
        self._fresh = False

    def _advance(self, taken: int, filling: int) -> None:
        step = min(taken, len(self._head))
        self._head, taken = self._head[step:], taken - step
        step = min(taken, filling)
        self._filling, taken = self._filling - step, taken - step
        step = min(taken, len(self._body))
        self._body, taken = self._body[step:], taken - step
        self._tail = self._tail[taken:]


class Receiver:
    """The half of a stream that receives."""

    def __init__(self, sock: socket.socket, channel: int) -> None:
        self.lock = threading.Lock()
        self._sock, self._channel = sock, channel
        self._stage = memoryview(bytearray(STAGE_BYTES))
        self._low = self._high = 0  # what is in the stage and not yet used
        self._epoch = self._number = 0  # what is wanted
        self._mark = b""
        self._wanted: memoryview | None = None
        self._came: bytes | None = None  # mark of the message that came for it
        self._name = (0, 0, b"", 0)  # of the message that is coming in: epoch, number, mark, bytes
        self._missing = 0  # bytes of it that are still to come
        self._target: memoryview | None = None  # where they go; None: nowhere
        self._in_frame, self._due = False, 0  # bytes of the open frame that are still to come
        self._early: dict[tuple[int, int], tuple[bytes, memoryview]] = {}  # messages of this epoch, wanted later

    def begin(self, epoch: int, number: int, mark: bytes, wanted: memoryview) -> None:
        if epoch != self._epoch:
            self._early.clear()
        self._epoch, self._number, self._mark, self._wanted, self._came = epoch, number, mark, wanted, None
        if (early := self._early.pop((epoch, number), None)) is not None:
            self._hand_over(*early)

    def give_up(self) -> None:
        """Forget what was wanted; the caller may use its memory again. Harmless when it has come."""
        if self._target is self._wanted:
            self._target = None
        self._wanted = None

    def pump(self) -> bytes | None:
        """Take what has come; the mark of the wanted message once it is complete, empty for one of another length.

        Raises StreamEnded, and EpochBroken when the other side has left the epoch.
        """
        while self._came is None:
            if not self._in_frame:
                if self._high - self._low >= _HEADER.size:
                    self._open_frame()
                elif not self._fill():
                    return None
            elif self._due:
                if not self._take_payload():
                    return None
            elif self._low < self._high or self._fill():
                self._close_frame()
            else:
                return None
        return self._came

    def _open_frame(self) -> None:
        epoch, number, mark, total, length, channel = _HEADER.unpack_from(self._stage, self._low)
        if epoch > self._epoch:  # left where it is, for whoever asks in that epoch
            raise EpochBroken(self._epoch, f"a member is in epoch {epoch} already")
        assert channel == self._channel and length <= FRAME_BYTES, "not our frames on a proven link"
        self._low += _HEADER.size
        self._in_frame, self._due = True, length
        if not self._missing or self._name != (epoch, number, mark, total):  # not a later frame of the same message
            self._name, self._missing = (epoch, number, mark, total), total
            self._target = self._place()

    def _place(self) -> memoryview | None:
        """Where the message goes that begins now."""
        epoch, number, mark, total = self._name
        if epoch < self._epoch:
            return None
        if number != self._number:
            return memoryview(bytearray(total))
        return self._wanted if self._wanted is not None and self._fits(mark, total) == mark == self._mark else None

    def _fits(self, mark: bytes, total: int) -> bytes:
        """What to tell of a message that came: its mark, but none when only the length is wrong."""
        assert self._wanted is not None
        return b"" if mark == self._mark and total != len(self._wanted) else mark

    def _close_frame(self) -> None:
        epoch, number, mark, total = self._name
        sound = self._stage[self._low] == _SOUND[0]
        self._low += 1
        self._in_frame = False
        if not sound:
            self._missing, self._target = 0, None  # it was given up: its other frames will never come
            if epoch == self._epoch:
                raise EpochBroken(epoch, "a member gave a message up")
        elif not self._missing and epoch == self._epoch:
            target, self._target = self._target, None
            if number != self._number:
                assert target is not None
                self._early[epoch, number] = (mark, target)
            elif self._wanted is not None:
                if target is None or target is self._wanted:
                    self._came = self._fits(mark, total)
                else:  # it began to come before anybody wanted it
                    self._hand_over(mark, target)

    def _hand_over(self, mark: bytes, message: memoryview) -> None:
        assert self._wanted is not None
        self._came = self._fits(mark, len(message))
        if self._came == self._mark:
            self._wanted[:] = message

    def _take_payload(self) -> bool:
        """Some of the payload of the open frame; False when there is none yet."""
        count = min(self._high - self._low, self._due)
        done = self._name[3] - self._missing
        if count:
            if self._target is not None:
                self._target[done : done + count] = self._stage[self._low : self._low + count]
            self._low += count
        else:
            room = self._stage if self._target is None else self._target[done:]
            count = self._receive(room[: self._due])
        self._due -= count
        self._missing -= count
        return count > 0

    def _fill(self) -> bool:
        """More into the stage; False when nothing has come."""
        if self._low:
            rest = self._high - self._low
            self._stage[:rest] = self._stage[self._low : self._high]
            self._low, self._high = 0, rest
        count = self._receive(self._stage[self._high :])
        self._high += count
        return count > 0

    def _receive(self, room: memoryview) -> int:
        """Bytes that came, 0 when none did. Raises StreamEnded."""
        try:
            count = self._sock.recv_into(room, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise StreamEnded(error.strerror) from error
        if not count:
            raise StreamEnded("closed")
        return count

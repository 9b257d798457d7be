"""The job's journal: one JSON object a line, one line an event, appended by the job's one controller.

Each line reaches the kernel in a single write before its event is acted on, so it survives the death of the
controller. A line cut short by that death is set aside when the next controller opens the journal; a line cut short
by a full disk is taken back at once. It is not synced to the device: a job does not outlive its controller's machine.

A file that is full becomes a closed segment (control.segments) and an empty one takes its place, in two steps of which
each leaves a whole journal behind: nothing is copied, and the loop of the controller waits for some 0.1 ms.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from everstep.control.reading import Follower, Reading, ended, inputs, outline, read
from everstep.control.segments import Files, JournalError
from everstep.core.events import AnyEvent, Entry

__all__ = ["SEGMENT_BYTES", "Follower", "Journal", "JournalError", "Reading", "ended", "inputs", "read"]

SEGMENT_BYTES = 16 << 20
TOLD = 8  # times in a segment
TAIL = 1 << 16  # bytes looked at from the end, at a time, for the last whole line
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # what file systems without hard links say


def _nobody(_closed: bool) -> None:
    """Nobody is told that it grows."""


class Journal:
    """The journal open for appending, by this process only. `note` says what could not be as it should: what opening
    had to mend, and why the active file grows beyond its size; empty: nothing."""

    def __init__(self, path: Path, fd: int, job: str, segment_bytes: int, on_grown: Callable[[bool], None]) -> None:
        self.path = path
        self.job = job
        self.note = ""
        self._files = Files(path)
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self._segment_bytes = segment_bytes
        self._full = segment_bytes  # the active file is closed before it grows beyond that
        self._number = 1  # that it gets then
        self._on_grown = on_grown
        self._tell_at = self._size + segment_bytes // TOLD
        self._next = 1
        self._encoder = msgspec.json.Encoder()
        self._line = bytearray()

    @classmethod
    def open(
        cls, path: Path, job: str, segment_bytes: int = SEGMENT_BYTES, on_grown: Callable[[bool], None] = _nobody
    ) -> Self:
        """Create the journal, or continue after its last whole line.

        `on_grown` is called whenever an eighth of a segment was written, with whether one was closed.

        Raises JournalError when another process has it open, or it belongs to another job, or is damaged.
        """
        while True:
            try:
                fd = _create(path)
            except OSError as error:
                raise JournalError(f"cannot open journal {path}: {error.strerror}") from error
            try:
                _lock(path, fd)
                if _is(path, fd):
                    journal = cls(path, fd, job, segment_bytes, on_grown)
                    journal._continue()
                    return journal
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its writer closed this segment, and let go of it: once more

    def append(self, event: AnyEvent, now: float, wall: float, epoch: int) -> Entry:
        """Write one event. When this returns, the death of this process cannot lose it.

        Raises JournalError when there is no room; the journal is then as it was before.
        """
        entry = Entry(self._next, now, wall, self.job, epoch, event)
        line = self._line
        self._encoder.encode_into(entry, line)
        line += b"\n"
        if self._size + len(line) > self._full and self._size:
            self._rotate()
        try:
            self._write(line)
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise self._failed(error, len(line)) from error
        self._size += len(line)
        self._next += 1
        if self._size > self._tell_at:
            closed, self._tell_at = not self._tell_at, self._size + self._segment_bytes // TOLD
            self._on_grown(closed)
        return entry

    @property
    def last(self) -> int:
        """Number of the newest entry."""
        return self._next - 1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _write(self, line: bytearray) -> None:
        rest = line
        while rest:  # once, unless the disk is about to be full: the second write then tells the error
            rest = rest[os.write(self._fd, rest) :]

    def _failed(self, error: OSError, needed: int) -> JournalError:
        if error.errno not in NO_ROOM:
            return JournalError(f"cannot write journal {self.path}: {error.strerror}")
        disk = os.fstatvfs(self._fd)
        return JournalError(
            f"no room for the journal {self.path} ({error.strerror}): {needed} bytes needed, "
            f"{disk.f_bavail * disk.f_frsize} free on its disk; the event was not recorded"
        )

    # Segments -------------------------------------------------------------------------------------------

    def _rotate(self) -> None:
        """Close the active file and begin another one. Where that cannot be, the active one grows, and it is tried
        again later: no reason to lose an event."""
        try:
            fd = self._exchange()
        except OSError as error:
            self._full = self._size + self._segment_bytes // 16
            self.note = f"{self.path} grows beyond {self._segment_bytes} bytes: {error}"
            return
        os.close(self._fd)
        self._fd, self._size, self._full = fd, 0, self._segment_bytes
        self._number += 1
        self._tell_at = 0

    def _exchange(self) -> int:
        """An empty active file, locked like the one before it."""
        fd = _create(self._files.next, os.O_TRUNC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._give_number()
        except BaseException:
            os.close(fd)
            self._files.next.unlink(missing_ok=True)
            raise
        return fd

    def _give_number(self) -> None:
        closed = self._files.closed(self._number)
        try:
            os.link(self.path, closed)
            linked = True
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            os.rename(self.path, closed)
            linked = False
        try:
            os.rename(self._files.next, self.path)
        except OSError:
            closed.unlink() if linked else os.rename(closed, self.path)
            raise

    # Opening --------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Take back half a rotation, set a torn last line aside and number on from the one before."""
        self._number = self._last_closed() + 1
        line, torn = _tail(self._fd, self._size)
        if torn:
            self.note = (
                f"the last line of {self.path} was cut short: {len(torn)} bytes moved to {_keep(self.path, torn)}"
            )
            self._size -= len(torn)
            os.ftruncate(self._fd, self._size)
        if not line and self._number > 1:
            line = _last_line(self._files, self._number - 1)
        if not line:
            return
        try:
            last = outline.decode(line)
        except msgspec.DecodeError as error:
            raise JournalError(f"journal {self.path}: its last line is damaged: {error}") from error
        if last.job != self.job:
            raise JournalError(f"journal {self.path} is of job {last.job}, not {self.job}")
        self._next = last.n + 1

    def _last_closed(self) -> int:
        self._files.next.unlink(missing_ok=True)
        numbers = self._files.numbers()
        last = numbers[-1] if numbers else 0
        if self._files.unfinished(last + 1):
            self._files.closed(last + 1).unlink()
        return last


def _create(path: Path, also: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | also, 0o644)


def _is(path: Path, fd: int) -> bool:
    """This file still has this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _lock(path: Path, fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = _holder(os.fstat(fd).st_ino)
        who = f"process {pid}" if pid else "another process"
        raise JournalError(f"journal {path} is being written by {who}: a job has one controller") from error


def _tail(fd: int, size: int) -> tuple[bytes, bytes]:
    """The last whole line, without its end, and what follows it."""
    start, data = size, b""
    while start and data.count(b"\n") < 2:
        step = min(TAIL, start)
        start -= step
        data = os.pread(fd, step, start) + data
    whole, end, torn = data.rpartition(b"\n")
    return whole.rpartition(b"\n")[2] if end else b"", torn


def _last_line(files: Files, number: int) -> bytes:
    """Of a closed segment. A packed one has to be unpacked for it."""
    opened = files.open(number)
    if opened is None:
        return b""
    with opened.file as file:
        if not opened.packed:
            return _tail(file.fileno(), os.fstat(file.fileno()).st_size)[0]
        try:
            return deque(file, 1).pop()
        except (EOFError, zlib.error, gzip.BadGzipFile, IndexError) as error:
            raise JournalError(f"journal {opened.path} is damaged: {error}") from error


def _keep(path: Path, torn: bytes) -> str:
    """Append torn bytes to the side file; where they went, in words."""
    side = path.with_name(f"{path.name}.torn")
    try:
        with open(side, "ab") as file:
            file.write(torn + b"\n")
    except OSError as error:
        return f"nowhere ({side}: {error.strerror})"
    return str(side)


def _holder(inode: int) -> int:
    """The process that holds a flock on this file; 0 when the kernel does not tell."""
    with open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            fields = line.split()
            if fields[1] == "FLOCK" and fields[-3].rpartition(":")[2] == str(inode):
                return max(0, int(fields[-4]))
    return 0

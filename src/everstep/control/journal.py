"""The job's journal: one JSON object a line, one line an event, appended by the job's one controller.

Each line reaches the kernel in a single write before its event is acted on, so it survives the death of the
controller. A line cut short by that death is set aside when the next controller opens the journal; a line cut short
by a full disk is taken back at once. It is not synced to the device: a job does not outlive its controller's machine.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from everstep.core.errors import EverstepError
from everstep.core.events import AnyEvent, Entry, Event, Input

TAIL = 1 << 16  # bytes looked at from the end, at a time, for the last whole line
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NAMES = frozenset(kind.__name__ for kind in Event.__subclasses__())

_decoder = msgspec.json.Decoder(Entry)


class JournalError(EverstepError):
    """The journal cannot be written, or what it holds is not what was written; the text says which and where."""


class _Tagged(msgspec.Struct):
    type: str


class _Outline(msgspec.Struct):
    """What every version's entries have."""

    n: int
    job: str
    event: _Tagged


_outline = msgspec.json.Decoder(_Outline)


class Journal:
    """The journal open for appending, by this process only. `note` says what opening had to mend; empty: nothing."""

    def __init__(self, path: Path, fd: int, job: str) -> None:
        self.path = path
        self.job = job
        self.note = ""
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self._next = 1
        self._encoder = msgspec.json.Encoder()
        self._line = bytearray()

    @classmethod
    def open(cls, path: Path, job: str) -> Self:
        """Create the journal, or continue after its last whole line.

        Raises JournalError when another process has it open, or it belongs to another job, or is damaged.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JournalError(f"cannot open journal {path}: {error.strerror}") from error
        journal = cls(path, fd, job)
        try:
            journal._lock()
            journal._continue()
        except BaseException:
            os.close(fd)
            raise
        return journal

    def append(self, event: AnyEvent, now: float, wall: float, epoch: int) -> Entry:
        """Write one event. When this returns, the death of this process cannot lose it.

        Raises JournalError when there is no room; the journal is then as it was before.
        """
        entry = Entry(self._next, now, wall, self.job, epoch, event)
        line = self._line
        self._encoder.encode_into(entry, line)
        line += b"\n"
        try:
            self._write(line)
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise self._failed(error, len(line)) from error
        self._size += len(line)
        self._next += 1
        return entry

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

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = _holder(os.fstat(self._fd).st_ino)
            who = f"process {pid}" if pid else "another process"
            raise JournalError(f"journal {self.path} is being written by {who}: a job has one controller") from error
        self._size = os.fstat(self._fd).st_size

    def _continue(self) -> None:
        """Set a torn last line aside and number on from the one before."""
        line, torn = _tail(self._fd, self._size)
        if torn:
            self.note = (
                f"the last line of {self.path} was cut short: {len(torn)} bytes moved to {_keep(self.path, torn)}"
            )
            self._size -= len(torn)
            os.ftruncate(self._fd, self._size)
        if not line:
            return
        try:
            last = _outline.decode(line)
        except msgspec.DecodeError as error:
            raise JournalError(f"journal {self.path}: its last line is damaged: {error}") from error
        if last.job != self.job:
            raise JournalError(f"journal {self.path} is of job {last.job}, not {self.job}")
        self._next = last.n + 1


def _tail(fd: int, size: int) -> tuple[bytes, bytes]:
    """The last whole line, without its end, and what follows it."""
    start, data = size, b""
    while start and data.count(b"\n") < 2:
        step = min(TAIL, start)
        start -= step
        data = os.pread(fd, step, start) + data
    whole, end, torn = data.rpartition(b"\n")
    return whole.rpartition(b"\n")[2] if end else b"", torn


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


def _decode(path: Path, line: bytes, number: int) -> Entry | None:
    """The entry on a whole line; None when its event is of a type this version does not know."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError as error:
        if _is_unknown(line):
            return None
        raise JournalError(f"journal {path}, line {number} is damaged: {error}") from error


def _is_unknown(line: bytes) -> bool:
    try:
        return _outline.decode(line).event.type not in NAMES
    except msgspec.DecodeError:
        return False


class Reading:
    """Iterator over a journal's entries. `unknown` counts lines of event types this version does not know, which
    are skipped; `torn_bytes` is the length of an unfinished last line, ignored (its writer may be at work)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unknown = 0
        self.torn_bytes = 0
        self._entries = self._read()

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def _read(self) -> Iterator[Entry]:
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self.torn_bytes = len(line)
                    return
                entry = _decode(self.path, line, number)
                if entry is None:
                    self.unknown += 1
                else:
                    yield entry


def read(path: Path) -> Reading:
    """All entries of a journal in order, read as they are asked for; it may be written to meanwhile.

    Iteration raises FileNotFoundError without a journal, and JournalError for a damaged line.
    """
    return Reading(path)


def inputs(path: Path) -> Iterator[Entry]:
    """Only the entries a controller replays."""
    return (entry for entry in read(path) if isinstance(entry.event, Input))


class Follower:
    """Reads a growing journal, which need not be there yet; unknown events are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._num_lines = 0

    def new(self) -> list[Entry]:
        """Entries whose lines were finished since the last call. Raises JournalError for a damaged line."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(end)
        first = self._num_lines + 1
        lines = whole.split(b"\n") if end else []
        self._num_lines += len(lines)
        decoded = (_decode(self.path, line, number) for number, line in enumerate(lines, first))
        return [entry for entry in decoded if entry is not None]

"""Reading a journal over its segments: once (`read`), only what a controller replays (`inputs`), or on (`Follower`).

A reader holds no file between two looks. It knows the number of the segment it is in, the place in that, and the last
entry's number; a segment that was packed meanwhile is read on behind that entry.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from everstep.control.segments import PACKED, Files, JournalError, Opened, same_file
from everstep.core.events import Entry, Event, Input, JobEnded

NAMES = frozenset(kind.__name__ for kind in Event.__subclasses__())
CUT_SHORT = (EOFError, zlib.error, OSError)  # of a packed segment: gzip's own error is an OSError

_decoder = msgspec.json.Decoder(Entry)


class _Tagged(msgspec.Struct):
    type: str


class Outline(msgspec.Struct):
    """What every version's entries have."""

    n: int
    t_s: float
    job: str
    event: _Tagged


outline = msgspec.json.Decoder(Outline)


class Place(msgspec.Struct):
    """How far a reader is: behind entry `n`, of segment `number` or of the one before it.

    `offset` and `lines` are in segment `number` as it was written, or in its packed text.
    """

    number: int = 0  # 0: at the begin, wherever that is
    offset: int = 0
    lines: int = 0
    packed: bool = False
    n: int = 0


class Reader:
    """Whole lines of a journal from a place on. With `partial` what is damaged or missing is skipped, and told in
    `damage`; without, it raises JournalError."""

    def __init__(self, path: Path, place: Place | None = None, *, partial: bool = False) -> None:
        self.path = path
        self.place = place or Place()
        self.unknown = 0  # lines of event types that this version does not know
        self.torn_bytes = 0  # of an unfinished last line: its writer may be at work
        self.damage: list[str] = []
        self._files = Files(path)
        self._partial = partial
        self._behind = self.place.n  # entries up to this one are known
        self._joins = bool(self.place.n) and not self.place.offset  # the next line follows the last of another segment

    def entries(self) -> Iterator[Entry]:
        """Those that are there now. Raises FileNotFoundError when no file of the journal is."""
        if self.path.name.endswith(PACKED):
            yield from self._alone()
            return
        if not self.place.number:
            self.place.number = self._first()
        while (opened := self._open()) is not None:
            part, closed = opened
            with part.file:
                yield from self._part(part, closed)
            if not closed:
                return
            self.place = Place(self.place.number + 1, n=self.place.n)
            self._behind, self._joins = self.place.n, True

    def segment(self, number: int) -> Iterator[Entry]:
        """Those of one closed segment, which must be there."""
        part = self._files.open(number)
        if part is None:
            raise FileNotFoundError(f"no segment {number} of journal {self.path}")
        with part.file:
            yield from self._part(part, closed=True)

    def _alone(self) -> Iterator[Entry]:
        """Of a packed segment, without the others."""
        self._behind = self.place.n
        with gzip.open(self.path, "rb") as file:
            self.place.offset = 0
            yield from self._part(Opened(cast(BinaryIO, file), self.path, True), closed=True)

    def _first(self) -> int:
        numbers = self._files.numbers()
        first = numbers[0] if numbers else 1
        if first > 1:
            self._wrong(f"journal {self.path}: what came before segment {first} is missing")
        if not numbers and not self.path.exists():
            raise FileNotFoundError(f"no journal {self.path}")
        return first

    def _open(self) -> tuple[Opened, bool] | None:
        """The segment that the place is in, and whether it is closed.

        The active file is opened first: when no closed segment has this number after that, it is the one.
        """
        active = _opened(self.path)
        closed = self._files.open(self.place.number)
        if closed is not None and (active is None or closed.packed or not same_file(closed.file, active)):
            if active is not None:
                active.close()
            return closed, True
        if closed is not None:  # closed by half
            closed.file.close()
        elif not self.place.offset and (later := self._later()):
            if active is not None:
                active.close()
            first, self.place.number = self.place.number, later
            self._wrong(f"journal {self.path}: segments {first} to {later - 1} are missing")
            return self._open()
        return (Opened(active, self.path, False), False) if active is not None else None

    def _later(self) -> int:
        """The next segment that is there, when the place's own is neither that nor the active file; else 0."""
        numbers, own = self._files.numbers(), self.place.number
        return 0 if own in numbers else next((number for number in numbers if number > own), 0)

    def _part(self, part: Opened, closed: bool) -> Iterator[Entry]:
        try:
            yield from self._lines(part, closed)
        except CUT_SHORT as error:
            if not part.packed:
                raise
            self._wrong(f"journal {part.path} is damaged or cut short behind line {self.place.lines}: {error}")

    def _lines(self, part: Opened, closed: bool) -> Iterator[Entry]:
        place, self.torn_bytes = self.place, 0
        if part.packed != place.packed:
            place.offset, place.lines, place.packed = 0, 0, part.packed
            self._behind = place.n
        if place.offset:
            part.file.seek(place.offset)
        for line in part.file:
            if not line.endswith(b"\n"):
                self._torn(part, line, closed)
                return
            place.offset += len(line)
            place.lines += 1
            entry = self._decode(part.path, line)
            if entry is not None:
                yield entry

    def _torn(self, part: Opened, line: bytes, closed: bool) -> None:
        self.torn_bytes = len(line)
        if closed:
            self._wrong(f"journal {part.path}: its last line is cut short")

    def _decode(self, path: Path, line: bytes) -> Entry | None:
        """The entry on a whole line; None when it is known already, or its event is of a type that we do not know."""
        entry: Entry | None = None
        try:
            entry = _decoder.decode(line)
            n = entry.n
        except msgspec.DecodeError as error:
            n = _unknown(line)
            if not n:
                self._wrong(f"journal {path}, line {self.place.lines} is damaged: {error}")
                return None
        if n <= self._behind:
            return None
        if self._joins:
            self._join(path, n)
        self.place.n = n
        self.unknown += entry is None
        return entry

    def _join(self, path: Path, n: int) -> None:
        """The first and the last entry of a segment are never dropped: what lies between two segments is missing."""
        self._joins, last = False, self.place.n
        if last and n != last + 1:
            self._wrong(f"journal {path}: entries {last + 1} to {n - 1} are missing")

    def _wrong(self, what: str) -> None:
        if not self._partial:
            raise JournalError(what)
        self.damage.append(what)


class Reading(Reader):
    """Iterator over a journal's entries."""

    def __init__(self, path: Path, *, partial: bool = False) -> None:
        super().__init__(path, partial=partial)
        self._entries = self.entries()

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)


def read(path: Path, *, partial: bool = False) -> Reading:
    """All entries of a journal in order, read as they are asked for; it may be written to meanwhile.

    `path` is the active file, or one segment. Iteration raises FileNotFoundError without a journal, and JournalError
    for a damaged line or a missing segment; `partial` reads on behind these.
    """
    return Reading(path, partial=partial)


def inputs(path: Path) -> Iterator[Entry]:
    """Only the entries a controller replays."""
    return (entry for entry in read(path) if isinstance(entry.event, Input))


class Follower(Reader):
    """Reads a growing journal, which need not be there yet; unknown events are skipped."""

    def new(self) -> list[Entry]:
        """Entries whose lines were finished since the last call. Raises JournalError for a damaged line."""
        try:
            return list(self.entries())
        except FileNotFoundError:
            return []


def late(path: Path) -> Place:
    """At the begin of the newest closed segment: what was written just now comes after it, however long it all is."""
    numbers = Files(path).numbers()
    return Place(numbers[-1]) if numbers else Place()


def ended(path: Path) -> JobEnded | None:
    """The job's end, if it has ended. Only the newest two files are read, however long the journal is."""
    reader = Reader(path, late(path), partial=True)
    ends = [entry.event for entry in reader.entries() if isinstance(entry.event, JobEnded)]
    return ends[-1] if ends else None


def _opened(path: Path) -> BinaryIO | None:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        return None


def _unknown(line: bytes) -> int:
    """The number of an entry whose event is of a type that this version does not know; 0: it is no such entry."""
    try:
        found = outline.decode(line)
    except msgspec.DecodeError:
        return 0
    return found.n if found.event.type not in NAMES else 0

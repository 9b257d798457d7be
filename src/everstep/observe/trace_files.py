"""The files in which an agent keeps the trace of one place: what is in them, and which part of it lies in a window.

Records lie in the order in which spans ended, nearly, so a window is found without reading the rest: files are as large
as a job's configuration says, and there are as many as it has workers.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from everstep.core.trace import FOLDER, HEADER_BYTES, OLD, RECORD, SUFFIX, Record, unpack_header
from everstep.observe.clocks import Agent

SLACK_S = 1.0  # threads do not write in the exact order of their ends
MORE = 64  # records behind the window: spans that began in it


class Window(NamedTuple):
    """Seconds since the job's submission; what lies outside is left out."""

    first_s: float = -math.inf
    last_s: float = math.inf

    def holds(self, begin_s: float, end_s: float) -> bool:
        return end_s >= self.first_s and begin_s <= self.last_s


class Span(NamedTuple):
    """A record, and its time since the job's submission."""

    begin_ns: int
    end_ns: int
    record: Record


class TraceFile:
    """One file, as it is now: its writer may be at work. Raises ValueError for what is no trace, and OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        try:
            self.header = unpack_header(self._file.read(HEADER_BYTES))
        except ValueError:
            self.close()
            raise
        self.num_records = (os.fstat(self._file.fileno()).st_size - HEADER_BYTES) // RECORD.size
        self.first, self.end = 0, self.num_records  # what is wanted of it
        self.offset_s = 0.0  # from its node's clock to the job's time

    def close(self) -> None:
        self._file.close()

    def _read(self, first: int, count: int) -> bytes:
        """Not mapped into memory: of a thousand files it would stay there."""
        return os.pread(self._file.fileno(), count * RECORD.size, HEADER_BYTES + first * RECORD.size)

    def record(self, number: int) -> Record:
        return Record(*RECORD.unpack(self._read(number, 1)))

    def ended_s(self, number: int) -> float:
        return self.record(number).end_ns / 1e9 + self.offset_s

    def narrow(self, window: Window) -> None:
        """Want only what may lie in it."""
        numbers = range(self.num_records)
        self.first = bisect.bisect_left(numbers, window.first_s - SLACK_S, key=self.ended_s)
        behind = bisect.bisect_right(numbers, window.last_s, key=self.ended_s)
        self.end = max(self.first, min(self.num_records, behind + MORE))

    @property
    def num_wanted(self) -> int:
        return self.end - self.first

    def spans(self, window: Window) -> Iterable[Span]:
        offset_ns = round(self.offset_s * 1e9)
        for record in map(Record._make, RECORD.iter_unpack(self._read(self.first, self.num_wanted))):
            span = Span(record.begin_ns + offset_ns, record.end_ns + offset_ns, record)
            if span.begin_ns <= span.end_ns and window.holds(span.begin_ns / 1e9, span.end_ns / 1e9):
                yield span


class Place:
    """The files of one place of a node, the older one first."""

    def __init__(self, files: list[TraceFile]) -> None:
        self.files = files
        self.node, self.local_rank = files[-1].header.node, files[-1].header.local_rank
        self.rank = files[-1].header.rank

    @property
    def num_wanted(self) -> int:
        return sum(file.num_wanted for file in self.files)

    def narrow(self, window: Window) -> None:
        for file in self.files:
            file.narrow(window)

    def newest_s(self, count: int) -> float:
        """Since when it has so many of those that are wanted."""
        for file in reversed(self.files):
            if file.num_wanted > count:
                return file.ended_s(file.end - max(1, count)) + SLACK_S
            count -= file.num_wanted
        return -math.inf

    def spans(self, window: Window) -> list[Span]:
        """In the order of their begins, the longer first."""
        found = [span for file in self.files for span in file.spans(window)]
        return sorted(found, key=lambda span: (span.begin_ns, -span.end_ns))


@contextlib.contextmanager
def places(logs: Path) -> Iterator[tuple[list[Place], list[str]]]:
    """Of all nodes whose logs are below this folder, by rank; and what could not be read."""
    found, wrong = [], []
    with contextlib.ExitStack() as stack:
        for path in sorted(logs.glob(f"*/{FOLDER}/*{SUFFIX}")):
            files = []
            for each in (path.with_name(path.name.removesuffix(SUFFIX) + OLD), path):
                try:
                    files += [stack.enter_context(contextlib.closing(TraceFile(each)))] if each.exists() else []
                except (ValueError, OSError) as error:
                    wrong.append(f"{each}: {error}")
            if files:
                found.append(Place(files))
        yield sorted(found, key=lambda place: (place.rank, place.node, place.local_rank)), wrong


def align(found: Iterable[Place], offsets: Mapping[Agent, float]) -> None:
    for place in found:
        for file in place.files:
            file.offset_s = offsets[file.header.node, file.header.incarnation]


def narrow(found: list[Place], window: Window, most: int) -> Window:
    """Places want only what lies in the window; of more than `most` spans only the newest, of all places since the same
    moment. The window that is left."""
    for place in found:
        place.narrow(window)
    if sum(place.num_wanted for place in found) <= most:
        return window
    each = most // len(found)
    begin_s = max(place.newest_s(each) for place in found)
    window = window._replace(first_s=max(window.first_s, begin_s))
    for place in found:
        place.narrow(window)
    return window

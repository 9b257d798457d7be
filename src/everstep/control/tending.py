"""Looks after a journal, in a process of its own that leaves the processor to everybody else.

Run: python -m everstep.control.tending JOURNAL [--replay]

At the end of each segment it keeps what people see of the job then (`.view`) and, with --replay, what a new controller
has to know up to now (`.past`). All segments but the newest closed one, which followers may be in, are compacted and
packed. Each file appears whole or not at all and the old one goes last, so it may die at any moment; whoever tends next
goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gzip
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from everstep.control import marks, replay
from everstep.control.compaction import Line, compact
from everstep.control.marks import Mark, TimeLine
from everstep.control.reading import Place, Reader, outline
from everstep.control.segments import Files, JournalError, Opened
from everstep.core import events as e
from everstep.observe.viewer import Viewer

LEVEL = 6  # of zlib: 9 takes three times as long for 2 % less


def tend(path: Path, *, with_past: bool = False) -> None:
    """Until nothing is left to do. Raises OSError where there is no room, and JournalError for a damaged segment."""
    files = Files(path)
    with _alone(files.lock):
        done: list[int] = []
        news = with_past
        while (numbers := files.numbers()) != done or news:
            news = with_past and keep_past(files)
            keep_views(files, numbers)
            for number in numbers[:-1]:
                pack(files, number)
            done = numbers


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with open(lock, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def keep_views(files: Files, numbers: list[int]) -> None:
    number, mark, viewer = newest_view(files, numbers)
    for number in (each for each in numbers if each > number):
        mark = Mark(mark.line)
        for entry in entries_of(files, number):
            mark.line.see(entry)
            mark.saw(entry.event)
            viewer.add(entry)
        marks.write(files.view(number), mark, viewer.dump())


def newest_view(files: Files, numbers: Iterable[int]) -> tuple[int, Mark, Viewer]:
    """The last of these segments at whose end a view was kept, and that; 0: none was."""
    for number in sorted(numbers, reverse=True):
        mark, viewer = marks.head(files.view(number), Mark), load_view(files.view(number))
        if mark is not None and viewer is not None:
            return number, mark, viewer
    return 0, Mark(TimeLine()), Viewer()


def load_view(path: Path) -> Viewer | None:
    """None: there is none, or one of another version."""
    data = marks.state(path)
    try:
        return Viewer.load(data) if data is not None else None
    except (msgspec.DecodeError, ValueError):
        return None


def keep_past(files: Files) -> bool:
    """Whether something was new. Never in a journal that no controller wrote."""
    found = replay.kept(files) or _begin(files)
    if found is None:
        return False
    place, past = found
    reader, before = Reader(files.path, place), past.n
    for entry in reader.entries():
        past.add(entry)
    if past.n > before:
        replay.keep(files, reader.place, past)
    return past.n > before


def _begin(files: Files) -> tuple[Place, replay.Past] | None:
    """The job is in the first entry."""
    first = next(Reader(files.path).entries(), None)
    if first is None or not isinstance(first.event, e.JobSubmitted):
        return None
    return Place(), replay.Past.of(first.event.spec)


def entries_of(files: Files, number: int) -> Iterator[e.Entry]:
    """Of one closed segment."""
    return Reader(files.path).segment(number)


def pack(files: Files, number: int) -> None:
    """The compacted, compressed copy takes the segment's place. The same lines give the same bytes."""
    opened = files.open(number)
    if opened is None or opened.packed:
        if opened is not None:
            opened.file.close()
        return
    draft = files.packed(number).with_name(f"{files.packed(number).name}.tmp")
    try:
        with opened.file, open(draft, "wb") as file:
            with gzip.GzipFile("", "wb", LEVEL, file, mtime=0) as packed:
                for line in compact(_lines(opened)):
                    packed.write(line.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, files.packed(number))
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    files.closed(number).unlink()


def _lines(opened: Opened) -> Iterator[Line]:
    for number, data in enumerate(opened.file, 1):
        try:
            found = outline.decode(data)
        except msgspec.DecodeError as error:
            raise JournalError(f"journal {opened.path}, line {number} is damaged: {error}") from error
        yield Line(found.event.type, found.t_s, data)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tends the closed segments of a journal; controllers start it.")
    parser.add_argument("journal", type=Path)
    parser.add_argument("--replay", action="store_true", help="keep what a new controller has to know, too")
    arguments = parser.parse_args()
    os.nice(19)
    replay.fingerprint()  # of what is loaded: it may be another one later
    try:
        tend(arguments.journal, with_past=arguments.replay)
    except (OSError, JournalError) as error:
        print(f"everstep: the journal {arguments.journal} stays as it is: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

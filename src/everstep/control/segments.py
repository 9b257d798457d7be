"""The files of a journal: the active one that is appended to, and closed segments, which hold what came before.

Of `journal.jsonl` the closed ones are `journal-000001.jsonl`, `journal-000002.jsonl`, ..., as they were written, or
`journal-000001.jsonl.gz`: compacted and compressed (control.tending). Beside them, `journal-000001.view` is what people
see of the job at that segment's end, and `journal.past` what a new controller has to know, up to some entry.

A segment is closed by a link: for a moment it has two names, that of the active file too. Whoever dies then leaves it
so; it counts as active, and the next controller takes the second name back.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from everstep.core.errors import EverstepError

PACKED = ".gz"


class JournalError(EverstepError):
    """The journal cannot be written, or what it holds is not what was written; the text says which and where."""


class Opened(NamedTuple):
    """A closed segment, open for reading. `packed`: its lines are not at the places where they were written."""

    file: BinaryIO
    path: Path
    packed: bool


class Files:
    """Names beside `path`, the active file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.next = path.with_name(f"{path.name}.next")  # becomes the active file
        self.past = path.with_name(f"{path.stem}.past")
        self.lock = path.with_name(f"{path.name}.tending")
        self._pattern = re.compile(re.escape(path.stem) + r"-(\d{6,})" + re.escape(path.suffix) + r"(\.gz)?")

    def closed(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}-{number:06d}{self.path.suffix}")

    def packed(self, number: int) -> Path:
        return self.path.with_name(self.closed(number).name + PACKED)

    def view(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}-{number:06d}.view")

    def numbers(self) -> list[int]:
        """Of the closed segments, ascending. Raises FileNotFoundError without the folder."""
        names = (self._pattern.fullmatch(name) for name in os.listdir(self.path.parent))
        found = sorted({int(match[1]) for match in names if match})
        if found and self.unfinished(found[-1]):
            found.pop()
        return found

    def size(self) -> int:
        """Bytes on disk, of all segments as they are now."""
        size = 0
        for path in (self.path, *(path for n in self.numbers() for path in (self.closed(n), self.packed(n)))):
            with contextlib.suppress(FileNotFoundError):
                size += path.stat().st_size
        return size

    def unfinished(self, number: int) -> bool:
        """It is still the active file too."""
        try:
            return os.path.samefile(self.closed(number), self.path)
        except FileNotFoundError:
            return False

    def open(self, number: int) -> Opened | None:
        """A closed segment; None: there is none of this number."""
        for path, packed in ((self.closed(number), False), (self.packed(number), True)):
            try:  # in this order: the packed one is there before the other one goes
                file = gzip.open(path, "rb") if packed else open(path, "rb")  # noqa: SIM115 - the caller's
            except FileNotFoundError:
                continue
            return Opened(cast(BinaryIO, file), path, packed)
        return None


def same_file(one: BinaryIO, other: BinaryIO) -> bool:
    return os.path.sameopenfile(one.fileno(), other.fileno())

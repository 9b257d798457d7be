"""What is kept beside a journal about everything up to some entry: a line of JSON that tells where it belongs, then
the packed state of a fold. A file appears whole or not at all.

`Mark` heads the files that people's views begin with (`.view`), `PastMark` that of a new controller (`.past`).
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from everstep.control.reading import Place
from everstep.core import events as e

T = TypeVar("T", bound=msgspec.Struct)

CLOCK_JUMP_S = 5.0  # a new controller whose monotonic clock differs by more from wall time runs on another clock


class TimeLine(msgspec.Struct):
    """Controllers' clocks to seconds since the job's submission, over all lives of the controller."""

    began_s: float = 0.0
    offset_s: float = 0.0
    last_t_s: float = 0.0
    last_wall_s: float = 0.0
    n: int = 0  # of the last entry; 0: none was seen
    at_s: float = 0.0  # when the newest was: it does not go back

    def see(self, entry: e.Entry) -> float:
        """The entry's time."""
        if not self.n:
            self.began_s = entry.t_s
        elif isinstance(entry.event, e.ControllerStarted):
            self._align(entry)
        self.last_t_s, self.last_wall_s, self.n = entry.t_s, entry.wall_s, entry.n
        self.at_s = max(self.at_s, entry.t_s + self.offset_s - self.began_s)
        return self.at_s

    def _align(self, entry: e.Entry) -> None:
        apart = entry.t_s - self.last_t_s
        wall = entry.wall_s - self.last_wall_s
        if apart < 0 or (wall >= 0 and abs(apart - wall) > CLOCK_JUMP_S):
            self.offset_s += self.last_t_s + max(0.0, wall) - entry.t_s


class Mark(msgspec.Struct):
    """`opened`: incidents of this segment, as prefix -> first and last number."""

    line: TimeLine
    opened: dict[str, tuple[int, int]] = {}

    def saw(self, event: e.AnyEvent) -> None:
        if isinstance(event, e.IncidentOpened):
            prefix, number = parts(event.incident)
            first, last = self.opened.get(prefix, (number, number))
            self.opened[prefix] = (min(first, number), max(last, number))

    def has(self, incident: str) -> bool:
        prefix, number = parts(incident)
        first, last = self.opened.get(prefix, (0, -1))
        return first <= number <= last


class PastMark(msgspec.Struct):
    """`place`: behind what it knows. `code` made the state: another version may make another one, and begins anew."""

    place: Place
    code: str


def parts(incident: str) -> tuple[str, int]:
    """Prefix and number of an incident's name."""
    match = re.fullmatch(r"(.*?)(\d*)", incident)
    assert match is not None
    return match[1], int(match[2] or 0)


def write(path: Path, mark: msgspec.Struct, state: bytes) -> None:
    """Raises OSError; what was there before is then still there."""
    replace_with(path, msgspec.json.encode(mark) + b"\n" + zlib.compress(state))


def replace_with(path: Path, data: bytes) -> None:
    draft = path.with_name(f"{path.name}.tmp")
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def head(path: Path, kind: type[T]) -> T | None:
    """None: there is none, or none that can be read."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.readline(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def state(path: Path) -> bytes | None:
    """What was packed; None: there is none, or it is damaged."""
    try:
        with open(path, "rb") as file:
            file.readline()
            return zlib.decompress(file.read())
    except (FileNotFoundError, zlib.error):
        return None

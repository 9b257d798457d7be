"""Spot traces: which nodes came and went when. Texts are read by whoever runs the simulation.

Two forms: `milliseconds,add|remove,node` a line, and `date, time, count` a line (the number of nodes there were).
"""

from __future__ import annotations

from typing import NamedTuple

from everstep.core.errors import UsageError


class Change(NamedTuple):
    at_s: float
    came: bool
    node: str


def read(text: str, unit_s: float = 0.001, origin: str = "the trace") -> list[Change]:
    """In order of time. Raises UsageError for a line of neither form."""
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and "-" in lines[0].split(",")[0]:
        return _counts(lines, origin)
    changes = []
    for number, line in enumerate(lines, 1):
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 3 or parts[1] not in ("add", "remove") or not parts[0].isdigit():
            raise UsageError(f"{origin}, line {number}: expected TIME,add|remove,NODE")
        changes.append(Change(int(parts[0]) * unit_s, parts[1] == "add", parts[2]))
    return sorted(changes, key=lambda change: change.at_s)


def _counts(lines: list[str], origin: str) -> list[Change]:
    """The newest nodes are the first to go: only how many there were is known."""
    changes: list[Change] = []
    here: list[str] = []
    begin_s, made = None, 0
    for number, line in enumerate(lines, 1):
        at_s, count = _counted(line, f"{origin}, line {number}")
        begin_s = at_s if begin_s is None else begin_s
        while len(here) < count:
            made += 1
            here.append(f"node{made}")
            changes.append(Change(at_s - begin_s, True, here[-1]))
        while len(here) > count:
            changes.append(Change(at_s - begin_s, False, here.pop()))
    return changes


def _counted(line: str, where: str) -> tuple[float, int]:
    try:
        date, time, count = (part.strip() for part in line.split(","))
        year, month, day = map(int, date.split("-"))
        hours, minutes, seconds = map(int, time.split(":"))
        return days(year, month, day) * 86400.0 + hours * 3600 + minutes * 60 + seconds, int(count)
    except ValueError as error:
        raise UsageError(f"{where}: expected YEAR-MONTH-DAY, HOUR:MINUTE:SECOND, COUNT") from error


def days(year: int, month: int, day: int) -> int:
    """Days since the first of March of the year 0: the calendar without a clock."""
    year -= month <= 2
    return 365 * year + year // 4 - year // 100 + year // 400 + (153 * ((month + 9) % 12) + 2) // 5 + day - 1

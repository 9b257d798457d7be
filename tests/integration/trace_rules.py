"""The rules of the JSON trace format, as Chrome and Perfetto read it: what they would drop, or complain of.

From the format's public description ("Trace Event Format") and what Perfetto's importer wants: slices of one track lie
in each other or apart, numbers are numbers, every process and track that is used has a name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

Event = Mapping[str, Any]
NEEDED = {
    "X": ("pid", "tid", "ts", "dur", "name"),
    "i": ("pid", "tid", "ts", "name", "s"),
    "C": ("pid", "ts", "name", "args"),
    "M": ("pid", "name", "args"),
}


def check(trace: Mapping[str, Any]) -> None:
    """Asserts them of a whole trace."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[int, int | None]] = set()
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        _check_event(event)
        track = event["pid"], event.get("tid")
        if event["ph"] == "M":
            named.add(track)
        elif event["ph"] == "X":
            slices[track].append((event["ts"], event["ts"] + event["dur"]))
        assert event["ph"] == "M" or track in named or event["ph"] == "C", f"no name before {event}"
    assert all((pid, None) in named for pid, _ in named)
    threads = [thread for _, thread in named if thread is not None]
    assert len(threads) == len({*threads}), "a thread's number means one thread in all processes"
    assert not {pid for pid, _ in named} & {*threads}, "a process's number is that of its first thread"
    for track, found in slices.items():
        check_nested(found, str(track))


def _check_event(event: Event) -> None:
    missing = [key for key in NEEDED[event["ph"]] if key not in event]
    assert not missing, f"no {missing} in {event}"
    for key in ("pid", "tid"):
        assert isinstance(event.get(key, 0), int)
    for key in ("ts", "dur"):
        number = event.get(key, 0)
        assert isinstance(number, int | float) and math.isfinite(number), event
    assert event.get("dur", 0) >= 0, event
    assert event["ph"] != "C" or all(isinstance(value, int | float) for value in event["args"].values())


def check_nested(slices: Iterable[tuple[float, float]], where: str, slack: float = 0.002) -> None:
    """`slack`: microseconds that a sum of two rounded numbers may be off."""
    open_: list[float] = []
    for begin, end in sorted(slices, key=lambda each: (each[0], -each[1])):
        while open_ and open_[-1] <= begin + slack:
            open_.pop()
        assert not open_ or end <= open_[-1] + slack, f"track {where}: {begin} to {end} reaches over {open_[-1]}"
        open_.append(end)

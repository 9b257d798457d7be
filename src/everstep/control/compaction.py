"""What a closed segment can do without: ticks, which tell that a job goes on as it did.

Nothing else is dropped, above all no input: a replay gives the same. Of each kind of tick one in EVERY_S stays; all do
within NEAR_S of what changes the job, and always the last one before such a change and the first one after it. The two
ends of a segment count as changes: so nothing next to them goes, and a missing segment is noticed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

EVERY_S = 10.0
NEAR_S = 30.0
RARE_S = {"LoadSeen": 7200.0}  # long ones, of which fewer stay, and none for the ends of a segment

TICKS = frozenset(("StepsSeen", "MetricsSeen", "WorkersSeen", "LoadSeen"))
# These change nothing: they come and go while all is well.
ROUTINE = frozenset(("NodeReported", "SaveRequested", "SaveDurable", "CostLearned", "Ticked"))


class Line(msgspec.Struct):
    """One line of the segment: the type of its event, when, and its bytes."""

    kind: str
    t_s: float
    data: bytes
    keep: bool = True


def compact(lines: Iterable[Line]) -> Iterator[Line]:
    """Those that stay, in their order."""
    fold, last = _Compaction(), None
    for last in lines:
        yield from fold.add(last)
    if last is not None:
        yield from fold.end(last)


class _Compaction:
    """Lines wait until it is known whether a change comes near to them."""

    def __init__(self) -> None:
        self._waiting: deque[Line] = deque()
        self._newest: dict[str, Line] = {}  # ticks: the last one of each kind before whatever comes next
        self._kept_s: dict[str, float] = {}  # when the last one that stays anyway was, if there is one since a change
        self._near_until_s = math.nan

    def add(self, line: Line) -> Iterator[Line]:
        if line.kind in TICKS:
            line.keep = self._stays(line)
            self._newest[line.kind] = line
        elif line.kind not in ROUTINE:
            self._changed(line.t_s)
        self._waiting.append(line)
        return self._leave(line.t_s)

    def end(self, last: Line) -> Iterator[Line]:
        self._changed(last.t_s, ends=True)
        return (line for line in self._waiting if line.keep)

    def _stays(self, tick: Line) -> bool:
        if math.isnan(self._near_until_s):  # it begins the segment
            self._changed(tick.t_s, ends=True)
        kept_s = self._kept_s.get(tick.kind, -math.inf)
        if tick.t_s <= self._near_until_s or not 0 <= tick.t_s - kept_s < RARE_S.get(tick.kind, EVERY_S):
            self._kept_s[tick.kind] = tick.t_s
            return True
        return False

    def _changed(self, now: float, ends: bool = False) -> None:
        for line in self._waiting:
            line.keep = line.keep or line.t_s >= now - NEAR_S
        for kind, line in self._newest.items():
            line.keep = line.keep or not ends or kind not in RARE_S
        self._kept_s = {kind: kept_s for kind, kept_s in self._kept_s.items() if ends and kind in RARE_S}
        self._near_until_s = now + NEAR_S

    def _leave(self, now: float) -> Iterator[Line]:
        """A tick may go once another of its kind came; so as many wait as come between two of the rarest kind."""
        waiting = self._waiting
        while waiting and (waiting[0].t_s < now - NEAR_S or waiting[0].t_s > now):
            if not waiting[0].keep and self._newest.get(waiting[0].kind) is waiting[0]:
                return
            line = waiting.popleft()
            if line.keep:
                yield line

"""One time line for a job: seconds since its submission, whatever clock something was told by.

The controller's clock may change when a controller is started anew. A node tells the time of its own monotonic clock in
each report; the entry's time is a moment later on the controller's. The report that came quickest says how the two
clocks stand to each other, up to the time that a message takes; clocks drift, so the quickest of each hour counts.
Nodes of one machine have one clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.core import events as e
from everstep.core.trace import Header

CLOCK_JUMP_S = 5.0  # a new controller whose monotonic clock differs by more from wall time runs on another clock
HOUR_S = 3600.0

Agent = tuple[str, str]  # node, incarnation


class Timeline:
    """Of the controller's entries, in order."""

    def __init__(self) -> None:
        self.submitted_wall_s = 0.0
        self.now_s = 0.0  # of the newest entry
        self._offset_s: float | None = None
        self._last: e.Entry | None = None

    def at(self, entry: e.Entry) -> float:
        """When this entry was made, in seconds since the job's submission."""
        if self._offset_s is None:
            self._offset_s, self.submitted_wall_s = -entry.t_s, entry.wall_s
        elif isinstance(entry.event, e.ControllerStarted) and self._last is not None:
            wall_s, apart_s = entry.wall_s - self._last.wall_s, entry.t_s - self._last.t_s
            if apart_s < 0 or (wall_s >= 0 and abs(apart_s - wall_s) > CLOCK_JUMP_S):
                self._offset_s += self._last.t_s + max(0.0, wall_s) - entry.t_s
        self._last = entry
        at_s = entry.t_s + self._offset_s
        self.now_s = max(self.now_s, at_s)
        return at_s

    def moment(self, t_s: float) -> float:
        """Of the present controller's clock."""
        return t_s + (self._offset_s or 0.0)


class Clocks:
    """What to add to a node's clock, in seconds, to have the job's time."""

    def __init__(self) -> None:
        self._quickest: dict[Agent, dict[int, float]] = {}  # by hour of the node's clock

    def add(self, report: e.NodeReported, at_s: float) -> None:
        told = report.report
        hours = self._quickest.setdefault((told.node, told.incarnation), {})
        hour, offset_s = int(told.sent_s // HOUR_S), at_s - told.sent_s
        hours[hour] = min(offset_s, hours.get(hour, offset_s))

    def offsets(self, headers: Iterable[Header], submitted_wall_s: float) -> dict[Agent, float]:
        """Of the agents that wrote these files, as far as possible at the time when they did.

        One that the journal does not know is placed by its wall clock.
        """
        found: dict[Agent, float] = {}
        boots: dict[str, float] = {}
        headers = list(headers)
        for header in headers:
            hours = self._quickest.get((header.node, header.incarnation))
            if hours:
                hour = header.mono_ns / 1e9 / HOUR_S
                offset_s = hours[min(hours, key=lambda known: abs(known + 0.5 - hour))]
                boots[header.boot] = min(offset_s, boots.get(header.boot, offset_s))
        for header in headers:
            by_wall_s = header.wall_ns / 1e9 - submitted_wall_s - header.mono_ns / 1e9
            found[header.node, header.incarnation] = boots.get(header.boot, by_wall_s)
        return found

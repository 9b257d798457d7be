"""A job's past at any moment: views kept at the ends of segments, and the entries between them.

Whatever the length of the journal, at most one segment is read for an answer, and memory does not grow with it. Where
views are missing (they are made behind the job's back) it is read on from the last one before. Damage is skipped. Not
for several threads at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from everstep.control import marks
from everstep.control.marks import Mark, TimeLine
from everstep.control.reading import Follower, Place
from everstep.control.segments import Files
from everstep.control.tending import load_view, newest_view
from everstep.core.events import Entry
from everstep.observe.view import IncidentView, View
from everstep.observe.viewer import Viewer

EVERY = 4096  # entries between views kept in memory, of the parts that somebody looks at
KEPT = 32
LATE_S = 600.0  # what is told of an incident later than this after its end is not looked for


class Stand(msgspec.Struct):
    """Where to begin: behind these entries, with the view of the segment `number` or the one in `state`."""

    line: TimeLine = msgspec.field(default_factory=TimeLine)
    place: Place = msgspec.field(default_factory=Place)
    number: int = 0
    state: bytes | None = None


class _Player:
    """Reads on from a stand. An entry that is too early to give waits in `_held`."""

    def __init__(self, path: Path, stand: Stand, viewer: Viewer) -> None:
        self.viewer = viewer
        self.line = msgspec.structs.replace(stand.line)
        self.follower = Follower(path, msgspec.structs.replace(stand.place), partial=True)
        self.given_s, self.given_n = stand.line.at_s, stand.line.n  # the last one
        self._coming = self.follower.entries()
        self._held: tuple[float, Entry] | None = None

    def until(self, at_s: float) -> Iterator[Entry]:
        """Entries up to a moment."""
        while (found := self._next()) is not None:
            if found[0] > at_s:
                self._held = found
                return
            self.given_s, self.given_n = found[0], found[1].n
            yield found[1]

    def stand(self) -> Stand:
        """Behind the entry that it has just given."""
        assert self._held is None
        line, place = msgspec.structs.replace(self.line), msgspec.structs.replace(self.follower.place)
        return Stand(line, place, state=self.viewer.dump())

    def _next(self) -> tuple[float, Entry] | None:
        held, self._held = self._held, None
        entry = next(self._coming, None) if held is None else None
        if held is None and entry is None:
            self._coming = self.follower.entries()  # what was written meanwhile
            entry = next(self._coming, None)
        return (self.line.see(entry), entry) if entry is not None else held


class History:
    """Of a run folder or a journal file. Raises FileNotFoundError without a journal."""

    def __init__(self, where: Path) -> None:
        self.path = where / "journal.jsonl" if where.is_dir() else where
        self._files = Files(self.path)
        self._kept: deque[Stand] = deque(maxlen=KEPT)
        self._marks: dict[int, Mark] = {}
        self._player: _Player | None = None
        self._tip: _Player | None = None  # it is asked for the time of the last entry only

    def newest(self) -> tuple[Viewer, Follower]:
        """What is to be seen now, and what gives the entries that come."""
        number, mark, viewer = newest_view(self._files, self._files.numbers())
        follower = Follower(self.path, Place(number + 1, n=mark.line.n) if number else None, partial=True)
        for entry in follower.entries():
            viewer.add(entry)
        return viewer, follower

    @property
    def span_s(self) -> float:
        """From the job's submission to the newest entry."""
        if self._tip is None:
            self._tip = _Player(self.path, next(iter(self._stands(math.inf))), Viewer())
        for _ in self._tip.until(math.inf):
            pass
        return self._tip.given_s

    def at(self, at_s: float) -> View:
        """What was to be seen then; after the newest entry: with that."""
        at_s = min(at_s, self.span_s)
        player = self._seek(at_s)
        for count, entry in enumerate(player.until(at_s), 1):
            player.viewer.add(entry)
            if not count % EVERY:
                self._kept.append(player.stand())
        seen = Viewer.load(player.viewer.dump())  # time passes in this one only
        seen.until(at_s)
        return seen.view

    def events(self, first_s: float, last_s: float) -> Iterator[Entry]:
        """Entries between two moments."""
        player = _Player(self.path, next(self._stands(math.nextafter(first_s, -math.inf))), Viewer())
        for entry in player.until(last_s):
            if player.given_s >= first_s:
                yield entry

    def incident(self, incident: str) -> IncidentView | None:
        """One of any age, with all that is known of it; None: there was none of this name."""
        player = self._begin(self._before(incident))
        found, until_s = None, math.inf
        for entry in player.until(math.inf):
            player.viewer.add(entry)
            if getattr(entry.event, "incident", "") == incident:
                found = _incident(player.viewer, incident) or found
                if found is not None and found.outcome:
                    until_s = min(until_s, player.given_s + LATE_S)
            if player.given_s > until_s:
                break
        return _incident(player.viewer, incident) or found

    # Where to begin -------------------------------------------------------------------------------------

    def _seek(self, at_s: float) -> _Player:
        """The player goes on, unless a view is nearer to that moment."""
        player = self._player
        if player is None or player.given_s > at_s or player.given_n < next(self._stands(at_s)).line.n:
            self._player = player = self._begin(self._stands(at_s))
        return player

    def _begin(self, stands: Iterable[Stand]) -> _Player:
        """At the first of these whose view can be had: one of another version cannot."""
        for stand in stands:
            if stand.state is not None:
                return _Player(self.path, stand, Viewer.load(stand.state))
            viewer = load_view(self._files.view(stand.number)) if stand.number else Viewer()
            if viewer is not None:
                return _Player(self.path, stand, viewer)
        raise AssertionError("the last one is the journal's begin")

    def _stands(self, at_s: float) -> Iterator[Stand]:
        """Not after that moment, the latest one first; last, the journal's begin."""
        stands = [*self._kept, *(self._stand(number) for number in self._numbers())]
        yield from sorted((s for s in stands if s.line.at_s <= at_s), key=lambda s: s.line.n, reverse=True)
        yield Stand()

    def _before(self, incident: str) -> Iterator[Stand]:
        """Before the segment in which it was opened."""
        numbers = self._numbers()
        place = next((k for k, number in enumerate(numbers) if self._mark(number).has(incident)), len(numbers))
        yield from (self._stand(number) for number in reversed(numbers[:place]))
        yield Stand()

    def _stand(self, number: int) -> Stand:
        line = self._mark(number).line
        return Stand(line, Place(number + 1, n=line.n), number)

    def _numbers(self) -> list[int]:
        """Segments at whose end a view is kept."""
        return [number for number in self._files.numbers() if self._mark(number).line.n]

    def _mark(self, number: int) -> Mark:
        known = self._marks.get(number)
        if known is None:
            known = marks.head(self._files.view(number), Mark) or Mark(TimeLine())
            if known.line.n:
                self._marks[number] = known
        return known


def _incident(viewer: Viewer, name: str) -> IncidentView | None:
    return next((each for each in reversed(viewer.view.incidents) if each.id == name), None)

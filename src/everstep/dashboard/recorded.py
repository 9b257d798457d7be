"""Views at any moment of a run by folding its whole journal, and moving on from there while moments get later."""

from __future__ import annotations

from pathlib import Path

from everstep.control.journal import Follower, read
from everstep.core.events import Entry
from everstep.observe.view import IncidentView, View
from everstep.observe.viewer import Viewer


class History:
    def __init__(self, run: Path) -> None:
        self._path = run / "journal.jsonl" if run.is_dir() else run
        self._at_s = -1.0
        self._viewer = Viewer()
        self._entries: list[Entry] = []
        self._next = 0

    def newest(self) -> tuple[Viewer, Follower]:
        return Viewer(), Follower(self._path)

    def at(self, at_s: float) -> View:
        self._entries = self._entries or list(read(self._path))
        if at_s < self._at_s:
            self._viewer, self._next = Viewer(), 0
        self._at_s = at_s
        begin_s = self._entries[0].t_s if self._entries else 0.0
        while self._next < len(self._entries) and self._entries[self._next].t_s - begin_s <= at_s:
            self._viewer.add(self._entries[self._next])
            self._next += 1
        return self._viewer.view

    def incident(self, name: str) -> IncidentView | None:
        found = [incident for incident in self.at(1e18).incidents if incident.id == name]
        return found[-1] if found else None

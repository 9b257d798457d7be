"""The progress of `everstep run`: a row that stays at the bottom of a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from everstep.cli.statusline import StatusLine
from everstep.control.voice import Voice
from everstep.core.events import Entry
from everstep.observe.progress import line
from everstep.observe.view import View
from everstep.observe.viewer import Viewer

PLAIN_S = 10.0  # between two plain lines
ROW_S = 0.5  # between two looks of the row
DEFECTS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


class Progress:
    """Folds the journal that its owner reads. A defect in it costs the job its progress line, and nothing else."""

    def __init__(self, say: Callable[[str], None], with_row: bool = True) -> None:
        self.say = say
        self.with_row = with_row
        self.viewer: Viewer | None = Viewer()
        self.row = StatusLine(2, _emit)
        self.said_s = self.drawn_s = time.monotonic()
        self.said_step = -1

    def add(self, entries: list[Entry]) -> None:
        if self.viewer is None:
            return
        try:
            for entry in entries:
                self.viewer.add(entry)
        except DEFECTS as error:  # the launcher minds the job's processes: nothing that is only shown may end it
            self.viewer = None
            self.row.close()
            self.say(f"internal error, please report it: no progress from here on: {error!r}")

    @property
    def view(self) -> View | None:
        return self.viewer.view if self.viewer is not None else None

    def show(self) -> None:
        """What there is to tell, if it is time."""
        now, view = time.monotonic(), self.view
        if view is None or not view.submitted_wall_s or view.ended:
            return
        if now - self.drawn_s >= ROW_S:
            self.drawn_s = now
            if self.with_row and self.row.show(lambda columns: line(view, columns)):
                self.said_s = now
                return
        if now - self.said_s >= PLAIN_S and view.step > self.said_step and self.row.size is None:
            self.said_s, self.said_step = now, view.step
            self.say(line(view))

    def close(self) -> None:
        self.row.close()


def _emit(text: str) -> None:
    if isinstance(sys.stderr, Voice):
        sys.stderr.draw(text)
    else:
        sys.stderr.write(text)
        sys.stderr.flush()

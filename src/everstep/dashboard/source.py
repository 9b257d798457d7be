"""Where views come from: one fold that follows the journal, and another that goes to moments of the past.

Both do file work and folding, so each has a thread of its own, and no two calls at a time (`Desk`). What leaves the
thread is bytes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import msgspec

from everstep.control.history import History
from everstep.control.reading import Follower
from everstep.control.segments import Files
from everstep.observe.metrics import prometheus_text
from everstep.observe.view import View
from everstep.observe.viewer import Viewer

P = ParamSpec("P")
T = TypeVar("T")

LOOK_S = 5.0  # whether the launcher lives is looked at this often
FIELDS = View.__struct_fields__

_encode = msgspec.json.Encoder().encode


class Frame(msgspec.Struct, frozen=True):
    """One view, encoded field by field. `over`: nothing will come any more."""

    fields: dict[str, bytes]
    over: bool

    def encoded(self) -> bytes:
        return whole(self.fields)


class Facts(msgspec.Struct, frozen=True):
    """What of the newest view other parts need to know."""

    job: str
    mode: str  # live, recorded or simulated
    span_s: float
    trouble: str


class Source:
    """The newest view of one run. `lives`: whether its launcher does (None: who can tell?); without it, all is over."""

    def __init__(self, run: Path, lives: Callable[[], bool | None] | None = None) -> None:
        self._run, self._lives = run, lives
        self._viewer, self._follower = Viewer(), cast(Follower | None, None)
        self._looked_s = time.monotonic()
        self._measured_s = -math.inf
        self._gone = lives is None
        self._moment: tuple[float, float] | None = None  # the job's time at its newest entry, and when that was read
        self._first = True
        self.trouble = ""  # with the journal, for people
        self.shown: Callable[[View], None] | None = None  # is told each newest view, on the thread that makes it

    def follow(self) -> int:
        """Take in what the journal has got; how many entries. What is damaged is told, and what follows it is shown."""
        count, trouble = 0, ""
        try:
            if self._follower is None:
                self._viewer, self._follower = History(self._run).newest()
                count = self._viewer.view.entries
            for entry in self._follower.entries():
                self._viewer.add(entry)
                count += 1
        except FileNotFoundError:  # a launcher is here before its controller's first word
            return 0
        except OSError as error:
            trouble = str(error)
        self.trouble = trouble or self._damage()
        if count:
            self._moment = None
            self._measure()
        return count

    def _damage(self) -> str:
        if self._follower is None:
            return ""
        if self._follower.damage:
            return self._follower.damage[-1]
        unknown = self._follower.unknown
        return f"{unknown} of its events are of types that this version of Everstep does not know" if unknown else ""

    def _measure(self) -> None:
        """How large the journal is: seldom, it may have a thousand segments."""
        now = time.monotonic()
        if now >= self._measured_s + LOOK_S:
            self._measured_s = now
            self._viewer.view.offset = Files(History(self._run).path).size()

    def idle(self) -> int:
        """As `follow`, while no page is open."""
        count = self.follow()
        if self.shown is not None:
            self._present()
        return count

    def view(self) -> View:
        """As of now."""
        self.follow()
        return self._present()

    def _present(self) -> View:
        view = self._viewer.view
        if not self._over(view):
            self._viewer.until(self._now_s(view))
            view = self._viewer.view
        if self.shown is not None and view.entries:
            self.shown(view)
        return view

    def frame(self) -> Frame:
        view = self.view()
        return Frame({name: _encode(getattr(view, name)) for name in FIELDS}, self._over(view))

    def metrics(self) -> bytes:
        """The view as Prometheus reads it. Raises ImportError without its client library."""
        return prometheus_text(self.view())

    def facts(self) -> Facts:
        view = self.view()
        mode = "simulated" if view.simulated else "recorded" if self._over(view) else "live"
        return Facts(view.job, mode, view.now_s, self.trouble)

    def incident(self, name: str) -> bytes | None:
        """One that the newest view has."""
        found = [incident for incident in self.view().incidents if incident.id == name]
        return _encode(found[-1]) if found else None

    def _over(self, view: View) -> bool:
        now = time.monotonic()
        if self._lives is not None and not self._gone and now >= self._looked_s + LOOK_S:
            self._looked_s, self._gone = now, self._lives() is False
        return view.ended or self._gone

    def _now_s(self, view: View) -> float:
        """The job's time: that of its newest entry, and what has passed since that was read.

        So it is never ahead of an entry to come, and the clock of another host does not matter; only at first it is
        asked how long ago the newest entry was.
        """
        now = time.monotonic()
        if self._moment is None:
            ago_s = time.time() - view.submitted_wall_s if self._first and view.submitted_wall_s else 0.0
            self._moment, self._first = (max(view.now_s, ago_s), now), False
        then_s, read_s = self._moment
        return then_s + now - read_s


class Past:
    """Views of earlier moments, and incidents that the newest view keeps no more."""

    def __init__(self, run: Path) -> None:
        self._history = History(run)

    def view(self, at_s: float) -> bytes:
        return _encode(self._history.at(at_s))

    def incident(self, name: str) -> bytes | None:
        found = self._history.incident(name)
        return None if found is None else _encode(found)


class Desk:
    """A thread that calls are handed to, one after the other."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))


def whole(fields: dict[str, bytes]) -> bytes:
    """One JSON object of encoded fields."""
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), data) for name, data in fields.items()) + b"}"

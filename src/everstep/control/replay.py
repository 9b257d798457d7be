"""A job's state from its journal: what a new controller begins with.

Inputs are in the journal before they are acted on, so the last one's records may be missing: its controller died in
between. The machine is deterministic, so they are made again.

A journal of weeks takes hours to replay, so `Past` is kept every few megabytes (control.tending), and a controller
begins with that. It is a left fold: as what is read back equals what was written (tests/control/test_replay.py shows
it over schedules), so does all that follows. Another version of the code, or another job, begins at the begin.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from everstep.control import lifecycle, marks
from everstep.control.job import Job, Note
from everstep.control.reading import Place, Reader
from everstep.control.recovery import Recovery
from everstep.control.segments import Files, JournalError
from everstep.core import events as e
from everstep.core.types import JobSpec
from everstep.detect import fallback
from everstep.plan.costs import Accounts

FOLDERS = ("core", "control", "detect", "plan")  # whose code makes the state


class Replayed(msgspec.Struct, frozen=True):
    """`term`: lives of the controller so far. `missing`: records that the last life owed the journal."""

    job: Job
    term: int
    missing: tuple[e.Record, ...]


class Past(msgspec.Struct):
    """What a controller knows of those before it, up to entry `n`."""

    spec: JobSpec
    job: Job
    n: int = 0
    term: int = 0
    owed: list[e.Record] = []  # of the last input: not in the journal yet
    recovery: Recovery = msgspec.field(default_factory=Recovery)
    accounts: Accounts = msgspec.field(default_factory=Accounts)
    counted: fallback.Counted = fallback.Counted()
    watched: list[e.Entry] = []  # that those adopt who watch for what is slow, or out of line
    watching: set[str] = set()  # incidents of theirs that are open

    @classmethod
    def of(cls, spec: JobSpec) -> Past:
        return cls(spec, Job(spec))

    def add(self, entry: e.Entry) -> None:
        event = entry.event
        if not self.n and entry.n != 1:
            raise JournalError(f"the journal of {entry.job} begins with entry {entry.n}: those before it are missing")
        self.n = entry.n
        self.recovery.saw(event, entry.t_s)
        self.accounts.saw(event, entry.t_s)
        if isinstance(event, e.StepsSeen):
            self.counted, _ = fallback.compare(self.counted, event, loads=1)
        self._watch(entry)
        if isinstance(event, e.Input):
            self.job, commands = lifecycle.step(self.job, event, entry.t_s)
            self.owed = [command.record for command in commands if isinstance(command, Note)]
        elif event in self.owed:
            self.owed.remove(event)
        if isinstance(event, e.ControllerStarted):
            self.term = event.term

    def _watch(self, entry: e.Entry) -> None:
        match entry.event:
            case e.IncidentOpened(incident, kind) if kind in e.WATCHED:
                self.watching.add(incident)
            case e.AnomalyJudged(incident):
                self.watching.add(incident)
            case e.IncidentClosed(incident) if incident in self.watching:
                self.watching.discard(incident)
            case _:
                return
        self.watched.append(entry)


def replay(spec: JobSpec, entries: Iterable[e.Entry]) -> Replayed:
    past = Past.of(spec)
    for entry in entries:
        past.add(entry)
    return Replayed(past.job, past.term, tuple(past.owed))


def past_of(path: Path, spec: JobSpec, last: int) -> Past:
    """All that the journal tells up to its entry `last`, from the kept state on. Raises JournalError."""
    files = Files(path)
    found = kept(files)
    if found is None or found[1].spec != spec or found[1].n > last:  # a machine that went down took the end with it
        files.past.unlink(missing_ok=True)
        found = Place(), Past.of(spec)
    place, past = found
    for entry in Reader(path, place).entries():
        past.add(entry)
    return past


def kept(files: Files) -> tuple[Place, Past] | None:
    """What was kept last, and where it is to be read on; None: nothing, or nothing of use for this code."""
    mark, data = marks.head(files.past, marks.PastMark), marks.state(files.past)
    if mark is None or data is None or mark.code != fingerprint():
        return None
    try:
        return mark.place, msgspec.msgpack.decode(data, type=Past)
    except msgspec.DecodeError:
        return None


def keep(files: Files, place: Place, past: Past) -> None:
    """Raises OSError."""
    marks.write(files.past, marks.PastMark(place, fingerprint()), msgspec.msgpack.encode(past))


@functools.cache
def fingerprint() -> str:
    """Of the code that makes the state, as it was on disk when this was first asked."""
    digest = hashlib.sha256(msgspec.__version__.encode())
    root = Path(__file__).parent.parent
    for path in sorted(path for folder in FOLDERS for path in (root / folder).glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()

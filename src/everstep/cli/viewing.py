"""What the commands that show a job read: its run folder, or its journal alone, as a `View`.

It is a fold over the journal, so a job that runs, one that is over and a simulated one are read alike.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep.cli import presence
from everstep.control.history import History
from everstep.control.reading import Follower, Reader, read
from everstep.control.segments import Files, JournalError
from everstep.core.config import RunConfig
from everstep.core.errors import UsageError
from everstep.observe.summary import Summary, brief, summarize
from everstep.observe.units import Price
from everstep.observe.view import IncidentView, View
from everstep.observe.viewer import Viewer

JOURNAL = "journal.jsonl"
TOLD = 3  # places of damage
GONE = "the job ended without a word: its launcher is gone"


def journal_of(run: Path) -> Path:
    """RUN is a run folder or a journal. Raises UsageError when it is neither."""
    path = run / JOURNAL if run.is_dir() else run
    if not path.is_file() and not (run.is_dir() and Files(path).numbers()):  # packed parts of one may be all there is
        raise UsageError(f"no journal in {run}: give the run folder that `everstep run` printed, or a journal")
    return path


def newest(run: Path, again: bool = False) -> tuple[Viewer, Follower]:
    """The job as far as its journal goes, and what follows it from there. Little is read, however long it is."""
    path = journal_of(run)
    with readable(path):
        viewer, follower = History(path).newest()
    if not again:
        tell_damage(follower, viewer.view.entries > 0)
    return viewer, follower


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """What the system refuses is said in a line."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error


def tell_damage(reader: Reader, some: bool) -> None:
    """On standard error: what could not be read. Raises JournalError unless `some` was."""
    told = reader.damage[:TOLD]
    if len(reader.damage) > TOLD:
        told.append(f"and {len(reader.damage) - TOLD} more places are damaged")
    if reader.unknown:
        told.append(f"{reader.unknown} of its events are of types that this version of Everstep does not know")
    if told and not some:
        raise JournalError("; ".join([f"nothing in {reader.path} can be read", *told]))
    for what in told:
        print(f"everstep: note: {what}", file=sys.stderr)


def summary_of(run: Path, again: bool = False) -> tuple[Summary, float]:
    """The job in short, and the wall time of its newest entry (0: it has none). Of a journal that outgrew its first
    file it is what the view keeps. `again`: what is damaged was said."""
    path = journal_of(run)
    if is_long(path):
        viewer, _ = newest(run, again)
        return brief(viewer.view), viewer.last_wall_s
    last_wall_s = 0.0
    entries = []
    with readable(path):
        reading = read(path, partial=True)
        for entry in reading:
            entries.append(entry)
            last_wall_s = entry.wall_s
    if not again:
        tell_damage(reading, bool(entries))
    return summarize(entries), last_wall_s


def is_long(journal: Path) -> bool:
    """It has closed segments."""
    return bool(Files(journal).numbers())


def lives(run: Path) -> bool | None:
    """Whether the job's launcher lives: then time passes without entries too. None: this machine cannot tell."""
    address = presence.read(run) if run.is_dir() else None
    return presence.launcher_lives(run, address) if address is not None else None


def now_of(view: View) -> float:
    """The present, on the view's time line."""
    return max(view.now_s, time.time() - view.submitted_wall_s)


def view_of(run: Path) -> View:
    """As it is now."""
    viewer, _ = newest(run)
    return passed(run, viewer)


def passed(run: Path, viewer: Viewer) -> View:
    """While its launcher lives, time passes for the job though nothing is written."""
    if not viewer.view.ended:
        alive = lives(run)
        if alive:
            viewer.until(now_of(viewer.view))
        elif alive is False:
            print(f"everstep: note: {GONE}", file=sys.stderr)
    return viewer.view


def incident_of(run: Path, view: View, name: str) -> IncidentView:
    """By its id, in any case of letters; also one that the View no longer keeps. Raises UsageError without it."""
    wanted = name.upper()
    found = next((incident for incident in view.incidents if incident.id.upper() == wanted), None)
    if found is None or not found.timeline:  # dropped, or kept in outline only
        found = _older(run, {name, wanted, name.lower()}) or found
    if found is None:
        ids = [incident.id for incident in view.incidents]
        shown = ", ".join(ids if len(ids) <= 12 else [*ids[:4], "...", *ids[-4:]])
        raise UsageError(f"no incident {name} in {run}; " + (f"there are: {shown}" if ids else "there was none"))
    return found


def _older(run: Path, names: set[str]) -> IncidentView | None:
    history = History(journal_of(run))
    return next((found for found in map(history.incident, sorted(names)) if found is not None), None)


def price_of(folder: Path, price: float | None, currency: str | None) -> Price:
    """What the command line says, then the job's configuration."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=RunConfig).report
    except (OSError, msgspec.DecodeError):  # a simulated job, a journal alone, or another version's
        config = RunConfig().report
    if price is not None and not 0 <= price < 1e9:
        raise UsageError(f"--price {price}: expected what an accelerator costs in an hour, as in --price 2.50")
    return Price(config.price if price is None else price, currency or config.currency)

"""Which checkpoints stay, and how the others go: the newest k and a sparse series, one deleter at a time.

Before a step's files go its marker goes, and only then are the leases looked at: a reader claims first and looks for
the marker afterwards, so one of the two always sees the other. A deleter which dies halfway leaves a step without the
marker, which the next one removes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec

from everstep.state.claims import Claim, bury, claim, living
from everstep.state.layout import COMPLETE, LATEST, TEMPORARY, step_of
from everstep.state.store import Store

if TYPE_CHECKING:
    from everstep.state.disk import Scan

DELETING, READING, WRITING = "deleting", "reading", "writing"


class Retention(msgspec.Struct, frozen=True):
    """newest: so many complete ones stay, at least one. every: so do steps which this divides; 0: no such series."""

    newest: int = 2
    every: int = 0

    def __post_init__(self) -> None:
        if self.newest < 1 or self.every < 0:
            raise ValueError(
                f"at least the newest checkpoint is kept, and every n-th: not {self.newest} and {self.every}"
            )

    def keeps(self, steps: Collection[int]) -> set[int]:
        ordered = sorted(steps, reverse=True)
        return {*ordered[: self.newest], *(step for step in ordered if self.every and step % self.every == 0)}


class Pruned(msgspec.Struct, frozen=True):
    """Folders. `leased`: would have gone, but are being read. `busy`: who else is deleting, then nothing was done."""

    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    leased: tuple[str, ...] = ()
    busy: str = ""


def prune(
    store: Store, scan: Callable[[], Scan], retention: Retention, *, keep: int | None = None, dry_run: bool = False
) -> Pruned:
    """keep: a step which stays in any case."""
    if dry_run:
        return _prune(store, scan(), retention, keep, None)
    with claim(store, DELETING) as mine:
        for owner in mine.others().values():
            return Pruned(busy=str(owner))
        return _prune(store, scan(), retention, keep, mine)


def _prune(store: Store, scan: Scan, retention: Retention, keep: int | None, mine: Claim | None) -> Pruned:
    """Without a claim: only say what would go."""
    kept = _kept(scan, retention, keep)
    removed: list[str] = []
    leased: list[str] = []
    for step in reversed(scan.complete):
        if step.folder not in kept:
            gone = _unread(store, step.folder) if mine is None else _remove(store, step.folder)
            (removed if gone else leased).append(step.folder)
            if mine is not None:
                mine.renew()
    removed += _leftovers(store, scan, None) if mine is None else sweep(store, scan)
    return Pruned(tuple(removed), tuple(kept), tuple(leased))


def _kept(scan: Scan, retention: Retention, keep: int | None) -> list[str]:
    """Of several saves of one step the newest is the one that counts."""
    newest: dict[int, str] = {}
    for step in scan.complete:
        newest.setdefault(step.manifest.step, step.folder)
    keeps = retention.keeps(newest) | {step for step in newest if step == keep}
    return [newest[step] for step in sorted(keeps, reverse=True)]


def _unread(store: Store, folder: str) -> bool:
    return not living(store, f"{READING}.{folder}")


def _remove(store: Store, folder: str) -> bool:
    """False when somebody reads it."""
    path = f"{folder}/{COMPLETE}"
    if not _unread(store, folder):
        return False
    marker = store.get(path)
    store.remove(path)
    if not _unread(store, folder):
        store.put(path, marker)
        return False
    store.remove_folder(folder)
    return True


def sweep(store: Store, scan: Scan, older_than: int | None = None) -> tuple[str, ...]:
    """Remove what dead processes left: claims, unfinished steps older than a complete one (or than this), stray files.

    Needs no claim: it never touches what is complete. The folders that went.
    """
    bury(store)
    gone = _leftovers(store, scan, older_than)
    for folder in gone:
        store.remove_folder(folder)
    strays = [name for name in store.sizes("") if name.startswith(LATEST + TEMPORARY)]
    for step in scan.complete:
        strays += [f"{step.folder}/{name}" for name in store.sizes(step.folder) if TEMPORARY in name]
    if strays and not living(store, WRITING):  # half a file of a process that was killed in completing a step
        for path in strays:
            store.remove(path)
    return tuple(gone)


def _leftovers(store: Store, scan: Scan, older_than: int | None) -> list[str]:
    limit = max([step.manifest.step for step in scan.complete] + [older_than or 0])
    old = [folder for folder in scan.unfinished if (step_of(folder) or 0) < limit]
    return [folder for folder in old if _unread(store, folder) and not living(store, f"{WRITING}.{folder}")]

"""The files of a report: written at the end of each run and by `everstep report`, never seen half."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from everstep.observe.report import encode, make
from everstep.observe.report_page import page
from everstep.observe.units import Price
from everstep.observe.view import IncidentView, View

HTML = "report.html"
EXCERPT_BYTES = 6 << 10  # of a file's end
EXCERPTS = 24  # files that are quoted


def write(view: View, folder: Path, target: Path, price: Price) -> list[str]:
    """Both files; what they say first, in sentences. `folder`: of the run. Raises OSError, which names the file."""
    told = make(view, price)
    beside = target.absolute().parent == folder.absolute()
    _replace(target, page(told, view, dict(_excerpts(view, folder)), beside).encode())
    _replace(target.with_suffix(".json"), encode(told))
    return [told.headline, *told.story]


def _replace(path: Path, data: bytes) -> None:
    """Nobody reads half of it, and a full disk is left no fuller."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_bytes(data)
        new.replace(path)
    except OSError as error:
        error.filename = str(path)  # that of the write is not told
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def _excerpts(view: View, folder: Path) -> Iterator[tuple[str, str]]:
    """The file of each incident that tells most, its end only: a report that was sent away says it too."""
    names = [name for name in (_telling(incident) for incident in reversed(view.incidents)) if name]
    for name in names[:EXCERPTS]:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            continue
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - EXCERPT_BYTES))
                yield name, file.read().decode("utf-8", "replace")
        except OSError:  # moved or removed since: its name is in the report all the same
            continue


def _telling(incident: IncidentView) -> str:
    """The culprit's stacks of a hang or a slow worker, its log otherwise."""
    suffix = "stacks.txt" if incident.kind in ("hang", "slow") else "log.txt"
    rank = incident.culprits[0].rank if incident.culprits else -1
    fitting = [name for name in incident.files if name.endswith(suffix)]
    return next((name for name in fitting if name.endswith(f"rank{rank}-{suffix}")), fitting[0] if fitting else "")

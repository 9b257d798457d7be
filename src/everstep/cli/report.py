"""`everstep report [RUN]`: report.html and report.json, which tell what became of a job and what it cost.

Run: everstep report everstep_runs/latest --price 2.50
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from everstep.cli.asking import LATEST
from everstep.cli.fold import folded
from everstep.cli.viewing import price_of, view_of
from everstep.core.errors import UsageError
from everstep.observe.report import encode, make
from everstep.observe.report_page import page
from everstep.observe.units import Price
from everstep.observe.view import IncidentView, View

HTML, JSON = "report.html", "report.json"
EXCERPT_BYTES = 6 << 10  # of a file's end
EXCERPTS = 24  # files that are quoted


def report(
    run: Path = LATEST, *, out: Path | None = None, price: float | None = None, currency: str | None = None
) -> int:
    """Write what became of a job: report.html (one file that needs nothing else) and report.json.

    Args:
        run: its run folder or a journal (default: the newest run below ./everstep_runs).
        out: a folder, or the name of the HTML file (default: into the run folder).
        price: of an accelerator for an hour; then the report tells money too.
        currency: of the price.
    """
    view = view_of(run)
    folder = run if run.is_dir() else run.absolute().parent
    target = out or folder
    if target.suffix != ".html":
        target = target / HTML
    try:
        lines = write(view, folder, target, price_of(folder, price, currency))
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from error
    print(folded("\n".join([*lines, f"report: {target}, {target.with_suffix('.json')}"]), 4))
    return 0


def write(view: View, folder: Path, target: Path, price: Price) -> list[str]:
    """Both files; what they say first, in sentences. `folder`: of the run. Raises OSError."""
    told = make(view, price)
    beside = target.absolute().parent == folder.absolute()
    _replace(target, page(told, view, dict(_excerpts(view, folder)), beside).encode())
    _replace(target.with_suffix(".json"), encode(told))
    return [told.headline, *told.story]


def _replace(path: Path, data: bytes) -> None:
    """Nobody reads half of it."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


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

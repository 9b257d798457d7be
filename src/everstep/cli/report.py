"""`everstep report [RUN]`: report.html and report.json, which tell what became of a job and what it cost.

Run: everstep report everstep_runs/latest --price 2.50
"""

from __future__ import annotations

from pathlib import Path

from everstep.cli.asking import LATEST
from everstep.cli.fold import folded
from everstep.cli.report_files import HTML, write
from everstep.cli.viewing import price_of, view_of
from everstep.core.errors import UsageError


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
        raise UsageError(f"{error.filename}: cannot be written: {error.strerror}") from error
    print(folded("\n".join([*lines, f"report: {target}, {target.with_suffix('.json')}"]), 4))
    return 0

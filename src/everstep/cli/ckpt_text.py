"""How `everstep ckpt` tells things: tables, sizes, times, JSON, and a bar for what takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from everstep.state.disk import Step

PIPE_COLUMNS = 250  # where nobody looks, nothing is cut


def row(step: Step, read: Collection[str]) -> dict[str, Any]:
    """A complete checkpoint in `ls`."""
    m = step.manifest
    return {
        "folder": step.folder, "step": m.step, "epoch": m.epoch, "job": m.job, "written_s": m.written_s,
        "num_bytes": m.num_bytes, "num_shards": m.num_shards, "num_tensors": m.num_tensors,
        "state": "being read" if step.folder in read else "complete",
    }  # fmt: skip


def cells(entry: Mapping[str, Any]) -> list[str]:
    """Of one line of `ls`."""
    if "step" not in entry:
        why = f": {entry['why']}" if "why" in entry else ""
        return [entry["folder"], "", "", "", "", "", f"{entry['state']}{why}"]
    return [
        str(entry["step"]), when(entry["written_s"]), size(entry["num_bytes"]), str(entry["num_shards"]),
        str(entry["num_tensors"]), entry["job"], entry["state"],
    ]  # fmt: skip


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(*columns, box=None, pad_edge=False, show_header=True)
    for cells in rows:
        made.add_row(*(Text(cell) for cell in cells))  # names may hold what rich takes for markup
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(made)


def as_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())


def size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def when(wall_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))


@contextmanager
def progress(what: str, num_bytes: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while somebody looks; `num_bytes`: when it is full, None when that is not known."""
    if quiet or not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=num_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)

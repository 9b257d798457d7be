"""Where a session's metrics go: the console, a file, trackers.

The file has one JSON line a step, also when steps are done again, by this process or by another one. What a member
that went back, or a run that goes on from a checkpoint, finds there of later steps was never kept: those lines move to
a second file beside it, `NAME.redone`, and the steps are written anew (FAULTS E15).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Takes what the first member logs of a step, counted from 1. `integrations.trackers` has some."""

    def write(self, step: int, values: dict[str, float], epoch: int = 0) -> None:
        """Several calls for one step add up; with another `epoch` the step was done again, as with a lower step."""

    def close(self) -> None:
        """The session is over."""


Where = str | Path | Sink | Sequence[str | Path | Sink] | None


def metrics_of(where: Where) -> Sink:
    """A path: a file there; None: the console; of several all get everything."""
    if where is None:
        return MetricsPrinted()
    if isinstance(where, (str, Path)):
        return MetricsFile(where)
    return _All([metrics_of(each) for each in where]) if isinstance(where, Sequence) else where


class _All:
    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def write(self, step: int, values: dict[str, float], epoch: int = 0) -> None:
        for sink in self._sinks:
            sink.write(step, values, epoch)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class MetricsFile:
    """One process's view of it; only the first member writes. Every method raises OSError."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.redone = self._path.with_name(self._path.name + ".redone")
        self._last = (0, 0)  # step and epoch of our last line
        self._end = -1  # the file's size behind it: another one if somebody else has written since

    def write(self, step: int, values: dict[str, float], epoch: int = 0) -> None:
        """Append what was seen at the end of this step, counted from 1; several lines of one step and epoch stay."""
        last, its_epoch = self._last
        if step < last or (step == last and epoch != its_epoch) or self._size() != self._end:
            self._drop_from(step)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
        self._last, self._end = (step, epoch), self._size()

    def close(self) -> None:
        """Each line is in the file already."""

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def _drop_from(self, step: int) -> None:
        """Move lines of this step and later ones away; and half a line, of a process that was killed."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return
        kept = [line for line in lines if line.endswith("\n") and _step(line) < step]
        if len(kept) == len(lines):
            return
        void = [line.rstrip("\n") + "\n" for line in lines if not (line.endswith("\n") and _step(line) < step)]
        with self.redone.open("a", encoding="utf-8") as file:
            file.writelines(void)
        temporary = self._path.with_name(f"{self._path.name}.tmp-{os.getpid()}")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self._path)


class MetricsPrinted:
    """For a person at the console."""

    def write(self, step: int, values: dict[str, float], epoch: int = 0) -> None:
        print(f"step {step}  {'  '.join(f'{name} {value:.6g}' for name, value in values.items())}", flush=True)

    def close(self) -> None:
        """Each line is printed already."""


def _step(line: str) -> float:
    """A line which is not ours counts as of step 0, and stays."""
    try:
        found: Any = json.loads(line)
        return float(found["step"])
    except (ValueError, TypeError, KeyError):
        return 0

"""What the user says about saves: where to, how often, how many copies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Saving:
    """How a session keeps its state, in the memory of nodes and on disk.

    where: a folder that all nodes see, or a URL of fsspec (s3://bucket/run); None: memory only. every, memory_every:
    steps from one save to the next; None: as often as `overhead` permits, 0: never. overhead: the part of the step time
    that saves may cost, for each of the two. copies: nodes which have each part of the state in memory. keep: newest
    checkpoints that stay on disk. series: those of every so many steps stay too; 0: none.
    """

    where: str | Path | None = None
    every: int | None = None
    memory_every: int | None = None
    overhead: float = 0.01
    copies: int = 2
    keep: int = 3
    series: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that mean nothing."""
        for name in ("every", "memory_every"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} = {value}: a number of steps, 0 for never, None for as often as it is cheap")
        if not 0 < self.overhead <= 1:
            raise ValueError(f"overhead = {self.overhead}: a part of the step time, as 0.01")
        if self.copies < 1 or self.keep < 1 or self.series < 0:
            raise ValueError("copies and keep are at least 1, series at least 0")


def saving_of(checkpoints: str | Path | Saving | None) -> Saving:
    """Of what `session(checkpoints=...)` takes."""
    return checkpoints if isinstance(checkpoints, Saving) else Saving(where=checkpoints)

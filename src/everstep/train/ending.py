"""Where a script's loop over steps ends: at the number it was given, or where it is left by `break` or the like."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Aims(Protocol):
    """The engine's words."""

    @property
    def committed(self) -> int: ...
    def aim(self, num_steps: int) -> None: ...


@contextlib.contextmanager
def in_loop(engine: Aims) -> Iterator[None]:
    """Around the yield of a step. Left there, the loop ends with the steps made so far: with all members, the job."""
    try:
        yield
    except GeneratorExit:
        engine.aim(engine.committed)
        raise

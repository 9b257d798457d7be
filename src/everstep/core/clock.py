"""Time as an argument: the brain never asks the machine for the time, it is told."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """`now()` is monotonic seconds; `wall()` seconds since 1970, for people only."""

    def now(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """CLOCK_MONOTONIC: shared by all processes of a machine, never set back."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

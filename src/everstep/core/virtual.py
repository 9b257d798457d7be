"""A clock that nobody waits for: events in order of time, and time jumps from one to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Act = Callable[..., None]


class VirtualClock:
    """Implements `core.clock.Clock`. Events of the same moment happen in the order they were planned."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self.now_s = start_s
        self.happened = 0
        self._planned: list[tuple[float, int, Act, tuple[object, ...]]] = []
        self._count = 0

    def now(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s

    def at(self, when_s: float, act: Act, *args: object) -> None:
        self._count += 1
        heapq.heappush(self._planned, (when_s, self._count, act, args))

    def after(self, delay_s: float, act: Act, *args: object) -> None:
        self.at(self.now_s + delay_s, act, *args)

    def step(self, until_s: float) -> bool:
        """Let the next event happen, unless it lies beyond `until_s`; then only time passes."""
        if not self._planned or self._planned[0][0] > until_s:
            self.now_s = max(self.now_s, until_s)
            return False
        when_s, _, act, args = heapq.heappop(self._planned)
        self.now_s = max(self.now_s, when_s)
        self.happened += 1
        act(*args)
        return True

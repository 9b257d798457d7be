"""What the dashboard's process says on standard error: few lines, however many requests are refused."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

EVERY_S = 1.0
OFTEN = 100  # lines; from then on a line a minute does
SELDOM_S = 60.0
MOST_CHARS = 500


class Notes(logging.Handler):
    """Says at most one line a second and counts the others. As a handler it takes what the web server logs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._said = 0
        self._unsaid = 0
        self._due_s = clock()

    def say(self, text: str) -> None:
        """One line, whatever is in it: some of it comes from strangers."""
        self._print("".join(char if char.isprintable() else "?" for char in text[:MOST_CHARS]))

    def _print(self, text: str) -> None:
        now = self._clock()
        if now < self._due_s:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more)" if self._unsaid else ""
        print(f"everstep: dashboard: {text}{more}", file=sys.stderr, flush=True)
        self._said, self._unsaid = self._said + 1, 0
        self._due_s = now + (EVERY_S if self._said < OFTEN else SELDOM_S)

    def emit(self, record: logging.LogRecord) -> None:
        self._print(self.format(record))

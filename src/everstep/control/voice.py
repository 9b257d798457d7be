"""What our own processes say on a console that may be blocked, full, closed or gone: no job ends because of it.

`everstep run ... | head -1`, a terminal that was closed and a full disk make every write to standard error fail, and a
terminal that is held with Ctrl-S makes it wait. Training must not notice either.
"""

from __future__ import annotations

import io
import os
import sys

from everstep.control.output import Console

PATIENCE_S = 2.0  # at the end, for a console that is slow


class Voice(io.TextIOBase):
    """A text stream in the place of sys.stderr: hands whole lines to a Console, which never blocks and never fails."""

    def __init__(self, console: Console, fd: int) -> None:
        self._console = console
        self._fd = fd
        self._line = ""

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        lines, end, rest = (self._line + text).rpartition("\n")
        self._line = rest
        if end:
            self._console.write(self._fd, (lines + end).encode("utf-8", "backslashreplace"), lines.count("\n") + 1)
        return len(text)

    def draw(self, text: str) -> None:
        """Something for a terminal that is no line; left out while the console is behind."""
        self._console.write(self._fd, text.encode("utf-8", "replace"), 0)


def speak_through(console: Console) -> None:
    """From now on what this process prints as an error goes through `console`; whoever owns that closes it."""
    sys.stderr = Voice(console, 2)

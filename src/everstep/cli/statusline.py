"""The last row of a terminal, kept for one line while everything else scrolls above it.

The agents write to the same terminal from their own processes. So the terminal itself keeps the row (a scroll region,
as Debian's apt does): what anybody writes meanwhile goes above it, and nothing has to be agreed on. A process that is
killed cannot give the row back: a shell that waits for its end does that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
from collections.abc import Callable

FEWEST_ROWS = 6
SAVE, RESTORE, CLEAR = "\0337", "\0338", "\033[0m\033[2K"
# The last line that it reads is what is to be written when there are no more, as after SIGKILL; empty: nothing.
HEIR = 'while read -r line; do last=$line; done; printf %s "$last" >&2'


def usable(fd: int) -> bool:
    """Whether this is a terminal that can do it, and ours at the moment: nobody draws over the shell's prompt."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown") or not os.isatty(fd):
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp() and os.get_terminal_size(fd).lines >= FEWEST_ROWS
    except OSError:  # not our controlling terminal: nobody can tell whose it is
        return False


class StatusLine:
    """`emit` takes what is to be written; it may leave things out, so each block stands for itself."""

    def __init__(self, fd: int, emit: Callable[[str], None]) -> None:
        self.fd = fd
        self.emit = emit
        self.size: os.terminal_size | None = None  # while the row is ours
        self._heir: subprocess.Popen[bytes] | None = None

    def show(self, text: Callable[[int], str]) -> bool:
        """`text` of so many columns; False when there is no such row now (any more)."""
        if not usable(self.fd):
            self.close()
            return False
        size = os.get_terminal_size(self.fd)
        if size != self.size:
            self._take(size)
        words = "".join(letter if letter.isprintable() else "?" for letter in text(size.columns - 4))
        self.emit(f"{SAVE}\033[{size.lines};1H{CLEAR}\033[7m {words[: size.columns - 4]} \033[0m{RESTORE}")
        return True

    def close(self) -> None:
        """Give the row back; harmless when it was not taken."""
        if self.size is not None:
            self.emit(_released(self.size))
            self.size = None
            atexit.unregister(self._abandon)
            self._bequeath("")
            if self._heir is not None:
                self._heir.communicate()
                self._heir = None

    def _take(self, size: os.terminal_size) -> None:
        """Scroll by a row, so that nothing is covered; then all but the last one scroll."""
        if self.size is None:
            atexit.register(self._abandon)
            self._heir = _start_heir(self.fd)
        else:  # its window has another size now: the row where it was
            self.emit(_released(self.size))
        self._bequeath(_released(size))
        self.emit(f"\n{SAVE}\033[1;{size.lines - 1}r{RESTORE}\033[1A")
        self.size = size

    def _bequeath(self, text: str) -> None:
        if self._heir is not None and self._heir.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # somebody killed it: then there is none
                self._heir.stdin.write(f"{text}\n".encode())

    def _abandon(self) -> None:
        """The process ends in an unforeseen way: the terminal is not left so."""
        if self.size is not None:
            with contextlib.suppress(OSError):
                os.write(self.fd, _released(self.size).encode())


def _start_heir(fd: int) -> subprocess.Popen[bytes] | None:
    """In a session of its own: what the terminal sends to the job's processes is not for it."""
    command, pipe, nothing = ["/bin/sh", "-c", HEIR], subprocess.PIPE, subprocess.DEVNULL
    try:
        return subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=nothing, stderr=fd, start_new_session=True)
    except OSError:  # no shell, or no process more: only a SIGKILL will leave the row as it is
        return None


def _released(size: os.terminal_size) -> str:
    return f"{SAVE}\033[r\033[{size.lines};1H{CLEAR}{RESTORE}"

"""Python stacks of all threads of a worker, written when its agent sends a signal.

faulthandler writes them from the C signal handler, so a worker that hangs inside a collective or holds the
GIL for ever still answers. The signal is a real-time one: scripts use SIGUSR1 and SIGUSR2 themselves.
"""

from __future__ import annotations

import faulthandler
import os

from everstep.core.page import STACKS_SIGNAL


def install(path: str) -> None:
    """Append the stacks to `path` at each STACKS_SIGNAL. The file stays open for the life of the process."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)

"""A flag which a poll loop can wait for, raised once by any thread or signal handler."""

from __future__ import annotations

import os


class Flag:
    """An eventfd that is closed with the last reference: nobody ever polls, or raises, another's descriptor."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def raise_(self) -> None:
        os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)

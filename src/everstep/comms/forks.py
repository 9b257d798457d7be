"""A forked child (a data loader's worker, say) must not keep its parent's connections alive: it closes its copies.

Close-on-exec does nothing for a child that never calls exec(). So every socket is made under a lock which fork() takes
too: none exists in the child that is not known here.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

_lock = threading.RLock()

S = TypeVar("S", bound=socket.socket)


class Sockets:
    """All sockets of one owner; `on_child` runs in a child that was forked, after they are closed there."""

    def __init__(self, on_child: Callable[[], None]) -> None:
        self._all: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._on_child = on_child
        _owners.add(self)

    def new(self, make: Callable[[], S]) -> S:
        """What `make` returns, which must not wait."""
        with _lock:
            sock = make()
            self._all.add(sock)
            return sock

    def _disown(self) -> None:
        for sock in list(self._all):
            sock.close()
        self._on_child()


_owners: weakref.WeakSet[Sockets] = weakref.WeakSet()


def _in_child() -> None:
    _lock.release()
    for owner in list(_owners):
        owner._disown()
    _owners.clear()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)

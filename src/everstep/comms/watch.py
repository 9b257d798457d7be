"""Ends the waiting of a fabric that no controller looks after: for a rank that died or left, and after the time-out.

A killed process on this host is noticed by the kernel's word (a pidfd), one on another host by the end of its links,
which the collectives themselves see. A rank that left as it should may still be waited for by mistake: whoever goes on
to wait for it is told, a moment later.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from everstep.comms.board import left_word
from everstep.comms.flag import Flag
from everstep.comms.rendezvous import Life, born
from everstep.comms.table import Table
from everstep.comms.work import Work

GRACE_S = 1.0  # what a rank was needed for before it left, the others finish within this time
TICK_S = 1.0

# The works that are under way, each with the roles that take part.
UnderWay = Callable[[], Iterable[tuple[Work, Sequence[int]]]]


class Watch:
    """A thread, until `close`. `lives`: by role, who can be watched from here."""

    def __init__(self, table: Table, lives: Sequence[Life | None], under_way: UnderWay) -> None:
        self._table = table
        self._under_way = under_way
        self._stop = Flag()
        self._tick_s = TICK_S
        self._left: dict[int, float] = {}  # role -> when it was seen to have left
        self._local = [role for role in range(table.size) if role != table.role and table.peer(role).board is not None]
        self._pidfds: dict[int, int] = {}  # pidfd -> role
        for role in self._local:
            if (life := lives[role]) is not None:
                self._hold(role, life)
        self._thread = threading.Thread(target=self._run, name="everstep-watch", daemon=True)
        self._thread.start()

    def hurry(self, timeout_s: float) -> None:
        """There may be works with this time-out."""
        self._tick_s = min(self._tick_s, max(0.05, timeout_s / 4))

    def close(self) -> None:
        self._stop.raise_()
        self._thread.join()
        for pidfd in self._pidfds:
            os.close(pidfd)

    def _hold(self, role: int, life: Life) -> None:
        try:
            pidfd = os.pidfd_open(life.pid)
        except ProcessLookupError:
            self._ended(role)
            return
        except OSError:
            return  # a kernel or a sandbox without them: only the time-out is left
        self._pidfds[pidfd] = role
        with contextlib.suppress(ProcessLookupError):  # dead: the pidfd tells
            if born(life.pid) != life.born:
                self._ended(role)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        for pidfd in self._pidfds:
            poll.register(pidfd, select.POLLIN)
        while True:
            for fd, _ in poll.poll(self._tick_s * 1000):
                if fd not in self._pidfds:
                    return
                poll.unregister(fd)
                self._ended(self._pidfds[fd])
            self._tick()

    def _ended(self, role: int) -> None:
        """Its process is gone."""
        if not self._has_left(role):
            self._table.abort(f"{self._table.seats[role].worker} died")

    def _has_left(self, role: int) -> bool:
        board = self._table.peer(role).board
        return board is not None and board.words[left_word()] != 0

    def _tick(self) -> None:
        now = time.monotonic()
        for role in self._local:
            if role not in self._left and self._has_left(role):
                self._left[role] = now
        gone = {role for role, when in self._left.items() if when + GRACE_S <= now}
        for work, roles in self._under_way():
            if not work.begun_s:
                continue
            if now - work.begun_s > work.timeout_s:
                self._table.abort(f"{work.name} did not end within its time-out of {work.timeout_s:g} s")
            elif now - work.begun_s > GRACE_S and not gone.isdisjoint(roles):
                workers = [self._table.seats[role].worker for role in sorted(gone.intersection(roles))]
                self._table.abort(f"{', '.join(workers)} left, and {work.name} needs it")

"""The table of one epoch: who is who, how each is reached, and whether the epoch is still alive.

A peer is local (its board is mapped here) or remote (a stream per channel). Every blocking call names the table it
began with, and raises EpochBroken as soon as that one is aborted, whatever tables come after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from everstep.comms import futex
from everstep.comms.board import Board
from everstep.comms.flag import Flag
from everstep.comms.stream import Stream, exchange
from everstep.core.errors import EpochBroken
from everstep.core.formation import Formation, Seat


class Peer:
    """How one role is reached. `board` is None for a remote one, which has `streams` by channel."""

    def __init__(self, seat: Seat, board: Board | None, streams: Mapping[int, Stream] | None = None) -> None:
        self.seat = seat
        self.board = board
        self.streams = dict(streams or {})


# Adds streams for a channel to the peers of these roles; returns when they are there.
Connect = Callable[["Table", int, Sequence[int]], None]


class Table:
    """Swapped whole at a switch; never changes but for being aborted, once and for good."""

    def __init__(self, formation: Formation, role: int, peers: Sequence[Peer], connect: Connect | None = None) -> None:
        self.epoch = formation.epoch
        self.role = role
        self.seats = formation.seats
        self.groups = formation.groups
        self.size = len(formation.seats)
        self.waiters: dict[int, int] = {}  # thread -> address of the word it waits at
        self.watchers: list[threading.Condition] = []  # whoever waits for another thread of this process
        self.broken: str | None = None
        self.gate = Flag()  # the same for whoever waits in a poll loop
        self._peers = tuple(peers)
        self._connect = connect

    def peer(self, role: int) -> Peer:
        return self._peers[role]

    def check(self) -> None:
        """Raise EpochBroken once this epoch was aborted."""
        if self.broken is not None:
            raise EpochBroken(self.epoch, self.broken)

    def abort(self, why: str) -> None:
        """Wake every call that waits in this epoch; each raises. Any thread may, and more than once."""
        if self.broken is None:
            self.broken = why
        self.gate.raise_()
        for address in list(self.waiters.values()):
            futex.wake(address)
        for condition in list(self.watchers):
            with condition:
                condition.notify_all()

    def exchange(
        self,
        channel: int,
        number: int,
        mark: bytes,
        sends: Mapping[int, memoryview],
        receives: Mapping[int, memoryview],
    ) -> dict[int, bytes]:
        """One message to each remote role of `sends`, one from each of `receives`; returns when all are through.

        A message is named by (epoch, channel, number) and carries the 16 bytes of `mark` besides its payload, which may
        be empty. What arrives with another mark or length is read and thrown away. Returns the marks that came, by
        role; an empty one for the right mark with a wrong length. Any thread may call it; two which use the same
        channel with the same role take turns, and what comes for the second meanwhile is kept for it. Memory is the
        caller's again when this returns or raises. An exception of any kind breaks the epoch: a message is missing.
        """
        roles = {*sends, *receives}
        missing = [role for role in sorted(roles) if channel not in self._peers[role].streams]
        if missing:
            if self._connect is None:
                raise ValueError(f"no links to the roles {missing}: they are on other hosts")
            self._connect(self, channel, missing)
        streams = {role: self._peers[role].streams[channel] for role in roles}
        return exchange(
            self,
            number,
            mark,
            {role: (streams[role], data) for role, data in sends.items()},
            {role: (streams[role], data) for role, data in receives.items()},
        )

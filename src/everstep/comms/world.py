"""One fabric, and the process groups of torch over it: which communicator each has, and when all of them end."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from everstep.comms import rendezvous
from everstep.comms.board import MAX_COMMUNICATORS, left_word
from everstep.comms.collectives import Communicator
from everstep.comms.fabric import Fabric
from everstep.comms.table import Table
from everstep.comms.watch import Watch
from everstep.comms.work import Lane, Work

DEFAULT_INDEX = 3  # 0 to 2 are the session's
DEAL_TAG = 1 << 31  # tags of users are smaller


class HasLanes(Protocol):
    """What a world has to know of a group."""

    def lanes(self) -> list[tuple[Lane, Sequence[int]]]:
        """Where its works are done, each with the roles that take part."""


class Pinned(threading.local):
    """The fabric as a communicator sees it: in the epoch in which the operation was called, not in a later one."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.table_of_work: Table | None = None

    @property
    def table(self) -> Table:
        return self.table_of_work or self._fabric.table


class World:
    """One fabric and the groups over it. `fixed`: made by the groups for themselves; its members never change."""

    def __init__(self, fabric: Fabric, lives: Sequence[rendezvous.Life | None] | None = None) -> None:
        self.fabric = fabric
        self.fixed = lives is not None
        self.pinned = Pinned(fabric)
        self.groups: list[HasLanes] = []
        self._pid = os.getpid()
        self._used = set(range(DEFAULT_INDEX + 1))
        self._all = Communicator(self.pinned, DEFAULT_INDEX)
        self._watch = Watch(fabric.table, lives, self._under_way) if lives is not None else None
        if self.fixed:
            mine = weakref.ref(self)
            atexit.register(lambda: _leave_at_exit(mine()))

    def communicator(self, roles: tuple[int, ...] | None, name: str) -> Communicator:
        """For a new group; all its members ask at the same time, but for a session's. None: the group of all."""
        if roles is None:
            return self._all
        index = self._deal(roles) if self.fixed else _count(name)
        if index >= MAX_COMMUNICATORS:
            raise ValueError(f"a member of the group with ranks {roles} is in {MAX_COMMUNICATORS - 3} others already")
        self._used.add(index)
        return Communicator(self.pinned, index, roles)

    def add(self, group: HasLanes, timeout_s: float) -> None:
        self.groups = [*self.groups, group]  # replaced, not changed: the watch may be looking
        self.hurry(timeout_s)

    def hurry(self, timeout_s: float) -> None:
        if self._watch is not None:
            self._watch.hurry(timeout_s)

    def remove(self, group: HasLanes) -> None:
        self.groups = [other for other in self.groups if other is not group]

    def leave(self) -> None:
        """Say that the end of this process is no death."""
        if self.fixed and os.getpid() == self._pid:  # not a forked child's
            self.fabric.board.words[left_word()] = 1

    def close(self) -> None:
        """End the fabric, if it is ours, and whatever waits in it."""
        if self.fixed:
            self.leave()
            if self._watch is not None:
                self._watch.close()
            self.fabric.close()
            self._watch = None

    def _deal(self, roles: tuple[int, ...]) -> int:
        """The first index which none of the members uses for another group. It is never used again in this epoch.

        Only the members take part: torch does not tell the others. They all make their groups in one order, so
        nobody waits for one who waits for him.
        """
        used = torch.zeros(MAX_COMMUNICATORS + 1, dtype=torch.int64)
        used[sorted(self._used)] = 1
        first, *rest = roles
        if self.fabric.table.role != first:
            self._all.send(used, first, DEAL_TAG)
            self._all.recv(used, first, DEAL_TAG)
            return int(used[0])
        theirs = torch.empty_like(used)
        for role in rest:
            self._all.recv(theirs, role, DEAL_TAG)
            used |= theirs
        used[0] = index = int((used == 0).nonzero()[0])
        for role in rest:
            self._all.send(used, role, DEAL_TAG)
        return index

    def _under_way(self) -> Iterator[tuple[Work, Sequence[int]]]:
        for group in self.groups:
            for lane, roles in group.lanes():
                if (work := lane.current) is not None:
                    yield work, roles


def _count(name: str) -> int:
    """The index of a session's group: a newcomer makes its groups while the others train, so nobody can be asked.

    torch names a group by how many were made before, and all members make all groups in one order.
    """
    if not name.isdecimal():
        raise ValueError("a group in a session is made by all members in one order: use_local_synchronization=False")
    return DEFAULT_INDEX + int(name)


def _leave_at_exit(world: World | None) -> None:
    """A script that ends without destroying its groups has left as well, unless an exception ended it."""
    if world is not None and getattr(sys, "last_value", None) is None:
        world.leave()

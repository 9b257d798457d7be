"""Connections between a controller and its nodes, as bad as TCP lets them be.

Inside one connection messages keep their order. They are late while the wire is cut (and come after it heals),
lost when the connection ends, and on demand lost or repeated, much later and after newer ones. Either direction
can be cut alone. An end that hears nothing cannot tell a cut from silence: that is the business of leases.
"""

from __future__ import annotations

import random
from typing import Protocol

from everstep.core.types import Directive, NodeReport
from everstep.core.virtual import VirtualClock

UP, DOWN = 0, 1  # towards the controller, towards the node
Message = Directive | NodeReport


class End(Protocol):
    """Whoever holds one end of connections."""

    def receive(self, connection: Connection, message: Message) -> None: ...

    def lost(self, connection: Connection) -> None: ...


class Wire:
    """The path between one node and the controller; outlives connections and agents."""

    def __init__(self, clock: VirtualClock, rng: random.Random) -> None:
        self.clock = clock
        self.rng = rng
        self.cut_s = [0.0, 0.0]  # since when each direction is cut; 0: whole
        self.loss = 0.0  # chance that a message is lost although the connection lives
        self.repeats = 0.0
        self.connections: list[Connection] = []

    @property
    def whole(self) -> bool:
        return not self.cut_s[UP] and not self.cut_s[DOWN]

    def cut(self, direction: int) -> None:
        self.cut_s[direction] = self.cut_s[direction] or self.clock.now_s

    def heal(self) -> None:
        """What was sent during the cut arrives late, where the connection is still open."""
        self.cut_s = [0.0, 0.0]
        self.connections = [c for c in self.connections if c.open[UP] or c.open[DOWN]]
        for connection in self.connections:
            connection.flush()


class Connection:
    """`open[d]`: the end that receives in direction d is open. A message of None tells that the other end closed."""

    __slots__ = ("ends", "held", "incarnation", "known", "last_s", "node", "open", "wire")

    def __init__(self, wire: Wire, node: str, incarnation: str, controller: End, agent: End) -> None:
        self.wire = wire
        self.node = node
        self.incarnation = incarnation
        self.ends = (controller, agent)
        self.open = [True, True]
        self.known = False  # the controller heard a report over it
        self.last_s = [0.0, 0.0]
        self.held: tuple[list[Message | None], list[Message | None]] = ([], [])
        wire.connections.append(self)

    def send(self, direction: int, message: Message) -> bool:
        """Whether it is on its way, or will be once the wire is whole."""
        wire = self.wire
        if not self.open[1 - direction]:
            return False
        if wire.loss and wire.rng.random() < wire.loss:
            return False
        self._put(direction, message)
        if wire.repeats and wire.rng.random() < wire.repeats:
            wire.clock.after(wire.rng.uniform(0.0, 3.0), self._repeat, direction, message)
        return True

    def close(self, side: int) -> None:
        """Close the end that receives in direction `side`; the other end learns of it when the wire lets it."""
        if self.open[side]:
            self.open[side] = False
            self._put(1 - side, None)

    def reset(self) -> None:
        """Something between the ends broke it: what is under way is lost, and each owner is told a little later."""
        for direction in (UP, DOWN):
            if self.open[direction]:
                self.wire.clock.after(self.wire.rng.uniform(0.001, 0.2), self._deliver, direction, None)
                self.held[direction].clear()
                self.open[direction] = False

    def flush(self) -> None:
        for direction in (UP, DOWN):
            waiting = self.held[direction][:]
            self.held[direction].clear()
            for message in waiting:
                self._put(direction, message)

    def _put(self, direction: int, message: Message | None) -> None:
        wire = self.wire
        if wire.cut_s[direction]:
            self.held[direction].append(message)
            return
        delay = wire.rng.random()
        delay = 0.001 + (0.01 * delay if delay < 0.9 else 3.0 * (delay - 0.9))  # one in ten takes up to 0.3 s
        due = max(self.last_s[direction], wire.clock.now_s + delay)
        self.last_s[direction] = due
        wire.clock.at(due, self._deliver, direction, message)

    def _deliver(self, direction: int, message: Message | None) -> None:
        if message is None:
            self.open[direction] = False
            self.ends[direction].lost(self)
        elif self.open[direction]:
            self.ends[direction].receive(self, message)

    def _repeat(self, direction: int, message: Message) -> None:
        if self.open[direction] and not self.wire.cut_s[direction]:
            self.ends[direction].receive(self, message)

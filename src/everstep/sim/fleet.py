"""The nodes: who sits where, who is warm beside them, who is out. Only what differs from the start is stored.

Nodes 0 .. seats - 1 begin in the seat of their own number, the next ones as standbys. Racks and slices (cubes of an
optically switched torus) are ranges of node numbers; a replica is a range of seats. With optical switches a spare node
of any slice can be wired into any other; without, only one of the same slice.
"""

from __future__ import annotations

from collections import Counter

from everstep.sim.chance import Chance, below


class Fleet:
    """`seats`: roles that need a node each; `num_nodes`: of these and standbys together."""

    def __init__(self, seats: int, standbys: int, replicas: int, per_slice: int = 0, optical: bool = False) -> None:
        self.seats, self.num_nodes = seats, seats + standbys
        self.per_replica = seats // replicas
        self.replicas = replicas
        self.per_slice, self.optical = per_slice, optical
        self.standbys = dict.fromkeys(range(seats, self.num_nodes))  # in the order of their coming
        self.out: set[int] = set()
        self.missing: set[int] = set()  # seats
        self.broken: Counter[int] = Counter()  # replica -> its missing seats
        self._holder: dict[int, int] = {}
        self._seat: dict[int, int] = {}

    def seat_of(self, node: int) -> int:
        """-1: it holds none."""
        return self._seat.get(node, node if node < self.seats else -1)

    def holder(self, seat: int) -> int:
        """-1: the seat is empty."""
        return self._holder.get(seat, seat)

    def seated(self) -> list[int]:
        """All with a seat, by their numbers."""
        return sorted(self.holder(seat) for seat in range(self.seats) if seat not in self.missing)

    @property
    def present(self) -> int:
        return self.seats - len(self.missing)

    @property
    def whole_replicas(self) -> int:
        return self.replicas - len(self.broken)

    def draw(self, chance: Chance) -> int:
        """Any node, healthy or not: who is out cannot fail, so the caller lets that draw pass."""
        return below(chance, self.num_nodes)

    def lose(self, node: int) -> int:
        """It is out; the seat it leaves empty, or -1."""
        assert node not in self.out
        self.out.add(node)
        if node in self.standbys:
            del self.standbys[node]
            return -1
        seat = self.seat_of(node)
        if seat >= 0:
            self._seat[node], self._holder[seat] = -1, -1
            self.missing.add(seat)
            self.broken[seat // self.per_replica] += 1
        return seat

    def back(self, node: int) -> None:
        """It is well again, or a new one came in its place: a standby for now."""
        self.out.discard(node)
        self._seat[node] = -1
        self.standbys[node] = None

    def fits(self, seat: int) -> int:
        """A standby that can take this seat; -1: there is none."""
        if not self.per_slice or self.optical:
            return next(iter(self.standbys), -1)
        home = seat // self.per_slice
        return next((node for node in self.standbys if node // self.per_slice == home), -1)

    def num_fitting(self) -> int:
        """Empty seats that a standby could take, each standby once."""
        if not self.per_slice or self.optical:
            return len(self.standbys)
        free = Counter(node // self.per_slice for node in self.standbys)
        empty = Counter(seat // self.per_slice for seat in self.missing)
        return sum(min(count, free[home]) for home, count in empty.items())

    def sit(self, node: int, seat: int) -> None:
        del self.standbys[node]
        self._seat[node], self._holder[seat] = seat, node
        self.missing.discard(seat)
        replica = seat // self.per_replica
        self.broken[replica] -= 1
        if not self.broken[replica]:
            del self.broken[replica]

    def fill(self) -> list[int]:
        """Seat standbys wherever they fit; who."""
        seated = []
        for seat in sorted(self.missing):
            node = self.fits(seat)
            if node >= 0:
                self.sit(node, seat)
                seated.append(node)
        return seated

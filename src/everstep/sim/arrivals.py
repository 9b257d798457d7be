"""When something fails, and whom it takes: the failure models.

A constant rate is one stream over all nodes (who is out when it strikes is passed over), so it costs by the event.
Weibull's and new nodes' failures depend on the age of each node; those plan one event a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from everstep.sim.causes import TRANSIENT, census
from everstep.sim.chance import Chance, Stream, Weighted, below, exponential, weibull
from everstep.sim.fleet import Fleet
from everstep.sim.scenario import DAY_S, Cluster, Failures
from everstep.sim.traces import Change

NOBODY = -1
At = Callable[[float, int], None]  # plan a strike: when, and at which node or domain

ALIVE = ("slow", "silent", "maintenance")  # kinds that strike nodes with a role, and leave them alive


class Source:
    """One [[failures]]: `begin` it, then tell it what happened. It plans its strikes itself."""

    def __init__(self, spec: Failures, cluster: Cluster, fleet: Fleet, chance: Chance, at: At) -> None:
        self.spec, self.fleet, self.at = spec, fleet, at
        self.times = Stream(chance.random())  # whom it takes depends on who is there; when it comes does not
        self.chance = Stream(chance.random())
        self._size = {"rack": cluster.nodes_per_rack, "slice": cluster.nodes_per_slice}.get(spec.of, 1)
        self._causes = Weighted(census(spec.causes)) if spec.causes else None

    def begin(self, now: float) -> None:
        self._next(now)

    def fired(self, now: float) -> None:
        """A planned strike's time has come: plan the one after it."""
        self._next(now)

    def renewed(self, node: int, now: float) -> None:
        """The node was repaired or replaced: it is as new."""

    def survived(self, node: int, now: float) -> None:
        """The strike hit it, and it is still there."""

    def victims(self, struck: int, now: float) -> list[int]:
        """Whom this strike takes; nobody, if whoever it meant is out."""
        fleet = self.fleet
        if self._size > 1:
            first = below(self.chance, -(-fleet.num_nodes // self._size)) * self._size
            domain = range(first, min(first + self._size, fleet.num_nodes))
            share = self.spec.share
            return [n for n in domain if n not in fleet.out and (share >= 1 or self.chance.random() < share)]
        if self.spec.kind in ALIVE or self.spec.kind == "periodic":
            node = fleet.holder(below(self.chance, fleet.seats))
        else:
            node = struck if struck != NOBODY else fleet.draw(self.chance)
        return [] if node < 0 or node in fleet.out else [node]

    def cause(self) -> str:
        return self._causes.draw(self.chance) if self._causes else self.spec.kind

    def _mean_s(self) -> float:
        """Between strikes, over all nodes or domains."""
        domains = self.fleet.num_nodes / self._size
        return 1000 * DAY_S / (self.spec.rate * domains)

    def _next(self, now: float) -> None:
        self.at(now + exponential(self.times, self._mean_s()), NOBODY)


class Periodic(Source):
    def _next(self, now: float) -> None:
        self.at(now + self.spec.every_s, NOBODY)


class Aging(Source):
    """Weibull: a shape below 1 fails early in life, above 1 late."""

    due_s: dict[int, float]

    def begin(self, now: float) -> None:
        self.due_s = {}
        for node in range(self.fleet.num_nodes):
            self.renewed(node, now)

    def victims(self, struck: int, now: float) -> list[int]:
        """What was planned for the node before it was renewed does not count."""
        return super().victims(struck, now) if now >= self.due_s[struck] else []

    def survived(self, node: int, now: float) -> None:
        self.renewed(node, now)

    def renewed(self, node: int, now: float) -> None:
        mean_s = 1000 * DAY_S / self.spec.rate
        scale = mean_s / math.gamma(1 + 1 / self.spec.shape)
        self.due_s[node] = now + weibull(self.times, scale, self.spec.shape)
        self.at(self.due_s[node], node)

    def _next(self, now: float) -> None:
        """Each node's next failure is planned when it is renewed."""


class Infant(Source):
    """What new nodes fail more than others: a rate that is (factor - 1) times the usual one and decays."""

    def begin(self, now: float) -> None:
        for node in range(self.fleet.num_nodes):
            self.renewed(node, now)

    def renewed(self, node: int, now: float) -> None:
        spec = self.spec
        whole = spec.rate / 1000 / DAY_S * (spec.factor - 1) * spec.decay_s  # expected over its whole life
        need = exponential(self.times, 1.0)
        if need < whole:
            self.at(now - spec.decay_s * math.log(1 - need / whole), node)

    def _next(self, now: float) -> None:
        """Planned with each node."""


class Replay(Source):
    """A trace: who comes and goes is written down. Strikes carry the number of the change."""

    changes: list[Change]

    def begin(self, now: float) -> None:
        for number, change in enumerate(self.changes):
            if change.at_s > 0:
                self.at(now + change.at_s, number)

    def _next(self, now: float) -> None:
        """All of it is planned at the begin."""


KINDS: dict[str, type[Source]] = {"periodic": Periodic, "weibull": Aging, "infant": Infant, "trace": Replay}


def source(spec: Failures, cluster: Cluster, fleet: Fleet, chance: Chance, at: At) -> Source:
    return KINDS.get(spec.kind, Source)(spec, cluster, fleet, chance, at)


def is_transient(cause: str) -> bool:
    """Whether the machine is sound: it can go on at once."""
    return cause in TRANSIENT

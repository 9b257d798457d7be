"""Goes through the worlds of `commit_model`: `explore` visits every reachable one, `walk` follows one random path.

In each world something must be bound to happen, or all be done: nothing waits for ever, for no reachable world is
visited twice on one path.
"""

from __future__ import annotations

import random
from collections import deque
from typing import NamedTuple

from .commit_model import Model, Scenario, World
from .commit_peer import Violation, claim


class Explored(NamedTuple):
    states: int
    transitions: int
    ends: int


def explore(scenario: Scenario, limit: int = 2_000_000) -> Explored:
    """Visit every reachable world, nearest first. Raises Violation with the way there."""
    model = Model(scenario)
    first = model.initial()
    came: dict[World, tuple[World, str] | None] = {first: None}
    queue = deque([first])
    transitions = ends = 0
    while queue:
        world, label = queue.popleft(), "?"
        bound = False
        try:
            for label, reliable, after in model.actions(world):
                transitions += 1
                bound |= reliable
                if after not in came:
                    model.check(after)
                    came[after] = world, label
                    queue.append(after)
            if not bound:
                ends += 1
                claim(model.finished(world), "nothing goes on", *map(model.peers.items.__getitem__, world.peers))
        except AssertionError as error:
            raise Violation(f"{error}\n  way there: {' | '.join(_way(came, world))} | after {label}") from error
        assert len(came) < limit, "too many states for a test"
    return Explored(len(came), transitions, ends)


def _way(came: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    labels = []
    while (previous := came[world]) is not None:
        world, label = previous
        labels.append(label)
    return labels[::-1]


def walk(scenario: Scenario, rng: random.Random, rare: float = 0.02) -> tuple[int, World, Model]:
    """One random path to the end. `rare`: how often a fault or a plan comes when one can."""
    model = Model(scenario)
    world, labels, count = model.initial(), [], 0
    try:
        while True:
            options = list(model.actions(world))
            usual = [option for option in options if option[1]]
            unusual = [option for option in options if not option[1]]
            if not usual:
                claim(model.finished(world), "nothing goes on", *map(model.peers.items.__getitem__, world.peers))
                return count, world, model
            label, _, world = rng.choice(unusual if unusual and rng.random() < rare else usual)
            labels.append(label)
            model.check(world)
            count += 1
    except AssertionError as error:
        raise Violation(f"{error}\n  way there: {' | '.join(labels)}") from error

"""Which nodes keep a copy of which state, so that losing some nodes loses no state.

GEMINI (SOSP'23, section 4): nodes form groups of as many as there are copies, each keeps the state of its whole group;
what does not fill a group joins the last one, as a ring. A loss of fewer nodes than copies never loses state, and a
loss of more does so with the smallest probability. Groups are laid across failure domains (racks, slices).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


def peers(domains: Mapping[str, str], copies: int) -> dict[str, tuple[str, ...]]:
    """For each node those that keep its state too, nearest first: copies - 1 of them, or all others.

    domains: node -> failure domain; nodes of one domain are lost together.
    """
    nodes = sorted(domains, key=lambda node: (domains[node], node))
    copies = min(copies, len(nodes))
    if copies < 2:
        return dict.fromkeys(nodes, ())
    num_groups = len(nodes) // copies
    # With a stride of the number of groups a group has no two nodes of a domain, unless one holds more than its part.
    groups = [nodes[first : num_groups * copies : num_groups] for first in range(num_groups)]
    groups[-1] += nodes[num_groups * copies :]
    return {node: _around(group, place, copies - 1) for group in groups for place, node in enumerate(group)}


def _around(group: Sequence[str], place: int, count: int) -> tuple[str, ...]:
    return tuple(group[(place + step) % len(group)] for step in range(1, count + 1))


@functools.lru_cache(maxsize=4096)
def recovery_probability(num_nodes: int, copies: int, num_lost: int) -> float:
    """That no state is lost with `num_lost` nodes, all sets of them equally likely. Exact."""
    if copies > num_nodes:
        copies = num_nodes
    if num_lost < copies:
        return 1.0
    num_groups, rest = divmod(num_nodes, copies)
    whole = num_groups - 1 if rest else num_groups
    group = [math.comb(copies, lost) for lost in range(copies)]  # ways to lose `lost` of a group, but not all
    ways = _ring(copies + rest, copies) if rest else [1]
    while whole:  # its power, by squares
        if whole & 1:
            ways = _times(ways, group, num_lost)
        group, whole = _times(group, group, num_lost), whole >> 1
    return ways[num_lost] / math.comb(num_nodes, num_lost) if num_lost < len(ways) else 0.0


def _times(one: Sequence[int], other: Sequence[int], degree: int) -> list[int]:
    product = [0] * min(len(one) + len(other) - 1, degree + 1)
    for i, a in enumerate(one[: degree + 1]):
        for j, b in enumerate(other[: degree + 1 - i]):
            product[i + j] += a * b
    return product


def _ring(length: int, run: int) -> list[int]:
    """Of a ring's subsets, by size, how many have no `run` neighbours in a row."""
    ways = [0] * (length + 1)
    for lead in range(min(run, length + 1)):  # how many at the begin, before the first gap
        # (chosen, how many in a row at the end) -> ways, over the places after that gap
        states = {(lead, 0): 1}
        for _ in range(length - lead - 1):
            following: dict[tuple[int, int], int] = {}
            for (chosen, tail), count in states.items():
                following[chosen, 0] = following.get((chosen, 0), 0) + count
                if tail + 1 < run:
                    key = chosen + 1, tail + 1
                    following[key] = following.get(key, 0) + count
            states = following
        for (chosen, tail), count in states.items():
            if lead + tail < run:
                ways[chosen] += count
    return ways


class Part(NamedTuple):
    """What one role does when the state is kept. `peers`: nodes to which its node sends the copy."""

    writes: bool
    peers: tuple[str, ...] = ()
    persists: bool = False


def parts(nodes: Sequence[str], shards: int, copies: int, domains: Mapping[str, str] | None = None) -> list[Part]:
    """By role: who copies its state into its node's memory, so that each shard has `copies` on nodes of their own.

    nodes: of each role. Role r holds shard r % shards; one role a node and shard is enough. Where other replicas of a
    shard are on other nodes they keep theirs, and nothing is sent.
    """
    around = peers(domains or {node: node for node in nodes}, copies)
    plan = [Part(writes=False)] * len(nodes)
    for shard in range(min(shards, len(nodes))):
        first: dict[str, int] = {}  # node -> role
        for role in range(shard, len(nodes), shards):
            first.setdefault(nodes[role], role)
        writers = list(first.items())[:copies]
        holders = {node for node, _ in writers}
        for node, role in writers:
            missing = copies - len(holders) if node == writers[0][0] else 0
            targets = tuple(peer for peer in around[node] if peer not in holders)[:missing]
            plan[role] = Part(writes=True, peers=targets, persists=node == writers[0][0])
    return plan

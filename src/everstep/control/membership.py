"""Who is in the next epoch, and with which ranks: pure functions over the nodes that are there.

The rules: former members come before newcomers, newcomers by the rank they asked for, then as they came. A node
keeps its group rank where it can, so a replacement takes the leaver's place and nobody else's ranks move.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from everstep.core.types import EpochPlan, Member, NodeReport

TOGETHER = 10  # nodes that share an epoch bear this many times the silence that a lone one does


def choose(
    previous: Sequence[Member], present: Sequence[NodeReport], max_nodes: int, last: Collection[str] = ()
) -> list[NodeReport]:
    """At most `max_nodes` of `present` (given in order of arrival): former members first, then who asked for a rank.

    last: nodes that are taken only where no other one is there.
    """
    former = {m.node: m.group_rank for m in previous}

    def turn(report: NodeReport) -> tuple[bool, float, float]:
        asked = report.node_rank if report.node_rank >= 0 else math.inf
        return report.node in last, former.get(report.node, len(former)), asked

    return sorted(present, key=turn)[:max_nodes]


def seat(previous: Sequence[Member], chosen: Sequence[NodeReport]) -> tuple[Member, ...]:
    """Group ranks 0..n-1: a former member keeps its own if it is below n, the others fill the holes in order."""
    former = {m.node: m.group_rank for m in previous}
    seats: list[NodeReport | None] = [None] * len(chosen)
    rest = []
    for report in chosen:
        place = former.get(report.node, len(seats))
        if place < len(seats):
            seats[place] = report
        else:
            rest.append(report)
    waiting = iter(rest)
    members, first_rank = [], 0
    for group_rank, taken in enumerate(seats):
        report = taken or next(waiting)
        members.append(Member(report.node, report.incarnation, report.address, group_rank, first_rank, report.slots))
        first_rank += report.slots
    return tuple(members)


def deal(
    epoch: int,
    previous: Sequence[Member],
    present: Sequence[NodeReport],
    max_nodes: int,
    restart_count: int,
    last: Collection[str] = (),
) -> EpochPlan:
    """The plan of a new epoch. Its store listens where the node of group rank 0 said it can."""
    chosen = choose(previous, present, max_nodes, last)
    members = seat(previous, chosen)
    host = next(r for r in chosen if r.node == members[0].node)
    return EpochPlan(
        epoch=epoch,
        members=members,
        world_size=sum(m.slots for m in members),
        master_addr=host.address,
        master_port=host.store_port,
        restart_count=restart_count,
    )


def seated(plan: EpochPlan, report: NodeReport) -> bool:
    """Whether this very agent, not only its name, has a place in the plan."""
    member = plan.member(report.node)
    return member is not None and member.incarnation == report.incarnation


def fence_after_s(fence_s: float, num_members: int) -> float:
    """How long a node goes on without its controller. Controller and node must agree on it.

    A lone node may be replaced soon. Members of a larger epoch are, as a rule, told by each other's loss, and a long
    outage of the controller alone must not stop them; only when all of them are cut off together can nothing but
    time tell the controller that they run no more.
    """
    return fence_s if num_members == 1 else TOGETHER * fence_s


def mismatched(reports: Sequence[NodeReport]) -> Mapping[str, str]:
    """Check before start: nodes whose versions differ from the majority's, with what differs."""
    odd: dict[str, str] = {}
    for name in sorted({name for r in reports for name in r.versions}):
        count = Counter(r.versions[name] for r in reports if name in r.versions)
        usual = max(count, key=lambda version: (count[version], version))
        for report in reports:
            found = report.versions.get(name, usual)
            if found != usual:
                odd.setdefault(report.node, f"{name} {found}, the other nodes have {usual}")
    return odd

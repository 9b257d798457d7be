"""Which node is bad, from tests of groups: the planner and the judge of an examination between nodes.

n nodes stand in a grid of z rows. Each row is tested as a group, then each column; a node whose row and column both
fail is bad (ByteRobust's dual-phase replay, SOSP'25). Pairs are tested as well while they are few (MegaScale,
NSDI'24), and candidates that remain are tested beside a node that passed. The judge knows nothing of this order:
whoever was in a test that passed is well, and a test that failed has at least one bad member.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

Group = tuple[str, ...]
Round = tuple[Group, ...]  # groups without a common member: they may run at once
Stage = tuple[Round, ...]  # rounds of the same shape: their results can be compared

MAX_ALL_PAIRS = 8  # nodes; n - 1 rounds


class Judged(msgspec.Struct, frozen=True):
    """`bad`: surely. `perhaps`: at least one of them, but not known which. `links`: groups that failed although each
    member did well elsewhere."""

    bad: Group = ()
    perhaps: Group = ()
    links: tuple[Group, ...] = ()
    well: frozenset[str] = frozenset()


def stages(names: Sequence[str]) -> tuple[Stage, ...]:
    """What to test first. Empty for fewer than two nodes; of two it cannot be known which one is bad."""
    planned: list[Stage] = []
    if 2 <= len(names) <= MAX_ALL_PAIRS:
        planned.append(pairs(names))
    if len(names) >= 4:
        planned += grid(names)
    return tuple(planned)


def grid(names: Sequence[str]) -> list[Stage]:
    """Rows, then columns, of at least 4 nodes. Rows differ in length by at most one.

    A column that would have one node only (n = 5, 7, 10, 13, ...) borrows one of another row, in a round of its own.
    """
    num_columns = math.ceil(math.sqrt(len(names)))
    num_rows = math.ceil(len(names) / num_columns)
    short, num_longer = divmod(len(names), num_rows)
    rows: list[Group] = []
    for row in range(num_rows):
        first = sum(map(len, rows))
        rows.append(tuple(names[first : first + short + (row < num_longer)]))
    columns = [tuple(row[k] for row in rows if k < len(row)) for k in range(len(rows[0]))]
    planned: list[Stage] = [(tuple(rows),), (tuple(column for column in columns if len(column) > 1),)]
    planned += [(((column[0], rows[-1][0]),),) for column in columns if len(column) == 1]
    return planned


def pairs(names: Sequence[str]) -> Stage:
    """Every pair once, each node at most once in a round (a tournament by the circle method)."""
    seats: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    half = len(seats) // 2
    rounds = []
    for _ in range(len(seats) - 1):
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append(tuple((a, b) for a, b in met if a is not None and b is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)


def failed(rates: Sequence[Mapping[Group, float]], share: float) -> set[Group]:
    """Groups far slower than the best one: below `share` of it, or at 0. `rates`: of each stage, in order.

    A stage is compared with the stages before it as well, never with later ones: these have fewer nodes at work at
    a time, and on a crowded machine or switch each of them gets more.
    """
    best, found = 0.0, set()
    for stage in rates:
        best = max([best, *stage.values()])
        found |= {group for group, rate in stage.items() if rate <= 0 or rate < share * best}
    return found


def judge(tests: Mapping[Group, bool]) -> Judged:
    """Who is bad, given which groups passed."""
    well = frozenset(name for group, passed in tests.items() if passed for name in group)
    accused = [tuple(name for name in group if name not in well) for group, passed in tests.items() if not passed]
    bad = {group[0] for group in accused if len(group) == 1}
    perhaps = {name for group in accused for name in group} - bad
    links = tuple(
        group for group, passed in tests.items() if not passed and not set(group) - well and not _narrower(group, tests)
    )
    order = dict.fromkeys(name for group in tests for name in group)

    def named(chosen: set[str]) -> Group:
        return tuple(name for name in order if name in chosen)

    return Judged(named(bad), named(perhaps), links, well)


def _narrower(group: Group, tests: Mapping[Group, bool]) -> bool:
    """A smaller group within it failed too, and says more."""
    return any(not passed and set(other) < set(group) for other, passed in tests.items())


def followup(judged: Judged, tests: Mapping[Group, bool]) -> Stage:
    """What would tell more: candidates each beside a node that is well; the pairs of a group that fails as a link."""
    well = sorted(judged.well)
    wanted = list(judged.perhaps) if well else []
    rounds: list[Round] = (
        [
            tuple(zip(wanted[first : first + len(well)], well, strict=False))
            for first in range(0, len(wanted), len(well))
        ]
        if well
        else []
    )
    for group in judged.links:
        rounds += pairs(group)
    done = {frozenset(group) for group in tests}
    fresh = [tuple(group for group in each if frozenset(group) not in done) for each in rounds]
    return tuple(each for each in fresh if each)

"""The processes behind the closed forms of SYSTEMS section 15, played with random numbers; the forms are not used.

Each function plays `count` independent runs (vectorised) and returns the mean with its standard error. Times are in any
unit, the same for all arguments.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.plan.placement import peers

Floats = NDArray[np.float64]


class Played(NamedTuple):
    mean: float
    error: float  # standard error


def _mean(values: Floats) -> Played:
    return Played(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))))


def _ratio(useful: Floats, took: Floats) -> Played:
    """Useful part of the time, over runs of different length (delta method)."""
    part = float(useful.sum() / took.sum())
    spread = useful - part * took
    return Played(part, float(spread.std(ddof=1) / math.sqrt(len(took)) / took.mean()))


def first_failure(num_nodes: int, rate: float, count: int, chance: np.random.Generator) -> Played:
    """Time until the first of independent nodes fails, each at a constant rate."""
    block = max(1, 2_000_000 // num_nodes)
    parts = []
    for begin in range(0, count, block):
        rows = min(block, count - begin)
        parts.append(chance.exponential(1 / rate, (rows, num_nodes)).min(axis=1))
    return _mean(np.concatenate(parts))


def blocking(
    period: float, mttf: float, cost: float, downtime: float, recovery: float, count: int, chance: np.random.Generator
) -> Played:
    """Periods that end with a save. After a failure: downtime, recovery, the whole period again."""
    took = np.zeros(count)
    need = np.full(count, period)
    left = np.arange(count)
    while len(left):
        fails = chance.exponential(mttf, len(left))
        through = fails >= need[left]
        took[left] += np.where(through, need[left], fails + downtime)
        left = left[~through]
        need[left] = recovery + period
    return _ratio(np.full(count, period - cost), took)


def non_blocking(mttf: float, interval: float, recovery: float, count: int, chance: np.random.Generator) -> Played:
    """From failure to failure: the recovery, then whole intervals; what was begun of the last one is lost."""
    lives = chance.exponential(mttf, count)
    whole = np.floor(np.maximum(lives - recovery, 0.0) / interval)
    return _ratio(whole * interval, lives)


def two_tiers(
    period: float,
    inner: int,
    cost: tuple[float, float],
    rate: tuple[float, float],
    down: tuple[float, float],
    count: int,
    chance: np.random.Generator,
) -> Played:
    """`inner` periods to one outer save. An inner failure repeats its period, an outer one all since the outer save."""
    took, at = np.zeros(count), np.zeros(count, dtype=np.int64)
    left = np.arange(count)
    total = rate[0] + rate[1]
    while len(left):
        fails = chance.exponential(1 / total, len(left))
        through = fails >= period
        outer = ~through & (chance.random(len(left)) < rate[1] / total)
        took[left] += np.where(through, period, fails + np.where(outer, down[1], down[0]))
        at[left] = np.where(outer, 0, at[left] + through)
        left = left[at[left] < inner]
    useful = inner * (period - cost[0]) - cost[1]
    return _ratio(np.full(count, useful), took)


def placement(num_nodes: int, copies: int, num_lost: int, count: int, chance: np.random.Generator) -> Played:
    """Nodes lost at random: whether each node's state is left on one of its keepers."""
    names = [f"{number:05d}" for number in range(num_nodes)]
    place = {name: number for number, name in enumerate(names)}
    around = peers(dict(zip(names, names, strict=True)), copies)
    keepers = np.array([[place[name], *(place[peer] for peer in around[name])] for name in names])
    kept = np.empty(count)
    for run in range(count):
        lost = np.zeros(num_nodes, dtype=bool)
        lost[chance.choice(num_nodes, num_lost, replace=False)] = True
        kept[run] = not lost[keepers].all(axis=1).any()
    return _mean(kept)


def failing(num: int, probability: float, count: int, chance: np.random.Generator) -> NDArray[np.int64]:
    """How many of `num` fail in each of `count` days."""
    return chance.binomial(num, probability, count)


def one_forward_one_backward(stages: int, micro_batches: int, forward: float = 1.0, backward: float = 2.0) -> float:
    """Idle part of a pipeline that runs 1F1B, operation by operation."""
    orders = [_order(stage, stages, micro_batches) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages
    at = [0] * stages
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                kind, number = orders[stage][at[stage]]
                ready = _ready(done, kind, stage, number, stages)
                if ready is None:
                    break
                free[stage] = max(free[stage], ready) + (forward if kind == "F" else backward)
                done[kind, stage, number] = free[stage]
                at[stage], moved = at[stage] + 1, True
        assert moved, "the schedule blocks itself"
    return 1 - micro_batches * (forward + backward) / max(free)


def _order(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    ahead = min(stages - 1 - stage, micro_batches)
    order = [("F", number) for number in range(ahead)]
    for number in range(micro_batches):
        if number + ahead < micro_batches:
            order.append(("F", number + ahead))
        order.append(("B", number))
    return order


def _ready(done: dict[tuple[str, int, int], float], kind: str, stage: int, number: int, stages: int) -> float | None:
    """When its input is there; None: not yet known."""
    if kind == "F":
        return 0.0 if stage == 0 else done.get(("F", stage - 1, number))
    return done.get(("F", stage, number) if stage == stages - 1 else ("B", stage + 1, number))


def ring(size: float, bandwidth: float, members: int) -> float:
    """An all-reduce in a ring: each member passes a part on as soon as it has come and its link is free."""
    part_s = size / members / bandwidth
    came = [[0.0] * members for _ in range(members)]  # member x part -> when it has what it is to pass on
    free = [0.0] * members
    for turn in range(2 * (members - 1)):
        sent = [(member, (member - turn) % members) for member in range(members)]
        ends = {member: max(free[member], came[member][part]) + part_s for member, part in sent}
        for member, part in sent:
            free[member] = ends[member]
            came[(member + 1) % members][part] = ends[member]
    return max(free)

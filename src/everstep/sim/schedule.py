"""Who computes what in which order: a pipeline's schedule as data, (kind, stage, micro-batch, worker).

Orders and kinds are those of `detect.critical`, whose longest path says who may be slow without anybody waiting; here
time runs through them, with chance, memory and orders that change while a stage waits. Varuna's order (EuroSys'22,
section 4) comes from its rule: in equal slots every stage takes what it has in the order backward, recompute, forward.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import NamedTuple

from everstep.detect import critical
from everstep.detect.critical import Op as Kind


class Op(NamedTuple):
    kind: Kind
    stage: int
    micro_batch: int
    worker: int


class After(str, enum.Enum):
    """What a recomputation waits for beside its place in the order."""

    GRADIENT = "gradient"  # of its micro-batch, from the next stage
    NEIGHBOUR = "neighbour"  # the next stage's recomputation


class Schedule(NamedTuple):
    """Orders by worker. `swaps`: who waits for a gradient makes a forward pass first, if one is left."""

    name: str
    orders: tuple[tuple[Op, ...], ...]
    after: After = After.GRADIENT
    swaps: bool = False

    @property
    def stages(self) -> int:
        return 1 + max(op.stage for order in self.orders for op in order)


def _placed(orders: critical.Schedule) -> tuple[tuple[Op, ...], ...]:
    """The detectors' orders with each op's worker. The update is no op here: it comes once, after the pipeline."""
    return tuple(
        tuple(Op(*task, worker) for task in tasks if task.op is not Kind.UPDATE) for worker, tasks in enumerate(orders)
    )


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Warm-up of as many forward passes as stages follow, then one backward for each forward."""
    return Schedule("1f1b", _placed(critical.one_f_one_b(stages, micro_batches)))


def gpipe(stages: int, micro_batches: int, recompute: bool = True) -> Schedule:
    """All forward passes, then all backward passes from the last micro-batch on, each after its recomputation."""
    orders = _placed(critical.gpipe(stages, micro_batches))
    if recompute:
        orders = tuple(tuple(op for each in order for op in _recomputed(each)) for order in orders)
    return Schedule("gpipe", orders, After.NEIGHBOUR)


def _recomputed(op: Op) -> tuple[Op, ...]:
    return (op._replace(kind=Kind.RECOMPUTE), op) if op.kind is Kind.BACKWARD else (op,)


class _Slots:
    """A stage's work that is ready, in Varuna's slots. A backward pass takes two; its second half goes first."""

    def __init__(self) -> None:
        self.halves: deque[int] = deque()
        self.backward: deque[int] = deque()
        self.recompute: deque[int] = deque()
        self.forward: deque[int] = deque()

    def take(self) -> tuple[Kind | None, int] | None:
        if self.halves:
            return None, self.halves.popleft()
        for kind, ready in (
            (Kind.BACKWARD, self.backward),
            (Kind.RECOMPUTE, self.recompute),
            (Kind.FORWARD, self.forward),
        ):
            if ready:
                return kind, ready.popleft()
        return None


def varuna(stages: int, micro_batches: int) -> Schedule:
    """The last stage never recomputes; the others do right before the backward pass of the micro-batch."""
    slots = [_Slots() for _ in range(stages)]
    slots[0].forward.extend(range(micro_batches))
    orders: list[list[Op]] = [[] for _ in range(stages)]
    while any(taken := [slot.take() for slot in slots]):
        for stage, item in enumerate(taken):
            if item is None:
                continue
            kind, n = item
            if kind is not None:
                orders[stage].append(Op(kind, stage, n, stage))
                _release(slots, stage, kind, n)
    return Schedule("varuna", tuple(map(tuple, orders)), swaps=True)


def _release(slots: list[_Slots], stage: int, kind: Kind, n: int) -> None:
    """What may follow in the next slot."""
    match kind:
        case Kind.FORWARD if stage + 1 < len(slots):
            slots[stage + 1].forward.append(n)
        case Kind.FORWARD | Kind.RECOMPUTE:
            slots[stage].backward.append(n)
        case Kind.BACKWARD:
            slots[stage].halves.append(n)
            if stage:
                slots[stage - 1].recompute.append(n)


MAKERS = {"1f1b": one_f_one_b, "gpipe": gpipe, "varuna": varuna}

"""The critical path of one step: who does what in which order, and which of it decides how long the step takes.

A schedule is data: for each worker its operations in order, as (op, stage, micro-batch). What depends on what follows
from the operations themselves, so GPipe, 1F1B, interleaved and zero-bubble orders, a worker that took over a second
stage, or a micro-batch sent to another replica's worker are all just other data. With the predicted time of each
operation (`workload`), the longest path through this graph is the step's predicted time (ResiHP, section 3), and a
worker off the path may be slow without anybody waiting for it (`growth`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Op(enum.IntEnum):
    """Numbers 0, 1, 2 as in Varuna's published orders."""

    FORWARD = 0
    RECOMPUTE = 1  # the forward again, right before a backward that kept no activations
    BACKWARD = 2  # both gradients
    INPUT = 3  # zero bubble: gradient of the input only ..
    WEIGHT = 4  # .. and of the weights, later
    UPDATE = 5  # all-reduce and optimizer: waits for all gradients of its stage, on all workers


class Task(NamedTuple):
    """Micro-batches are numbered through all data-parallel replicas; of an UPDATE the number is the replica's."""

    op: Op
    stage: int
    micro_batch: int


Schedule = Sequence[Sequence[Task]]  # for each worker, its tasks in order
Duration = Callable[[Task, int], float]  # of a task on this worker, seconds


class Timeline(NamedTuple):
    """`begin_s` and `end_s` of each task from the step's start; `path`: the tasks that decide its end, in order."""

    begin_s: Mapping[Task, float]
    end_s: Mapping[Task, float]
    worker: Mapping[Task, int]
    path: tuple[Task, ...]

    @property
    def step_s(self) -> float:
        return self.end_s[self.path[-1]] if self.path else 0.0

    def busy_s(self, worker: int) -> float:
        """Own work of a worker: what `StepWork.work_s` would tell."""
        return sum(self.end_s[t] - self.begin_s[t] for t, w in self.worker.items() if w == worker)

    def on_path_s(self, worker: int) -> float:
        """Seconds of the step's length which are this worker's."""
        return sum(self.end_s[t] - self.begin_s[t] for t in self.path if self.worker[t] == worker)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards in reverse, worker s holding stage s."""
    forward, backward = range(micro_batches), range(micro_batches - 1, -1, -1)
    return [
        [Task(Op.FORWARD, s, m) for m in forward]
        + [Task(Op.BACKWARD, s, m) for m in backward]
        + [Task(Op.UPDATE, s, 0)]
        for s in range(stages)
    ]


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """1F1B: as many forwards ahead as there are stages behind, then forward and backward in turn."""
    return [_one_f_one_b(s, stages, micro_batches) for s in range(stages)]


def _one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Task]:
    ahead = min(stages - stage - 1, micro_batches)
    tasks = [Task(Op.FORWARD, stage, m) for m in range(ahead)]
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            tasks.append(Task(Op.FORWARD, stage, m + ahead))
        tasks.append(Task(Op.BACKWARD, stage, m))
    return [*tasks, Task(Op.UPDATE, stage, 0)]


def data_parallel(members: int) -> Schedule:
    """One stage, which every member has: the update waits for all of them."""
    tasks = [[Task(Op.FORWARD, 0, m), Task(Op.BACKWARD, 0, m)] for m in range(members)]
    tasks[0].append(Task(Op.UPDATE, 0, 0))
    return tasks


def waited_for(own_s: float, usual_s: float, others_s: float) -> float:
    """How many times as long a data-parallel step took because one member needed `own_s` instead of `usual_s`.

    `others_s`: the longest of the others. 1: it was slow, but nobody waited for it.
    """
    work_s = usual_s, others_s
    return growth(data_parallel(2), lambda t, w: work_s[w] * (t.op is Op.FORWARD), 0, own_s / usual_s)


def timeline(schedule: Schedule, duration: Duration, transfer_s: float = 0.0) -> Timeline:
    """When everything runs if each task starts as soon as it can. `transfer_s`: from one worker to another.

    Raises ValueError for a schedule that cannot run: a task twice, an order that waits for itself, or a task which
    needs one that nobody does.
    """
    graph = _Graph(schedule)
    worker = graph.worker
    begin: dict[Task, float] = {}
    end: dict[Task, float] = {}
    decided_by: dict[Task, Task | None] = {}
    place = [0] * len(schedule)
    ready = list(range(len(schedule)))
    waiting: dict[Task, list[int]] = {}
    while ready:
        w = ready.pop()
        while place[w] < len(schedule[w]):
            task = schedule[w][place[w]]
            before = schedule[w][place[w] - 1] if place[w] else None
            needed = graph.needs(task)
            missing = next((t for t in needed if t not in end), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(w)
                break
            begin[task], decided_by[task] = _start(task, before, needed, end, worker, transfer_s)
            end[task] = begin[task] + duration(task, w)
            place[w] += 1
            ready += waiting.pop(task, ())
    if len(end) < len(worker):
        stuck = {w: tasks[place[w]] for w, tasks in enumerate(schedule) if place[w] < len(tasks)}
        raise ValueError(f"this schedule cannot run: each of these waits for another: {stuck}")
    return Timeline(begin, end, worker, _path(end, decided_by))


def growth(schedule: Schedule, duration: Duration, worker: int, factor: float, transfer_s: float = 0.0) -> float:
    """How many times longer the step gets when this worker takes `factor` times as long for all it does."""
    slowed = timeline(schedule, lambda t, w: duration(t, w) * (factor if w == worker else 1.0), transfer_s)
    return slowed.step_s / timeline(schedule, duration, transfer_s).step_s


class _Graph:
    """Which worker does each task, and what must have ended before it can begin."""

    def __init__(self, schedule: Schedule) -> None:
        self.worker: dict[Task, int] = {}
        for w, tasks in enumerate(schedule):
            for task in tasks:
                if task in self.worker:
                    raise ValueError(f"{task} is in the schedule of worker {self.worker[task]} and again of worker {w}")
                self.worker[task] = w
        self._last = max((t.stage for t in self.worker), default=-1)
        self._gradients: dict[int, list[Task]] = {}
        for task in self.worker:
            if task.op in (Op.BACKWARD, Op.WEIGHT):
                self._gradients.setdefault(task.stage, []).append(task)

    def needs(self, task: Task) -> list[Task]:
        """Tasks of any worker; the order within its own worker comes on top."""
        needed = self._inputs(task)
        for t in needed:
            if t not in self.worker:
                raise ValueError(f"{task} needs {t}, which nobody does")
        return needed

    def _inputs(self, task: Task) -> list[Task]:
        op, stage, m = task
        if op is Op.FORWARD:
            return [Task(op, stage - 1, m)] if stage else []
        if op is Op.UPDATE:
            return self._gradients.get(stage, [])
        if op is Op.WEIGHT:
            return [Task(Op.INPUT, stage, m)]
        if op is Op.RECOMPUTE:
            return [Task(Op.FORWARD, stage, m)]
        return self._backward_inputs(stage, m)

    def _backward_inputs(self, stage: int, m: int) -> list[Task]:
        needed = [Task(Op.FORWARD, stage, m)]
        if (again := Task(Op.RECOMPUTE, stage, m)) in self.worker:
            needed.append(again)
        if stage < self._last:
            whole = Task(Op.BACKWARD, stage + 1, m)
            needed.append(whole if whole in self.worker else Task(Op.INPUT, stage + 1, m))
        return needed


def _start(
    task: Task,
    before: Task | None,
    needed: Sequence[Task],
    end: Mapping[Task, float],
    worker: Mapping[Task, int],
    transfer_s: float,
) -> tuple[float, Task | None]:
    """When a task can start, and the one that it waited for; None: for nothing."""
    begin, by = (end[before], before) if before is not None else (0.0, None)
    for t in needed:
        arrives = end[t] + (transfer_s if worker[t] != worker[task] else 0.0)
        if arrives > begin:
            begin, by = arrives, t
    return begin, by


def _path(end: Mapping[Task, float], decided_by: Mapping[Task, Task | None]) -> tuple[Task, ...]:
    if not end:
        return ()
    task: Task | None = max(end, key=lambda t: (end[t], t))
    path: list[Task] = []
    while task is not None:
        path.append(task)
        task = decided_by[task]
    return tuple(reversed(path))

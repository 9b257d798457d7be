"""What a run amounts to."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from everstep.core.decisions import Action
from everstep.observe.view import Bucket
from everstep.sim.scenario import DAY_S

if TYPE_CHECKING:
    from everstep.sim.engine import Engine


class Point(msgspec.Struct, frozen=True):
    """Since the point before: samples a second, and nodes that worked at its end."""

    at_s: float
    samples_per_s: float
    nodes: int


class Result(msgspec.Struct, frozen=True):
    """`shares`: of the accelerators' time, by bucket; they add up to 1. `goodput`: against a job without any fault."""

    scenario: str
    strategy: str
    seed: int
    wall_s: float
    accelerators: int
    accelerator_s: dict[str, float]
    shares: dict[str, float]
    goodput: float
    steps: int
    steps_redone: int
    samples_per_s: float
    failures: int
    failures_per_day: dict[int, int]  # how many failed -> days
    incidents: dict[str, int]
    actions: dict[str, int]
    causes: dict[str, int]
    saves: int
    down_s: dict[str, float]  # median, p90, p99, max of the times without a step
    curve: tuple[Point, ...]
    unnoticed: dict[str, int] = {}  # faults that no detector told, by kind

    @property
    def lost_accelerator_s(self) -> float:
        return self.wall_s * self.accelerators - self.accelerator_s[Bucket.PRODUCTIVE.value]

    def failures_quantile(self, level: float) -> int:
        """Fewest failures that a day does not exceed with this probability."""
        return quantile(self.failures_per_day, level)


def quantile(counts: dict[int, int], level: float) -> int:
    total, seen = sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= level * total:
            return value
    return 0


class Gathered:
    """Counts while the run goes on."""

    def __init__(self) -> None:
        self.incidents: Counter[str] = Counter()
        self.actions: Counter[Action] = Counter()
        self.causes: Counter[str] = Counter()
        self.days: Counter[int] = Counter()
        self.unnoticed: Counter[str] = Counter()
        self.down_s: list[float] = []
        self.points: list[Point] = []
        self._last = (0.0, 0.0)

    def failed(self, now: float, count: int, cause: str) -> None:
        self.causes[cause] += count
        self.days[int(now / DAY_S)] += count

    def point(self, engine: Engine) -> None:
        progress, job = engine.books.progress, engine.job
        samples = (progress.steps + progress.part) * job.samples_per_step
        at_s, before = self._last
        working = engine.books.working if engine.books.phase.name == "RUN" else 0
        if engine.now > at_s:
            self.points.append(Point(engine.now, max(0.0, (samples - before) / (engine.now - at_s)), working))
        self._last = engine.now, samples

    def result(self, engine: Engine) -> Result:
        books, scenario = engine.books, engine.scenario
        wall_s = engine.now
        held = wall_s * books.total_nodes * books.per_node
        assert abs(books.buckets.total - held) <= 1e-6 * held + 1e-6, "every accelerator-second is in one bucket"
        samples = books.progress.steps * engine.job.samples_per_step
        days = max(1, int(scenario.until_s / DAY_S))
        per_day = Counter(self.days[day] for day in range(days))
        under_way_s = wall_s - books.progress.last_s if books.phase.name == "RUN" else 0.0
        training_s = max(wall_s - under_way_s - engine.job.start_s, 1e-9)
        return Result(
            scenario.name, scenario.strategy.preset, scenario.seed, wall_s,
            books.total_nodes * books.per_node, {b.value: s for b, s in books.buckets.spent.items()},
            books.buckets.shares(), books.progress.steps * books.full_step_s / max(wall_s, 1e-9),
            books.progress.steps, books.steps_redone, samples / training_s, self.causes.total(), dict(per_day),
            dict(self.incidents), {action.value: count for action, count in self.actions.items()},
            dict(self.causes.most_common()), books.progress.saves, spread(self.down_s), tuple(self.points),
            dict(self.unnoticed),
        )  # fmt: skip


def spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    at = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: ordered[int(level * (len(ordered) - 1))] for name, level in at.items()} | {"max": ordered[-1]}

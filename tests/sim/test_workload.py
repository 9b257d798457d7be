"""Orders of pipelines against Varuna's generator, step times against published ones and closed forms."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.core.errors import UsageError
from everstep.detect import critical
from everstep.detect.critical import Op as Kind
from everstep.plan.closed import bubble_1f1b, ring_all_reduce_s
from everstep.sim.schedule import MAKERS, Op, Schedule, gpipe, one_f_one_b, varuna
from everstep.sim.workload import Pipeline, Times, all_reduce_s, play

ORDERS = sorted((Path(__file__).parent / "data/varuna").iterdir())


@pytest.mark.parametrize("path", ORDERS, ids=lambda path: path.stem)
def test_varunas_order(path: Path) -> None:
    stages, micro_batches, rank = (int(part[1:]) for part in path.stem.split("_"))
    order = varuna(stages, micro_batches).orders[rank]
    assert "".join(f"{op.kind.value},{op.micro_batch};" for op in order) == path.read_text(encoding="utf-8").strip()


@pytest.mark.parametrize(("name", "published_s"), [("varuna", 4.60), ("gpipe", 4.54)])
def test_step_times_of_varunas_simulator(name: str, published_s: float) -> None:
    """Its messages and operations have random parts of 10 and 2 ms."""
    times = Times(0.1, 0.2, 0.005, jitter_s=0.002, send_jitter_s=0.01)
    spans = [play(MAKERS[name](4, 8), times, random.Random(seed)).makespan_s + 0.3 for seed in range(40)]
    assert statistics.mean(spans) == pytest.approx(published_s, rel=0.01)


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from(sorted(MAKERS)))
@settings(max_examples=60, deadline=None)
def test_every_order_does_all_work_once_and_ends(stages: int, micro_batches: int, name: str) -> None:
    schedule = MAKERS[name](stages, micro_batches)
    for order in schedule.orders:
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert sorted(op.micro_batch for op in order if op.kind is kind) == list(range(micro_batches))
    played = play(schedule, Times(1.0, 2.0, 0.1))
    assert played.makespan_s >= max(played.busy_s)
    assert max(played.in_flight) <= (micro_batches if name != "1f1b" else min(stages, micro_batches))


@given(st.integers(1, 8), st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_bubble_of_1f1b(stages: int, micro_batches: int) -> None:
    assert play(one_f_one_b(stages, micro_batches), Times(1.0, 2.0)).bubble == pytest.approx(
        bubble_1f1b(stages, micro_batches)
    )


def test_gpipe_without_recomputing_has_the_same_bubble() -> None:
    assert play(gpipe(4, 8, recompute=False), Times(1.0, 2.0)).bubble == pytest.approx(bubble_1f1b(4, 8))


def test_a_slow_stage_is_the_pace() -> None:
    even, slow = (play(one_f_one_b(4, 32), Times(1.0, 2.0, slow=(1.0, f, 1.0, 1.0))).makespan_s for f in (1.0, 1.5))
    assert 1.35 < slow / even < 1.5


def test_orders_that_wait_for_each_other_are_told() -> None:
    forward, backward = Op(Kind.FORWARD, 0, 0, 0), Op(Kind.BACKWARD, 0, 0, 0)
    with pytest.raises(ValueError, match="backwards first cannot end"):
        play(Schedule("backwards first", ((backward, forward),)), Times(1.0, 1.0))


def test_fewer_replicas_share_all_micro_batches() -> None:
    pipeline = Pipeline(stages=4, micro_batches=12, gradient_bytes=1000, bandwidth=1e3, update_s=0.5)
    assert all_reduce_s(1000, 4, 1e3) == pytest.approx(ring_all_reduce_s(1000, 1e3, 4))
    assert pipeline.step_s(4, 4) == pytest.approx((12 + 3) * 0.3 + 1.5 + 0.5)
    assert pipeline.step_s(3, 4) == pytest.approx((16 + 3) * 0.3 + 4 / 3 + 0.5)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_the_detectors_longest_path_is_as_long(name: str) -> None:
    """Two computations of one graph: this one lets time run, `detect.critical` follows the order of dependencies."""
    critical = pytest.importorskip("everstep.detect.critical")
    chance = random.Random(7)
    for _ in range(20):
        stages, micro_batches = chance.randint(1, 6), chance.randint(1, 12)
        slow = tuple(chance.uniform(1, 2) for _ in range(stages))
        ours = MAKERS[name] if name == "1f1b" else (lambda p, m: gpipe(p, m, recompute=False))
        theirs = critical.one_f_one_b if name == "1f1b" else critical.gpipe

        def seconds(task: Any, worker: int, slow: tuple[float, ...] = slow) -> float:
            return {0: 1.0, 2: 2.0}.get(task.op, 0.0) * slow[worker]

        line = critical.timeline(theirs(stages, micro_batches), seconds, 0.1)
        played = play(ours(stages, micro_batches), Times(1.0, 2.0, 0.1, slow=slow))
        assert played.makespan_s == pytest.approx(line.step_s)


@pytest.mark.parametrize("orders", [critical.one_f_one_b, critical.gpipe])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (4, 2), (4, 8)])
def test_time_that_runs_ends_where_the_critical_path_does(
    orders: Callable[[int, int], critical.Schedule], stages: int, micro_batches: int
) -> None:
    """Two ways to the same step: events here, the longest path in the detectors."""
    ours = one_f_one_b if orders is critical.one_f_one_b else partial(gpipe, recompute=False)
    seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.5, Kind.UPDATE: 0.0}
    path = critical.timeline(orders(stages, micro_batches), lambda task, _: seconds[task.op], transfer_s=0.25)
    played = play(ours(stages, micro_batches), Times(1.0, 2.5, 0.25))
    assert played.makespan_s == pytest.approx(path.step_s)
    assert played.busy_s[0] == pytest.approx(path.busy_s(0))


def test_more_passes_than_can_be_played_are_refused() -> None:
    with pytest.raises(UsageError, match="16 stages x 100000000 micro-batches"):
        Pipeline(stages=16, micro_batches=10**8).played(10**8)

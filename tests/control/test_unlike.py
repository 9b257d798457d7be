"""Machines that differ, from heartbeats: an alert once it lasts; uneven work and the first role's node are no sign."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from everstep.control.job import Job
from everstep.control.unlike import CONTINUITY, LEAST_NODES, SAMPLE_S, WINDOW, UnlikeWatch
from everstep.core import events as e
from everstep.core.formation import Formation, Seat
from everstep.core.types import EpochPlan, JobSpec, Member, NodeProgress, Phase, WorkerProgress
from everstep.core.work import StepWork

Factor = Callable[[int, int], float]  # (sample, node) -> times the usual
ENOUGH = WINDOW + CONTINUITY


class Cluster:
    """Nodes with two workers each, in one formation whose first role is on node 0."""

    def __init__(self, nodes: int = 8) -> None:
        self.watch, self.chance, self.records = UnlikeWatch(), random.Random(1), list[e.Record]()
        members = tuple(Member(f"n{n}", "a", "127.0.0.1", n, 2 * n, 2) for n in range(nodes))
        seats = tuple(Seat(f"n{n}/{k}#0", f"n{n}", f"h{n}", "") for n in range(nodes) for k in range(2))
        plan = EpochPlan(1, members, 2 * nodes, "127.0.0.1", 1, 0)
        self.job = replace(Job(JobSpec("demo")), epoch=1, plan=plan, formation=Formation(1, seats, False, 0))
        self.at, self.cpu = 0, [0.0] * (2 * nodes)

    def run(self, samples: int, memory: Factor, cpu: Factor, tokens: float = 0.0) -> list[e.Record]:
        before = len(self.records)
        for _ in range(samples):
            self.at += 1
            assert self.job.plan is not None
            for n, member in enumerate(self.job.plan.members):
                workers = tuple(self.worker(2 * n + k, memory(self.at, n), cpu(self.at, n), tokens) for k in range(2))
                beat = NodeProgress(member.node, "a", 1, 0.0, workers)
                self.records += self.watch.saw(beat, self.job, self.at * SAMPLE_S)
                self.watch.wait()
        return self.records[before:]

    def worker(self, rank: int, memory: float, cpu: float, tokens: float) -> WorkerProgress:
        self.cpu[rank] += 10 * 0.2 * cpu * self.chance.gauss(1, 0.05)
        rss = int(1e9 * memory * self.chance.gauss(1, 0.02))
        step = 10 * self.at
        work = (StepWork(step, 0.3, tokens=tokens),)
        return WorkerProgress(
            rank, rank % 2, step, step, Phase.TRAIN, 0, 0, 0, rss_bytes=rss, cpu_s=self.cpu[rank], work=work
        )


def usual(_sample: int, _node: int) -> float:
    return 1.0


def only(node: int, factor: float = 2.0, samples: range = range(10**6)) -> Factor:
    return lambda sample, n: factor if n == node and sample in samples else 1.0


@pytest.mark.parametrize("metric", ["resident memory", "processor time"])
def test_a_machine_that_differs_is_told_once(metric: str) -> None:
    cluster, other = Cluster(), only(3)
    assert not cluster.run(ENOUGH, usual, usual)
    memory, cpu = (other, usual) if metric == "resident memory" else (usual, other)
    (alert,) = cluster.run(3 * ENOUGH, memory, cpu)
    assert isinstance(alert, e.Alert) and (alert.kind, alert.node) == ("machine-differs", "n3")
    assert metric in alert.text


@pytest.mark.parametrize("what", ["the first role's", "a little", "a while", "uneven work", "few nodes"])
def test_what_is_no_sign(what: str) -> None:
    cluster = Cluster(LEAST_NODES - 1 if what == "few nodes" else 8)
    other = {
        "the first role's": only(0),
        "a little": only(3, 1.2),
        "a while": only(3, samples=range(40, 40 + CONTINUITY // 2)),
    }.get(what, only(3))
    memory, tokens = (usual, 100.0) if what == "uneven work" else (other, 0.0)
    assert not cluster.run(3 * ENOUGH, memory, other, tokens)

"""Machines that differ from their peers, by what heartbeats tell of memory and processor time: an alert, once it lasts.

Peers are the nodes with as many acting workers; the node of the first role has more to do, and is nobody's peer. Own
work time is the straggler detector's: it knows the lengths of sequences. For the same reason processor time counts only
where workers tell of no lengths. With fewer nodes than LEAST_NODES nothing is looked at, and numpy is not imported.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep.control import seats
from everstep.control.job import Job
from everstep.core import events as e
from everstep.core.types import NodeProgress, WorkerProgress

if TYPE_CHECKING:
    from everstep.detect.similar import Similarity

DETECTOR = "everstep.detect.similar"
METRICS = ("resident memory of a worker (bytes)", "processor time of a step (s)")
LEAST_NODES = 5  # four peers, and the node of the first role
SAMPLE_S = 5.0
WINDOW, CONTINUITY = 8, 24  # samples: averaged, and in a row: two minutes
LEAST = 0.3  # of the usual value: below it machines may differ as they like


class Count(NamedTuple):
    """A worker's counters at the last sample."""

    step: int
    cpu_s: float


class UnlikeWatch:
    """Feed it heartbeats of workers that act."""

    def __init__(self) -> None:
        self._module: Any = None
        self._loading: threading.Thread | None = None
        self._job: tuple[int, int] = (0, 0)  # epoch, formation
        self._order: dict[str, int] = {}  # peers and others: the detector's machines
        self._groups: list[int] = []
        self._detector: Similarity | None = None
        self._newest: dict[str, tuple[WorkerProgress, ...]] = {}
        self._counted: dict[int, Count] = {}  # by rank
        self._uneven = False  # somebody told of lengths
        self._sampled_s = -math.inf

    def saw(self, message: NodeProgress, job: Job, now: float) -> list[e.Record]:
        """One heartbeat of this epoch."""
        if job.plan is None or len(job.plan.members) < LEAST_NODES:
            return []
        formed = job.epoch, job.formation.epoch if job.formation is not None else 0
        if formed != self._job:
            self._begin(job)
            self._job = formed
        if message.node in self._order:
            self._newest[message.node] = message.workers
            self._uneven |= any(work.tokens for worker in message.workers for work in worker.work)
        if now - self._sampled_s < SAMPLE_S or not self._loaded():
            return []
        self._sampled_s = now
        return self._sample()

    def wait(self) -> None:
        """Until the detector is loaded: for who has all the time."""
        if self._loading is not None:
            self._loading.join()

    def _begin(self, job: Job) -> None:
        """Other members: what was learned of one does not hold for another."""
        assert job.plan is not None
        acting = seats.acting(job)
        places = {
            m.node: sum(r in acting for r in range(m.first_rank, m.first_rank + m.slots)) for m in job.plan.members
        }
        first = seats.place(job.formation.seats[0].worker)[0] if job.formation is not None else job.plan.members[0].node
        self._order = {node: number for number, node in enumerate(sorted(places))}
        self._groups = [-1 if node == first else places[node] for node in self._order]
        self._detector = None
        self._newest.clear()
        self._counted.clear()

    def _loaded(self) -> bool:
        """Importing numpy takes a while, in which the controller has more urgent things to do."""
        if self._loading is None:
            self._loading = threading.Thread(target=self._load, name="everstep-unlike", daemon=True)
            self._loading.start()
        return self._module is not None

    def _load(self) -> None:
        try:
            module = importlib.import_module(DETECTOR)
            module.sample_of(())  # this is what imports numpy
            self._module = module
        except ImportError:  # a controller without numpy: the watch over slow workers says so
            return

    def _sample(self) -> list[e.Record]:
        if max(Counter(self._groups).values()) < self._module.LEAST_PEERS:
            return []
        if self._detector is None:
            options = self._module.Options(window=WINDOW, continuity=CONTINUITY, least=LEAST)
            self._detector = self._module.Similarity(METRICS, self._groups, options)
        told = [self._of(self._newest.get(node, ())) for node in self._order]
        sample = self._module.sample_of(list(zip(*told, strict=True)))
        self._newest.clear()  # who says nothing until the next sample is not known
        verdict = self._module.verdict_of(self._detector.saw(sample), list(self._order))
        if verdict is None:
            return []
        return [e.Alert("machine-differs", verdict.why, verdict.culprits[0].node)]

    def _of(self, workers: tuple[WorkerProgress, ...]) -> tuple[float, float]:
        """Of one node since the last sample, a worker: its memory, its processor time a step."""
        memory = [float(worker.rss_bytes) for worker in workers if worker.rss_bytes]
        times = []
        for worker in workers:
            before = self._counted.get(worker.rank)
            self._counted[worker.rank] = Count(worker.step, worker.cpu_s)
            if before is not None and worker.step > before.step and worker.cpu_s >= before.cpu_s:
                times.append((worker.cpu_s - before.cpu_s) / (worker.step - before.step))
        return _mean(memory), math.nan if self._uneven else _mean(times)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan

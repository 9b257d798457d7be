"""What people see of a running job beside its steps: the values that its script logs, and how each worker does.

A fold over heartbeats, which are not journalled, into two records that are, seldom: a job of a month keeps them all.
Both are up to date before an incident. What a rollback threw away is not told, however late it comes.
"""

from __future__ import annotations

import math

import msgspec

from everstep.control.job import Job
from everstep.control.loads import Loads
from everstep.core import events as e
from everstep.core.logged import Logged
from everstep.core.types import NodeProgress, Phase, WorkerProgress

METRICS_S = 1.0  # at most one MetricsSeen in this time
WORKERS_S, WORKERS_PER_S = 10.0, 16  # one WorkersSeen in the first, or when so many of its workers a second are written
FIRST_S = 2.0  # after its first steps an epoch has its first
LEAST_S = 1.0  # between two of them, whatever happens
STALE_S = 10.0  # a worker that was not heard for so long is not told of
DIGITS = 3  # of a time: enough for a colour


class _Worker(msgspec.Struct):
    """One rank since the last record. `own_s`: in the steps before."""

    step: int = 0
    done: bool = False
    heard_s: float = -math.inf
    sum_s: float = 0.0
    num_steps: int = 0
    own_s: float = -1.0
    rss_bytes: int = 0
    kept_step: int = -1
    logged: Logged | None = None


class Ticks:
    """Feed it the heartbeats of the running plan; `flush` before what ends something."""

    def __init__(self) -> None:
        self.loads = Loads()
        self._epoch = 0
        self._workers: dict[int, _Worker] = {}
        self._told: Logged | None = None
        self._told_s = -math.inf
        self._seen_s = -math.inf  # the last WorkersSeen
        self._due_s = math.inf  # the next
        self._fresh = True  # no step was seen in this epoch

    def saw(self, message: NodeProgress, job: Job, now: float) -> list[e.Record]:
        if message.epoch != self._epoch:
            self._epoch, self._workers = message.epoch, {}
            self._due_s, self._fresh = now + WORKERS_S, True
        for worker in message.workers:
            self._heard(worker, now)
        return self._records(job, now, METRICS_S, self._due_s)

    def flush(self, job: Job, now: float) -> list[e.Record]:
        return [*self._records(job, now, 0.0, self._seen_s + LEAST_S), *self.loads.flush(now)]

    def _heard(self, worker: WorkerProgress, now: float) -> None:
        known = self._workers.setdefault(worker.rank, _Worker())
        if worker.step < known.step:  # another process
            known = self._workers[worker.rank] = _Worker()
        known.step, known.done = worker.step, worker.phase is Phase.DONE
        known.heard_s, known.rss_bytes, known.kept_step = now, worker.rss_bytes, worker.kept_step
        known.sum_s += sum(work.work_s for work in worker.work)
        known.num_steps += len(worker.work)
        if self._fresh and worker.work:
            self._fresh, self._due_s = False, min(self._due_s, now + FIRST_S)
        if worker.logged is not None:
            known.logged = worker.logged

    def _records(self, job: Job, now: float, metrics_every_s: float, workers_due_s: float) -> list[e.Record]:
        records: list[e.Record] = []
        newest = self._newest(job)
        if newest is not None and newest != self._told and now - self._told_s >= metrics_every_s:
            self._told, self._told_s = newest, now
            records.append(e.MetricsSeen(newest.step, dict(newest.values)))
        if now >= workers_due_s and any(worker.heard_s > self._seen_s for worker in self._workers.values()):
            self._seen_s, self._due_s = now, now + max(WORKERS_S, len(self._workers) / WORKERS_PER_S)
            records.append(self._how_they_do(now))
        return records

    def _newest(self, job: Job) -> Logged | None:
        """Of the first member of the newest formation that told any; without a session of the first rank that does, and
        still runs."""
        told = [(w.logged, not w.done, -rank) for rank, w in self._workers.items() if w.logged is not None]
        if not told:
            return None
        logged, *_ = max(told, key=lambda each: (each[0].epoch, *each[1:]))
        lost = any(logged.epoch < back.epoch and logged.step > back.step for back in job.rollbacks if logged.epoch)
        return None if lost or not logged.values else logged

    def _how_they_do(self, now: float) -> e.WorkersSeen:
        """What is not known of a rank is -1, or 0 bytes."""
        ranks = [self._workers.get(rank, _Worker()) for rank in range(max(self._workers) + 1)]
        for worker in ranks:
            if worker.num_steps:
                worker.own_s = float(f"{worker.sum_s / worker.num_steps:.{DIGITS}g}")
                worker.sum_s, worker.num_steps = 0.0, 0
        ranks = [worker if now - worker.heard_s <= STALE_S else _Worker() for worker in ranks]
        return e.WorkersSeen(
            self._epoch,
            tuple(worker.own_s for worker in ranks),
            tuple(round(worker.rss_bytes, -6) for worker in ranks),
            tuple(worker.kept_step for worker in ranks),
        )

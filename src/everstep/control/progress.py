"""Progress of the running epoch, folded from the heartbeats: what the journal, the status and a stop need.

Ages in a heartbeat become times on the controller's clock on arrival, so clocks of hosts are never compared.
"""

from __future__ import annotations

import math
from collections import deque

from everstep.core.events import StepsSeen
from everstep.core.types import NodeProgress, Phase, WorkerProgress

RECORD_S = 1.0  # at most one StepsSeen in this time
STOP_LEAD_S = 0.3  # a stop aligned to a step leaves the order this long to reach every worker
PACES = 64  # step times remembered; the quickest tells how far the workers may have come since they were heard


class EpochProgress:
    """The newest heartbeat of each member of one epoch, with when it came."""

    def __init__(self, epoch: int, world_size: int) -> None:
        self.epoch = epoch
        self.world_size = world_size
        self.workers: dict[int, WorkerProgress] = {}
        self.seen_s: dict[int, float] = {}
        self.saving_s: dict[int, float] = {}  # that its steps took for saves so far
        self.twice_s: dict[int, float] = {}  # and for passes that were not committed
        self.step_at_s = 0.0  # when the slowest worker made its last step
        self.first_step_at_s = -1.0  # when the last worker made its first step
        self.paces_s: deque[float] = deque(maxlen=PACES)
        self._recorded_s = -math.inf
        self._recorded = (0, 0)  # steps and finished saves

    def add(self, message: NodeProgress, now: float) -> None:
        for worker in message.workers:
            self._pace(worker, now)
            saving_s = sum(work.save_s for work in worker.work)
            self.saving_s[worker.rank] = self.saving_s.get(worker.rank, 0.0) + saving_s
            twice_s = sum(work.twice_s for work in worker.work)
            self.twice_s[worker.rank] = self.twice_s.get(worker.rank, 0.0) + twice_s
            self.workers[worker.rank] = worker
            self.seen_s[worker.rank] = now
        if not self.complete or self.step < 1:
            return
        slowest = self.step  # who is ahead of it was heard later, or does not wait for the others
        times = [self.seen_s[r] - w.step_age_s for r, w in self.workers.items() if w.step == slowest]
        firsts = [self.seen_s[r] - w.first_step_age_s for r, w in self.workers.items()]
        if self.first_step_at_s < 0:
            self.first_step_at_s = max(firsts)
        self.step_at_s = max(self.step_at_s, *times)

    @property
    def complete(self) -> bool:
        return 0 < self.world_size == len(self.workers)

    @property
    def step(self) -> int:
        """Steps of the slowest worker."""
        return min((w.step for w in self.workers.values()), default=0) if self.complete else 0

    @property
    def total_step(self) -> int:
        return min((w.total_step for w in self.workers.values()), default=-1) if self.complete else -1

    @property
    def saves(self) -> int:
        """Saves finished by the worker that made most."""
        return max((w.saves for w in self.workers.values()), default=0)

    def _pace(self, worker: WorkerProgress, now: float) -> None:
        """Mean duration of the steps since the worker was last heard, or since its first one."""
        known = self.workers.get(worker.rank)
        last_s = now - worker.step_age_s
        if known is not None and known.step >= 1:
            since_s, steps = self.seen_s[worker.rank] - known.step_age_s, worker.step - known.step
            steps = min(steps, _told(worker)) if worker.work else steps
        else:
            since_s, steps = now - worker.first_step_age_s, min(worker.step, _told(worker)) - 1
        if steps > 0 and last_s > since_s:
            least_s = min((work.work_s for work in worker.work), default=0.0)  # a newcomer's count jumps to the job's
            self.paces_s.append(max(least_s, (last_s - since_s) / steps))

    def record(self, now: float) -> list[StepsSeen]:
        """What the journal should know, when it is time for it: the first step at once, later once a second."""
        if self.step == self._recorded[0]:
            return []
        if self._recorded[0] and now - self._recorded_s < RECORD_S:
            return []
        self._recorded_s, self._recorded = now, (self.step, self.saves)
        return [self.snapshot()]

    def last(self) -> list[StepsSeen]:
        """The final word on this epoch, if the journal lacks it."""
        return [self.snapshot()] if self.step and (self.step, self.saves) != self._recorded else []

    def snapshot(self) -> StepsSeen:
        workers = self.workers.values()
        return StepsSeen(
            epoch=self.epoch,
            step=self.step,
            total_step=self.total_step,
            step_at_s=self.step_at_s,
            first_step_at_s=self.first_step_at_s,
            saves=self.saves,
            saved_step=max((w.saved_step for w in workers), default=-1),
            rss_bytes=max((w.rss_bytes for w in workers), default=0),
            stall_s=round(max(self.saving_s.values(), default=0.0), 4),  # the others wait for the slowest
            twice_s=round(max(self.twice_s.values(), default=0.0), 4),
        )

    def common_stop_step(self, now: float) -> int:
        """A step that every worker can still reach together, or 0: not in step, or not stepping yet.

        Each was heard a while ago, another one at another time: where it may be by now is what counts.
        """
        workers = self.workers.values()
        if not self.complete or self.step < 2 or not self.paces_s:
            return 0
        if any(w.stopped or w.phase in (Phase.START, Phase.DONE) for w in workers):
            return 0
        pace_s = min(self.paces_s)
        by_now = [w.step + (now - self.seen_s[w.rank]) / pace_s for w in workers]
        if max(by_now) - min(by_now) > 2 + STOP_LEAD_S / pace_s:
            return 0
        return math.ceil(max(by_now) + STOP_LEAD_S / pace_s) + 1


def _told(worker: WorkerProgress) -> int:
    """Steps that its newest message tells of: a newcomer's count jumps to the job's, and it made none of those."""
    numbers = [work.step for work in worker.work]
    every = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    return numbers[-1] - numbers[0] + every if numbers else 0

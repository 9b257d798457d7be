"""Progress of the running epoch, folded from the heartbeats: what the journal, the status and a stop need.

Ages in a heartbeat become times on the controller's clock on arrival, so clocks of hosts are never compared.
"""

from __future__ import annotations

import math

from everstep.core.events import StepsSeen
from everstep.core.types import NodeProgress, Phase, WorkerProgress

RECORD_S = 1.0  # at most one StepsSeen in this time
STOP_LEAD_S = 0.5  # a stop aligned to a step leaves the order this long to reach every worker


class EpochProgress:
    """The newest heartbeat of each member of one epoch, with when it came."""

    def __init__(self, epoch: int, world_size: int) -> None:
        self.epoch = epoch
        self.world_size = world_size
        self.workers: dict[int, WorkerProgress] = {}
        self.seen_s: dict[int, float] = {}
        self.step_at_s = 0.0  # when the slowest worker made its last step
        self.first_step_at_s = -1.0  # when the last worker made its first step
        self._recorded_s = -math.inf
        self._recorded_step = 0

    def add(self, message: NodeProgress, now: float) -> None:
        for worker in message.workers:
            self.workers[worker.rank] = worker
            self.seen_s[worker.rank] = now
        if not self.complete or self.step < 1:
            return
        times = [self.seen_s[r] - w.step_age_s for r, w in self.workers.items()]
        firsts = [self.seen_s[r] - w.first_step_age_s for r, w in self.workers.items()]
        if self.first_step_at_s < 0:
            self.first_step_at_s = max(firsts)
        self.step_at_s = max(times)

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

    def step_s(self) -> float:
        """Mean duration of this epoch's steps so far, seconds; 0 before the second."""
        steps = self.step - 1
        return (self.step_at_s - self.first_step_at_s) / steps if steps > 0 else 0.0

    def record(self, now: float) -> StepsSeen | None:
        """What the journal should know, when it is time for it: the first step at once, later once a second."""
        if self.step == self._recorded_step:
            return None
        if self._recorded_step and now - self._recorded_s < RECORD_S:
            return None
        self._recorded_s, self._recorded_step = now, self.step
        return self.snapshot()

    def last(self) -> StepsSeen | None:
        """The final word on this epoch, if the journal lacks it."""
        return self.snapshot() if self.step != self._recorded_step else None

    def snapshot(self) -> StepsSeen:
        workers = self.workers.values()
        return StepsSeen(
            epoch=self.epoch,
            step=self.step,
            total_step=self.total_step,
            step_at_s=self.step_at_s,
            first_step_at_s=self.first_step_at_s,
            saves=max((w.saves for w in workers), default=0),
            saved_step=max((w.saved_step for w in workers), default=-1),
            rss_bytes=max((w.rss_bytes for w in workers), default=0),
        )

    def common_stop_step(self) -> int:
        """A step that every worker can still reach together, or 0: not in step, or not stepping now."""
        steps = [w.step for w in self.workers.values()]
        training = all(w.phase is Phase.TRAIN and not w.stopped for w in self.workers.values())
        duration = self.step_s()
        if not self.complete or min(steps) < 2 or max(steps) - min(steps) > 1 or not training or duration <= 0:
            return 0
        return max(steps) + 1 + math.ceil(STOP_LEAD_S / duration)

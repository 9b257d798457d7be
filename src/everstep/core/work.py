"""What one worker did itself in one step: its own time, without waiting for others, and how much work that was.

In synchronous training everybody's step takes as long as the slowest worker's, and the slowest waits least, so the
length of a step names nobody. Own time does. And own time follows the lengths of the sequences that a worker was
given, so it travels with them: N, the sum of their lengths, and the sum of their squares (ResiHP, section 3: time of
a micro-batch = alpha N + beta sum l^2). Used by `detect/straggler.py`; carried in heartbeats.
"""

from __future__ import annotations

import msgspec


class StepWork(msgspec.Struct, frozen=True):
    """One worker's step. Seconds on its own clock; `data_s` and `save_s` are part of `work_s`."""

    step: int
    work_s: float  # from the start of the step to its end, less the time spent in waits for other workers
    data_s: float = 0.0  # of it: in the data loader
    save_s: float = 0.0  # of it: in saves
    tokens: float = 0.0  # N: sum of the lengths of the step's sequences; 0: not told
    squares: float = 0.0  # sum of the squares of their lengths; 0: not told
    twice_s: float = 0.0  # beside `work_s`, and with waits: passes of an audited step before the one that counts

    @property
    def compute_s(self) -> float:
        """What is left of the work outside of data loader and saves: forward, backward, optimizer."""
        return max(0.0, self.work_s - self.data_s - self.save_s)

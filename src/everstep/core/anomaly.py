"""What a session tells of a metric that is out of line: a loss that jumps, gradients that are no numbers."""

from __future__ import annotations

import msgspec


class Anomaly(msgspec.Struct, frozen=True):
    """One metric, from the step at which it left its usual range until it is back. What is told later replaces it."""

    number: int  # of its session, counted from 1
    metric: str
    step: int  # of the job, counted from 1
    cause: str  # spike, non-finite; repeated-... when that came again; shift: it stays where it is
    why: str  # the sentence for a person
    confidence: float
    value: float | None = None  # None: not finite
    low: float | None = None  # what it usually is: least and greatest of the last ordinary values
    high: float | None = None
    over: int = 0  # the step at which it was over; 0: it is not

    @property
    def lasting(self) -> bool:
        """More than chance: a person should look."""
        return self.cause == "shift" or self.cause.startswith("repeated")

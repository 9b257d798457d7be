"""Where the accelerators' time went: every accelerator-second is in exactly one bucket."""

from __future__ import annotations

from everstep.observe.view import Bucket


class Buckets:
    """Accelerator-seconds by what they were spent on."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(Bucket, 0.0)

    def add(self, bucket: Bucket, accelerator_s: float) -> None:
        self.spent[bucket] += accelerator_s

    def move(self, source: Bucket, target: Bucket, accelerator_s: float) -> None:
        """What was booked turned out to be something else."""
        self.spent[source] -= accelerator_s
        self.spent[target] += accelerator_s

    @property
    def total(self) -> float:
        return sum(self.spent.values())

    def shares(self) -> dict[str, float]:
        total = self.total or 1.0
        return {bucket.value: spent / total for bucket, spent in self.spent.items()}

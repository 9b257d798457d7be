"""A session's reports on their way to its agent, with what its metrics showed.

Its metrics are judged where they are: what travels is only what is out of line, and that it is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from everstep.core.formation import SessionReport
from everstep.detect.metering import Metering


class Metered:
    """In place of `report`, which tells the agent. Metrics are for the main thread, reports for any."""

    def __init__(self, report: Callable[[SessionReport], None]) -> None:
        self._report = report
        self._meter = Metering()
        self._last: SessionReport | None = None
        self._lock = threading.Lock()

    def __call__(self, report: SessionReport) -> None:
        with self._lock:
            self._last = report
            self._report(replace(report, anomalies=self._meter.told))

    def saw(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a committed step, counted from 1."""
        if self._meter.saw(step, values) and self._last is not None:
            self(self._last)

    def gradients(self, step: int, finite: bool) -> None:
        """Of a committed step: whether the gradients that the optimizer was called for were."""
        if self._meter.gradients(step, finite) and self._last is not None:
            self(self._last)

"""What a session's metrics lead to: they are written where the user wants them, people see them, detectors judge them.

They are judged where they are: what reports to the agent carry is only what is out of line, and that it is over. The
values themselves go another way (`core.logged`): a report changes the state of the job, and one that logs does not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from msgspec.structs import replace

from everstep.core.formation import SessionReport
from everstep.detect.metering import Metering
from everstep.probe import boot
from everstep.train.metrics import Sink


class Metered:
    """In place of `report`, which tells the agent. Metrics are for the main thread, reports for any."""

    def __init__(self, report: Callable[[SessionReport], None], sink: Sink) -> None:
        self._report = report
        self._sink = sink
        self._meter = Metering()
        self._last: SessionReport | None = None
        self._lock = threading.Lock()

    def __call__(self, report: SessionReport) -> None:
        with self._lock:
            self._last = report
            self._report(replace(report, anomalies=self._meter.told))

    def saw(self, step: int, values: dict[str, float], epoch: int) -> None:
        """The metrics of a step, counted from 1, that was committed in this epoch."""
        if self._meter.saw(step, values) and self._last is not None:
            self(self._last)
        self._sink.write(step, values, epoch)
        boot.logged(epoch, step, values)  # last: nobody sees what the file may lack for ever

    def gradients(self, step: int, finite: bool) -> None:
        """Of a committed step: whether the gradients that the optimizer was called for were."""
        if self._meter.gradients(step, finite) and self._last is not None:
            self(self._last)

    def close(self) -> None:
        self._sink.close()

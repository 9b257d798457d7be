"""The newest values that a script logged, for its agent: a few microseconds each time, however often it logs."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from everstep.core.logged import Logged, encode, finite
from everstep.core.page import VALUES_BYTES, Page


class Values:
    """Of one process. Several calls within one step add up."""

    def __init__(self) -> None:
        self._of = (-1, -1)  # epoch, step
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()  # a script may have a thread for its trackers

    @property
    def of_session(self) -> bool:
        return self._of[0] > 0

    def tell(self, page: Page, epoch: int, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            if self._of != (epoch, step):
                self._of, self._values = (epoch, step), {}
            self._values.update(finite(values))
            page.put_values(encode(Logged(epoch, step, self._values), VALUES_BYTES))

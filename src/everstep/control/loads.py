"""How busy nodes and workers are, from their agents' samples into the journal: seldom, all nodes in one record.

A record tells the mean since the one before, so that a rare one misses nothing that lasts. A month of 1,000 workers
keeps them all: one in 250 s there, and one in 10 s up to 40 workers; closed segments keep fewer (`compaction`).
"""

from __future__ import annotations

import math
from collections import deque

from everstep.core import events as e
from everstep.core.load import NodeLoad, mean
from everstep.core.types import NodeProgress

EVERY_S, WORKERS_PER_S = 10.0, 4  # a record in the first, or when so many of its workers a second are written
FIRST_S = 6.0  # from the first sample: by then all nodes have sent one
LEAST_S = 5.0  # between two of them, whatever happens
MOST_SAMPLES = 64  # of a node in one record


class Loads:
    """Feed it all heartbeats, also those of spares; `flush` before what ends something."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[NodeLoad]] = {}  # since the last record
        self._told_s = -math.inf
        self._due_s = -1.0  # not yet known

    def saw(self, message: NodeProgress, now: float) -> list[e.Record]:
        if message.load is not None:
            samples = self._samples.setdefault(message.node, deque(maxlen=MOST_SAMPLES))
            samples.append(message.load)
            if self._due_s < 0:
                self._due_s = now + FIRST_S
        return self._record(now) if self._samples and now >= self._due_s else []

    def flush(self, now: float) -> list[e.Record]:
        return self._record(now) if self._samples and now >= self._told_s + LEAST_S else []

    def _record(self, now: float) -> list[e.Record]:
        """Of all that said something since the last one: who is silent is not known."""
        nodes = {node: mean(samples) for node, samples in sorted(self._samples.items())}
        workers = sum(max(1, len(load.workers)) for load in nodes.values())
        self._samples.clear()
        self._told_s, self._due_s = now, now + max(EVERY_S, workers / WORKERS_PER_S)
        return [e.LoadSeen(nodes)]

"""A job's state from its journal: what a new controller begins with.

Inputs are in the journal before they are acted on, so the last one's records may be missing: its controller died in
between. The machine is deterministic, so they are made again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.control import lifecycle
from everstep.control.job import Job, Note
from everstep.core import events as e
from everstep.core.types import JobSpec


class Replayed(msgspec.Struct, frozen=True):
    """`term`: lives of the controller so far. `missing`: records that the last life owed the journal."""

    job: Job
    term: int
    missing: tuple[e.Record, ...]


def replay(spec: JobSpec, entries: Iterable[e.Entry]) -> Replayed:
    job, term = Job(spec), 0
    owed: list[e.Record] = []
    for entry in entries:
        if isinstance(entry.event, e.Input):
            job, commands = lifecycle.step(job, entry.event, entry.t_s)
            owed = [command.record for command in commands if isinstance(command, Note)]
        elif entry.event in owed:
            owed.remove(entry.event)
        if isinstance(entry.event, e.ControllerStarted):
            term = entry.event.term
    return Replayed(job, term, tuple(owed))

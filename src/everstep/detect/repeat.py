"""Crash loops: the same failure at the same step, so often in a row that another restart would only repeat it.

What makes two failures the same is their kind, cause and message without the parts that differ by rank and attempt,
and the step. The step is the optimizer's own count where it keeps one: an attempt that failed at its 100th step and
the next, which resumed at 95 and failed at its 5th, failed at the same place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from everstep.core.events import WorkerEnded
from everstep.core.types import ExitCause

# In this order: each leaves fewer digits to the next. "cuda:3", "node7" and line numbers lose their digits as well.
_VARIABLE = (
    (re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"0x[0-9a-f]+", re.IGNORECASE), "<address>"),
    (re.compile(r"/tmp/\S+"), "<file>"),
    (re.compile(r"\d+(?:\.\d+)*(?:e[+-]?\d+)?", re.IGNORECASE), "#"),
)
MAX_MESSAGE = 500


class Marked(Protocol):
    """A failure reduced to what makes it the same as another."""

    @property
    def what(self) -> str: ...

    @property
    def step(self) -> int: ...


class Signature(msgspec.Struct, frozen=True):
    """Kind, cause and normalised message in one text, and the step (-1: unknown)."""

    what: str
    step: int


def normalised(message: str) -> str:
    """The message without numbers, addresses, temporary files and spacing."""
    for pattern, replacement in _VARIABLE:
        message = pattern.sub(replacement, message)
    return " ".join(message.split())[:MAX_MESSAGE]


def signature(kind: str, why: str, first: WorkerEnded | None) -> Signature:
    """Of an incident: `first` is the worker that caused it, None when no worker did (`why` tells instead)."""
    if first is None:
        return Signature(f"{kind}: {normalised(why)}", -1)
    end = first.exit
    step = end.total_step if end.total_step >= 0 else end.step
    if kind == "hang":  # how it ended is our own doing; where it hung is what counts
        return Signature("hang", step)
    if end.cause is ExitCause.ERROR:  # the message tells; the status may not be known yet
        return Signature(f"{kind}: {end.cause.value} {normalised(end.message)}", step)
    return Signature(f"{kind}: {end.cause.value} {end.signal or end.code or 0} {normalised(end.message)}", step)


def repeats(signatures: Sequence[Marked], limit: int) -> bool:
    """Whether the last `limit` failures were the same. `limit` 1 means that no failure is worth a restart."""
    last = [(s.what, s.step) for s in signatures[-limit:]]
    return len(last) == limit and len(set(last)) == 1

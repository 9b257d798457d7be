"""A session's part in audits (`detect.audit`): when the next one is due, and what is made of what it finds.

An audited step is computed twice, and committed once: the first pass, with the shares handed on, ends at the vote,
where the step is undone as after a fault. The machine (`train.commit`) holds what all told, and says what was found.
"""

from __future__ import annotations

import functools
import platform
import sys
import time
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from msgspec.structs import replace

from everstep.detect.audit import Outcome
from everstep.plan.checking import AUDIT_BOUND, AUDIT_STEPS, Pace
from everstep.train.protocol import Audited, Said

GIVE_UP = 3  # times that somebody was wrong and could not be named, without an audit in between that came out alike


class Position(Protocol):
    """The engine's words."""

    @property
    def role(self) -> int: ...
    @property
    def num_members(self) -> int: ...
    @property
    def shards(self) -> int: ...
    @property
    def committed(self) -> int: ...
    @property
    def turn(self) -> int: ...
    @property
    def audits(self) -> bool: ...
    @property
    def unsure(self) -> int: ...


class Audit:
    """`every`: steps from one to the next; None: as often as it is cheap, 0: never. For the main thread."""

    def __init__(self, every: int | None) -> None:
        """Raises ValueError for a number that means nothing."""
        if every is not None and every < 0:
            raise ValueError(f"audit_every = {every}: a number of steps, 0 for never, None for as often as it is cheap")
        self._pace = Pace(every, AUDIT_BOUND, AUDIT_STEPS)
        self._on = every != 0
        self._voted_s = 0.0

    def adds(self, said: Said, at: Position, whole: int | None) -> Said:
        """To the vote on the step under way. `whole`: hash of all of this member's own gradients; None: never known."""
        now = time.monotonic()
        since_s, self._voted_s = now - self._voted_s if self._voted_s else 0.0, now
        if at.audits:
            if at.turn == 1 and since_s:
                self._pace.compared(at.committed, since_s)
            return replace(said, turn=at.turn, whole=whole or 0, kind=kind())
        if since_s:
            self._pace.stepped(since_s)
        if self._on and at.unsure >= GIVE_UP and not at.role:
            self._on = False
            text = f"somebody computes wrong gradients, and {GIVE_UP} audits could not tell who"
            print(f"everstep: {text}. There are no more audits", file=sys.stderr)
        able = whole is not None and self._on and at.role == 0 and at.shards == 1 and at.num_members > 1
        return replace(said, audit=True) if able and self._pace.due(at.committed + 1) else said

    def told(self, news: Audited) -> None:
        """What this step's audit found. All members hear the same, and one says it."""
        found = news.found
        if found.outcome is Outcome.UNFIT:
            self._on = False
            why = "they have unlike hardware or threads, or the same does not give them the same bits twice"
            self._say(f"gradients of the same share differ from member to member, and no one stands out: {why}", news)
        elif found.outcome is Outcome.ALIKE and found.roles:
            self._say(f"one of roles {list(found.roles)} made a slip; computed again, it was gone", news)

    def _say(self, text: str, news: Audited) -> None:
        off = "" if self._on else ". There are no more audits"
        if news.role == 0:
            print(f"everstep: audit of step {news.step}: {text}{off}", file=sys.stderr)


def explain(error: BaseException, turn: int) -> None:
    """The script raised this. In a pass that hands shares on it may be for a role that is not as it was."""
    if turn:
        error.add_note(
            "everstep: in the first pass of an audited step, in which run.role is another member's. Use what only one "
            "member has after the block, `if step.committed`; or turn audits off: everstep.session(audit_every=0)"
        )


@functools.cache
def kind() -> int:
    """What this process computes with: only who has the same comes to the same bits."""
    words = [torch.__version__, torch.backends.cpu.get_cpu_capability(), _processor(), str(torch.get_num_threads())]
    if torch.cuda.is_available():
        words.append(torch.cuda.get_device_name())
    return xxhash.xxh3_64_intdigest("\n".join(words).encode()) >> 1


def _processor() -> str:
    """Its model, where the kernel tells."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line for line in lines if line.startswith("model name")), platform.processor())

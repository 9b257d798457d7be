"""Whom a collective waited for when the communication library gave it up: its error names only those that waited.

They end with a time-out, or with connections that broke because a peer ended with one. The late one has not entered the
collective: it still lives, or was seen busy elsewhere after the first complaint. Progress and stacks choose among those
(detect.oddone), as in a hang which our own limit finds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

from everstep.core.types import Exit, ExitCause, Phase, WorkerProgress
from everstep.detect.oddone import Odd, busy_ones, odd_one
from everstep.detect.stacks import main_thread

# gloo (the second when an earlier time-out closed the pair), a store's clients at start, its keys, NCCL's watchdog.
GAVE_UP = re.compile(
    r"timed out waiting \d+ ?ms for (?:recv|send)|application timeout caused pair closure"
    r"|timed out after \d+ seconds waiting for clients|wait timeout after \d+ ?ms"
    r"|watchdog caught collective operation timeout",
    re.IGNORECASE,
)
NOBODY = Odd((), "no worker can be told from those that waited", 0.3)
EXCUSES = {Phase.START: "before its first step", Phase.EVAL: "in an evaluation", Phase.SAVE: "in a save"}
EXCUSES |= {Phase.LOAD: "in a load"}


def gave_up(end: Exit) -> bool:
    """Whether a worker ended because it waited too long for another one."""
    return end.cause in (ExitCause.ERROR, ExitCause.EXIT_CODE) and GAVE_UP.search(end.message) is not None


def late_one(workers: Sequence[WorkerProgress], failed: Mapping[int, Exit], stacks: Mapping[int, str]) -> Odd:
    """The late among an epoch's workers. `failed`: who gave up, or was torn along, by rank; nobody failed otherwise.

    `stacks`: by rank, taken after the first complaint. One that failed waited, as a rule, and was seen at its error.
    But when nobody else can be late: who was busy then, and had no time-out of its own, came when the others had left.
    """
    found = _among(workers, failed, failed.keys(), stacks)
    if found.ranks:
        return found
    busy = {w.rank for w in busy_ones(workers, stacks)}
    waited = {rank for rank, end in failed.items() if gave_up(end) or rank not in busy}
    return found if waited == failed.keys() else _among(workers, failed, waited, stacks)


def _among(
    workers: Sequence[WorkerProgress], failed: Collection[int], waited: Collection[int], stacks: Mapping[int, str]
) -> Odd:
    others = [w for w in workers if w.rank not in waited]
    # An error that escaped the script ends it in its own eyes: that is no early end.
    told = [msgspec.structs.replace(w, phase=Phase.TRAIN) if w.rank in failed else w for w in workers]
    odd = odd_one(told, {rank: text for rank, text in stacks.items() if rank not in waited})
    if not odd.ranks and len(others) == 1 and not main_thread(stacks.get(others[0].rank, "")):
        odd = Odd((others[0].rank,), "it alone did not wait until it gave up", 0.6)
    if not others or not odd.ranks or not set(odd.ranks).isdisjoint(waited):
        return NOBODY
    phases = {w.phase for w in others if w.rank in odd.ranks}
    excuse = EXCUSES.get(phases.pop(), "") if len(phases) == 1 else ""
    return msgspec.structs.replace(odd, what=f"{odd.what}, {excuse}") if excuse else odd

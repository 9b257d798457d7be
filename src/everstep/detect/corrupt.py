"""Silent corruption: replicas that should hold the same bits do not. Who is wrong: pure functions over what they told.

A *mark* is the fingerprint of one member's state after some step, a *trace* that of a sample of its own gradients
before they are summed; 0: not told. Replicas of one shard have equal marks. Two replicas that agree are right: bits do
not flip alike in two of them. Where none agree, the steps since the last agreement are done again from a state that is
known to be good, and what each had told is held against what came out: a wrong state makes wrong gradients, first on
its own member, and on the others only a step later, through the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

NAMED = 8  # parts that are named, at most


class Odd(NamedTuple):
    """Who has a wrong state; not `sure`: who may have one."""

    roles: tuple[int, ...]
    sure: bool


def odd(marks: Sequence[int], shards: int = 1) -> Odd | None:
    """Role r holds shard r % shards. None: nothing differs."""
    found = [each for shard in range(shards) if (each := _odd_in(marks, range(shard, len(marks), shards)))]
    if not found:
        return None
    return Odd(tuple(sorted(role for each in found for role in each.roles)), all(each.sure for each in found))


def _odd_in(marks: Sequence[int], roles: range) -> Odd | None:
    told = [role for role in roles if marks[role]]
    counts = Counter(marks[role] for role in told).most_common()
    if len(counts) < 2:
        return None
    (right, most), (_, second) = counts[:2]
    if most == second:
        return Odd(tuple(told), sure=False)
    return Odd(tuple(role for role in told if marks[role] != right), sure=True)


def parts(names: Sequence[str], marks: Sequence[Sequence[int]], shards: int = 1) -> tuple[str, ...]:
    """Names of the first parts whose marks, by role and part, differ between replicas."""
    found: dict[str, None] = {}
    for shard in range(shards):
        alike = [each for each in marks[shard::shards] if len(each) == len(names)]
        for name, *rest in zip(names, *alike, strict=True):
            if len(set(rest)) > 1:
                found[name] = None
    return tuple(found)[:NAMED]


class Replay(NamedTuple):
    """What was told before all went back: the marks of the state of `step` steps, the traces of the steps up to it."""

    step: int
    marks: tuple[int, ...]
    traces: Mapping[int, tuple[int, ...]]  # step -> by role
    suspects: tuple[int, ...]  # one of these roles, or more


class Judged(NamedTuple):
    """`over`: nothing more can be learned. No `roles` then: it does not show who is wrong."""

    over: bool
    roles: tuple[int, ...] = ()


def judge(replay: Replay, step: int, traces: Sequence[int], marks: Sequence[int]) -> Judged:
    """A step is done again. To be asked for each, in order, until it is over; `marks`: of the state before it.

    The suspect who differs first is wrong, as long as not all do: from the step after the first wrong gradient on all
    differ. A wrong shard also makes wrong gradients on the members with the other shards of its replica.
    """
    former = replay.traces.get(step, ())
    if step > replay.step or len(traces) != len(replay.marks):  # shares were dealt to others
        return Judged(over=True)
    wrong = _changed(replay, former, traces)
    if not wrong and step == replay.step:
        wrong = _changed(replay, replay.marks, marks)
    if len(wrong) == len(replay.suspects):
        return Judged(over=True)
    return Judged(over=bool(wrong) or step == replay.step, roles=wrong)


def _changed(replay: Replay, former: Sequence[int], again: Sequence[int]) -> tuple[int, ...]:
    """Suspects whose numbers are others now. One that was not told tells nothing."""
    pairs = enumerate(zip(former, again, strict=False))
    return tuple(role for role, (old, new) in pairs if old and new and old != new and role in replay.suspects)

"""An audit: one step computed several times from the same state, the shares of its batch handed on between members.

Who computes wrong gradients spoils everybody alike, through the sum, so no replicas differ. But the own gradients of a
share, before they are summed, are a function of state and share: whoever computes them comes to the same bits. In a
pass of *turn* t the member with role j computes the share of role (j + t) % n; a *trace* is the hash of all of its own
gradients. One additional pass shows whether anything is wrong. If so the step is computed anew, with as many turns as
it takes until each share was computed by three members: who alone differs, and as a rule, is named.

Pure functions over what all members told, so all come to the same finding.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Outcome(enum.Enum):
    ALIKE = "alike"  # in the end; `roles`: a first attempt was not, and one of these made a slip that is gone
    AGAIN = "again"  # something differs: compute the step anew, with more turns
    WRONG = "wrong"  # somebody computes wrongly
    UNFIT = "unfit"  # members do not compute the same from the same, or not twice: that tells nothing


class Pass(NamedTuple):
    """`traces`: by role of whoever computed; 0: not known. `kinds`: what each computes with, as a number."""

    turn: int
    traces: tuple[int, ...]
    kinds: tuple[int, ...]


class Finding(NamedTuple):
    outcome: Outcome
    roles: tuple[int, ...] = ()  # who is wrong; not `sure`: who may be
    sure: bool = False


def turns(num_members: int) -> int:
    """Of an attempt that is to show who is wrong: the first of its passes has so many."""
    return min(2, num_members - 1)


def judge(passes: Sequence[Pass], proven: bool) -> Finding:
    """Of all passes of the step, in order; each attempt ends with turn 0. `proven`: an earlier audit came out alike."""
    if not all(all(each.traces) for each in passes) or len({kind for each in passes for kind in each.kinds}) > 1:
        return Finding(Outcome.UNFIT)
    first = next(k for k, each in enumerate(passes) if each.turn == 0) + 1
    odd = _odd(passes[:first])
    if len(passes) == first:
        return Finding(Outcome.AGAIN if odd else Outcome.ALIKE)
    if not _odd(passes[first:]):
        return Finding(Outcome.ALIKE, odd)
    return _who(passes, proven)


def _by_share(passes: Sequence[Pass]) -> dict[int, list[tuple[int, int]]]:
    """For each share: who computed it, and what he came to."""
    found = defaultdict(list)
    for each in passes:
        for role, trace in enumerate(each.traces):
            found[(role + each.turn) % len(each.traces)].append((role, trace))
    return found


def _odd(passes: Sequence[Pass]) -> tuple[int, ...]:
    """Everybody who had a hand in a share that did not come out alike."""
    differ = [told for told in _by_share(passes).values() if len({trace for _, trace in told}) > 1]
    return tuple(sorted({role for told in differ for role, _ in told}))


def _who(passes: Sequence[Pass], proven: bool) -> Finding:
    """Somebody without whom nothing would differ; of two members it may be either of them."""
    shares = list(_by_share(passes).values())
    culprits = [role for role in range(len(shares)) if all(_agree(told, role) for told in shares)]
    if len(culprits) == 1:
        (role,) = culprits
        return Finding(Outcome.WRONG, (role,), sure=_mostly_odd(shares, role))
    suspects = tuple(culprits) or _outvoted(shares)
    return Finding(Outcome.WRONG, suspects) if suspects and proven else Finding(Outcome.UNFIT)


def _agree(told: Sequence[tuple[int, int]], without: int) -> bool:
    return len({trace for role, trace in told if role != without}) <= 1


def _mostly_odd(shares: Sequence[Sequence[tuple[int, int]]], role: int) -> bool:
    """Whether he, with whom alone the others do not agree, differs as a rule, and in several shares. Kernels that now
    and then come to other bits hit somebody twice sooner or later."""
    odd = []
    for told in shares:
        right = next(trace for other, trace in told if other != role)
        odd.append([trace != right for other, trace in told if other == role])
    each = [different for share in odd for different in share]
    return sum(map(any, odd)) > 1 and 2 * sum(each) > len(each)


def _outvoted(shares: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, ...]:
    """Several are wrong, each of them always. Else nobody: kernels which now and then come to other bits, on whatever
    member, look like that."""
    right: set[tuple[int, bool]] = set()
    for told in shares:
        voters = {trace: len({role for role, each in told if each == trace}) for _, trace in told}
        most = max(voters.values())
        if list(voters.values()).count(most) == 1:  # else this share cannot tell
            right |= {(role, voters[trace] == most) for role, trace in told}
    wrong = {role for role, good in right if not good}
    return () if any((role, True) in right for role in wrong) else tuple(sorted(wrong))

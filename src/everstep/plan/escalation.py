"""When a slow member is worth an action: FALCON's ski-rental over a ladder of actions.

How long a slow phase will last is not known. So nothing is done until the time it has cost equals what the next action
costs, then that is taken; if it helps, nothing more adds up. Whatever the length turns out to be, the price is at most
twice that of who knew it beforehand. A rung that cures less than a cheaper one is no rung.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from everstep.core.decisions import Action, Alternative, Decision
from everstep.plan.costs import Costs
from everstep.plan.policy import ALL, Situation, decide, price, why_not

LEFT_ROLE = "it holds no role any more"  # how an incident ends whose slow member was replaced


class Rung(msgspec.Struct, frozen=True):
    """One action. `cost`: accelerator-seconds, once; `residual`: part of the throughput still missing after it."""

    action: Action
    cost: float
    residual: float


class Climb(msgspec.Struct, frozen=True):
    """Where one slow phase stands: the rungs taken, and what it cost since the last one, in accelerator-seconds."""

    taken: int = 0
    lost: float = 0.0


def ladder(situation: Situation, costs: Costs, allowed: Collection[Action] = ALL) -> tuple[Rung, ...]:
    """Actions against this slow member, dearer and more thorough from rung to rung. `situation` is of kind slow."""
    rungs = []
    for action in Action:
        if action in (Action.LEAVE, Action.STOP) or action not in allowed or why_not(action, situation):
            continue
        priced = price(action, situation, costs)
        rungs.append(Rung(action, situation.workers * priced.down_s, priced.missing))
    rungs.sort(key=lambda rung: (rung.cost, rung.residual))
    kept: list[Rung] = []
    for rung in rungs:
        if rung.residual < (kept[-1].residual if kept else 1 - 1 / situation.slowdown):
            kept.append(rung)
    return tuple(kept)


def bear(climb: Climb, rungs: Sequence[Rung], lost: float) -> tuple[Climb, Rung | None]:
    """`lost` more accelerator-seconds were lost to the slow member. The rung that is due now, if one is.

    Rungs that are as dear as what was lost together are not taken one after the other: the loss starts anew.
    """
    total = climb.lost + max(0.0, lost)
    if climb.taken < len(rungs) and total >= rungs[climb.taken].cost:
        return Climb(climb.taken + 1), rungs[climb.taken]
    return Climb(climb.taken, total), None


def watched(situation: Situation, costs: Costs, allowed: Collection[Action] = ALL) -> Decision:
    """The first decision: nothing is done yet. It says what will be, and when."""
    rungs = ladder(situation, costs, allowed)
    why = "nothing that can be done would help"
    if rungs:
        first = rungs[0]
        why = f"{first.action.value} is due once it has cost as much as that: {first.cost:.3g} accelerator-seconds"
    return _chosen(Action.LEAVE, why, situation, costs, allowed)


def climbed(situation: Situation, costs: Costs, rung: Rung, allowed: Collection[Action] = ALL) -> Decision:
    """A later one: the rung that is due."""
    why = f"it has cost as much as that would: {rung.cost:.3g} accelerator-seconds"
    return _chosen(rung.action, why, situation, costs, allowed)


def _chosen(action: Action, why: str, situation: Situation, costs: Costs, allowed: Collection[Action]) -> Decision:
    """With what `decide` weighed: what each would lose if the slow phase lasted as long as they do on average."""
    best = decide(situation, costs, allowed)
    weighed = (Alternative(best.action, best.loss_s, best.why), *best.alternatives)
    mine = next((each for each in weighed if each.action is action), None)
    others = tuple(each for each in weighed if each is not mine)
    return Decision(action, mine.loss_s if mine is not None else 0.0, why, situation.target, others)


def lost_to(seconds: float, slowdown: float, workers: int) -> float:
    """Accelerator-seconds that `workers` lost in `seconds` of wall time which would have taken 1 / slowdown of it."""
    return workers * seconds * (1 - 1 / slowdown) if slowdown > 1 else 0.0

"""What to do about an incident: of the actions that can be done, the one of least expected loss.

Loss, in accelerator-seconds: downtime of everybody + work that is made again + throughput that is missing until the
repair. `decide` is a pure function of the `Situation` and the `Costs`; the controller and the simulator call it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from everstep.core.decisions import Action, Alternative, Decision
from everstep.plan.closed import rerouting_slowdown
from everstep.plan.costs import NODE, PROCESS, Costs

TAKE_OVER_SLOWDOWN = 1.5  # of a pipeline in which one worker computes two stages (Bamboo; SYSTEMS section 12)
FAIL_SLOW_S = 72 * 60.0  # mean length of a slow phase (Greyhound; SYSTEMS section 14)
PLANNED = ("slow", "drain", "grow")  # kinds in which everybody is alive
ALL = frozenset(Action)
KEPT = "kept state"  # the tier, where it is not known yet which one has it


class Tier(msgspec.Struct, frozen=True):
    """A kept state that everybody could go back to."""

    name: str
    lost_steps: float  # that would be made again
    load_s: float = 0.0


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an incident and of the job when it has to be decided."""

    kind: str  # of the incident: crash, exception, hang, node-lost, slow, corrupt, drain, grow, ...
    target: str = ""  # whom it is about, for people
    workers: int = 1  # with a role, before
    failed: int = 1  # of them to be replaced: gone, or to be ended or taken out
    gone: bool = True  # their processes are gone, or are to be killed; False: they can go on
    in_steps: bool = False  # processes of the others live on, and hold the state of the last committed step
    fixed: bool = False  # the number of members may not change
    least: int = 1  # members with which the job may go on
    copies: int = 1  # live copies of the state of those who failed
    standbys: int = 0  # warm workers without a role
    places: int = 0  # of those who failed, on nodes that are here and fit
    spares: int = 0  # free nodes, which run nothing
    expects: bool = True  # somebody may bring another node
    replicas: int = 0  # data-parallel ones; 0: every worker is one
    hit: int = 0  # replicas that those who failed belong to; 0: each to another one, if there are as many
    stages: int = 1
    micro_batches: int = 1  # of a replica and step
    redundant: bool = False  # a neighbour holds the stage of each who failed
    tiers: tuple[Tier, ...] = ()
    step_s: float = 0.0
    slowdown: float = 1.0  # of the whole job by a slow member
    rest_s: float = FAIL_SLOW_S  # that a slow phase still lasts
    repeats: int = 0  # the same failure, this one included
    crash_loop: int = 3
    restarts_left: int = 1
    tried: tuple[Action, ...] = ()  # in this incident, in vain
    barred: dict[Action, str] = {}  # what the caller cannot do, or need not, and why


class Price(NamedTuple):
    """What an action loses, for a job of some size."""

    down_s: float  # nobody makes a step
    redone: float  # steps that are made again
    missing: float  # part of the throughput, afterwards
    until_s: float  # for this long


def decide(situation: Situation, costs: Costs, allowed: Collection[Action] = ALL) -> Decision:
    """The action of least expected loss; of equal ones the gentler. All others are kept as alternatives."""
    weighed = [_weigh(action, situation, costs) for action in Action if action in allowed or action is Action.STOP]
    possible = [each for each in weighed if each.feasible]
    # To stop is for when nothing else can be done: whatever a stop costs, the job's work is worth more.
    going_on = [each for each in possible if each.action is not Action.STOP]
    best = min(going_on or possible, key=lambda each: each.loss_s)
    others = sorted((each for each in weighed if each is not best), key=_rank)
    back = best.action in (Action.ROLL_BACK, Action.RESTART) and situation.tiers
    target = _tier(situation).name if back else situation.target
    return Decision(best.action, best.loss_s, best.why, target, tuple(others))


def _rank(weighed: Alternative) -> float:
    return weighed.loss_s if weighed.feasible else math.inf


def _weigh(action: Action, situation: Situation, costs: Costs) -> Alternative:
    hindrance = why_not(action, situation)
    if hindrance:
        return Alternative(action, -1.0, hindrance)
    down_s, redone, missing, until_s = price(action, situation, costs)
    workers = situation.workers
    loss_s = workers * (down_s + redone * situation.step_s + missing * until_s)
    why = f"{_round(down_s)} s down"
    if redone * situation.step_s:
        why += f", {redone:.3g} steps again"
    if missing * until_s:
        why += f", {missing:.2%} slower for {_round(until_s)} s"
    return Alternative(action, loss_s, why)


def _round(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"


# What an action loses ---------------------------------------------------------------------------------


def price(action: Action, s: Situation, costs: Costs) -> Price:
    """What an action loses, one that can be done."""
    down_s = 0.0 if action is Action.RESCHEDULE else costs.seconds(action, s.workers)
    redone = 0.0 if s.kind in PLANNED else 0.5  # a fault hits the middle of a step, on average
    repair_s = s.rest_s if s.kind == "slow" else _repair_s(s, costs)
    match action:
        case Action.LEAVE:
            return Price(down_s, 0.0, 1 - 1 / s.slowdown, s.rest_s)
        case Action.REROUTE:
            return Price(down_s, redone, 1 - 1 / _rerouted(s), repair_s)
        case Action.TAKE_OVER:
            return Price(down_s, redone, 1 - 1 / TAKE_OVER_SLOWDOWN, repair_s)
        case Action.SHRINK:  # and once more the time to grow, when somebody is there again
            return Price(down_s + costs.seconds(Action.GROW, s.workers), redone, _missing(s), repair_s)
        case Action.EVICT if s.gone:  # a cold one, and nobody to take the state from while it prepares
            return Price(down_s + costs.seconds(PROCESS, s.workers), redone, 0.0, 0.0)
        case Action.REPARTITION:
            return Price(down_s, redone, s.failed / s.workers, repair_s)
        case Action.ROLL_BACK:
            tier = _tier(s)
            return Price(down_s + tier.load_s, tier.lost_steps, 0.0, 0.0)
        case Action.RESCHEDULE:  # nobody is missing afterwards: the job waited
            wait_s = costs.seconds(NODE, s.workers)
            if s.in_steps and s.copies:
                return Price(wait_s + costs.seconds(PROCESS, s.workers), redone, 0.0, 0.0)
            again = _restart(s, costs)
            return Price(wait_s + again.down_s, again.redone, 0.0, 0.0)
        case Action.RESTART if s.places + s.spares < s.failed:  # it goes on smaller, and grows by another restart
            once = _restart(s, costs)
            return Price(2 * once.down_s, once.redone, s.failed / s.workers, costs.seconds(NODE, s.workers))
        case Action.RESTART:
            return _restart(s, costs)
        case _:
            return Price(down_s, redone, 0.0, 0.0)


def _restart(s: Situation, costs: Costs) -> Price:
    tier = _tier(s)
    return Price(costs.seconds(Action.RESTART, s.workers) + tier.load_s, tier.lost_steps, 0.0, 0.0)


def _tier(s: Situation) -> Tier:
    """Where going back costs least; without a kept state, where the script itself resumes: nothing is known of it."""
    return min(
        s.tiers, key=lambda tier: tier.load_s + tier.lost_steps * s.step_s, default=Tier("the script's own", 0.0)
    )


def _repair_s(s: Situation, costs: Costs) -> float:
    """Until those who failed have successors."""
    process_s = costs.seconds(PROCESS, s.workers)
    return process_s if s.places >= s.failed else process_s + costs.seconds(NODE, s.workers)


def _missing(s: Situation) -> float:
    """Part of the work that nobody does while the replicas of those who failed are out: whole ones."""
    return _hit(s) / (s.replicas or s.workers)


def _hit(s: Situation) -> int:
    return s.hit or min(s.failed, s.replicas or s.workers)


def _rerouted(s: Situation) -> float:
    """Slow-down of the job while its peers do the work of those who failed, or part of that of a slow one."""
    replicas = s.replicas or s.workers
    if s.kind == "slow":
        return replicas / (replicas - s.failed + s.failed / s.slowdown)
    return rerouting_slowdown(replicas, s.stages, s.micro_batches, s.failed)


# What cannot be done ----------------------------------------------------------------------------------


def why_not(action: Action, s: Situation) -> str:
    """Empty: it can be done."""
    if action is Action.STOP:
        return ""
    if action in s.barred:
        return s.barred[action]
    if action is Action.LEAVE:
        return "" if s.kind == "slow" else "nobody goes on by itself"
    if s.repeats >= s.crash_loop:
        return f"the same failure {s.repeats} times: it would come again"
    if s.restarts_left <= 0:
        return "no restart is left"
    if action in s.tried:
        return "it was tried, in vain"
    if action is Action.GROW:
        return "" if s.kind == "grow" else "nobody came"
    if s.kind == "grow":
        return "nobody failed"
    return _GUARDS[action](s)


def _retry(s: Situation) -> str:
    if s.kind == "slow":
        return "it would be as slow again"
    if s.gone:
        return "a process is gone"
    return _step_level(s) or ("" if s.copies or s.kind != "corrupt" else "no healthy copy to take the state from")


def _reroute(s: Situation) -> str:
    replicas = s.replicas or s.workers
    if s.stages < 2 and s.kind != "slow":
        return "there is no pipeline: another member's share is dealt anew when it shrinks"
    if replicas <= s.failed:
        return "no data-parallel peer of the stage is left"
    return _step_level(s) or _state(s)


def _take_over(s: Situation) -> str:
    if s.stages < 2:
        return "there is no pipeline"
    return _step_level(s) or ("" if s.redundant else "no neighbour holds the stage")


def _promote(s: Situation) -> str:
    if s.standbys < s.failed:
        return f"{s.standbys} standbys for {s.failed}" if s.standbys else "no standby waits"
    return _step_level(s) or _state(s)


def _shrink(s: Situation) -> str:
    left = s.workers - _hit(s) * s.workers // (s.replicas or s.workers)
    if s.fixed:
        return "the number of members may not change"
    if left < s.least:
        return f"{left} of at least {s.least} would be left"
    return _step_level(s) or _state(s)


def _respawn(s: Situation) -> str:
    if s.kind == "slow":
        return "a new process is as slow on the same hardware"
    if s.places < s.failed:
        return "its node is not here" if s.failed == 1 else f"{s.places} of {s.failed} places are here"
    return _step_level(s) or _state(s)


def _repartition(s: Situation) -> str:
    if s.stages < 2:
        return "there is no pipeline"
    if s.workers - s.failed < max(s.least, s.stages):
        return "too few would be left for the stages"
    return _step_level(s) or _state(s)


def _roll_back(s: Situation) -> str:
    if not s.tiers:
        return "no state is kept"
    if s.kind in PLANNED:
        return "everybody holds the newest state"
    if s.places + s.standbys < s.failed and (s.fixed or s.workers - s.failed < s.least):
        return "nobody can take the role"
    return "" if s.in_steps else "the processes cannot go on: the script has no session"


def _restarting(s: Situation) -> str:
    if s.kind == "slow":
        return "it would be as slow again"
    left = s.workers - max(0, s.failed - s.places - s.spares)
    if s.fixed and left < s.workers:
        return "the number of members may not change"
    return "" if left >= s.least else f"{left} of at least {s.least} would be left"


def _evict(s: Situation) -> str:
    if not s.spares:
        return "no spare node"
    return _state(s) if s.in_steps else "workers stop and start together: the script has no session"


def _reschedule(s: Situation) -> str:
    if not s.expects:
        return "nobody brings another node"
    return "" if s.places < s.failed or s.kind in ("slow", "corrupt") else "its place is here"


def _step_level(s: Situation) -> str:
    return "" if s.in_steps else "workers stop and start together: the script has no session"


def _state(s: Situation) -> str:
    return "" if s.copies or s.kind in PLANNED else "no live member holds its state"


_GUARDS = {
    Action.RETRY: _retry,
    Action.REROUTE: _reroute,
    Action.TAKE_OVER: _take_over,
    Action.PROMOTE: _promote,
    Action.SHRINK: _shrink,
    Action.RESPAWN: _respawn,
    Action.REPARTITION: _repartition,
    Action.ROLL_BACK: _roll_back,
    Action.RESTART: _restarting,
    Action.EVICT: _evict,
    Action.RESCHEDULE: _reschedule,
}

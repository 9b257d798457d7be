"""What the shipped runtime cannot do about an incident, or need not: one list for the controller and the simulator.

`plan.policy` knows what is impossible in itself. Here is what follows from how this runtime works, by kind of incident,
as the `barred` of a Situation: action -> why.
"""

from __future__ import annotations

from everstep.core.decisions import Action

Bars = dict[Action, str]

BESIDE = "the others go on meanwhile: its place gets a new process beside"
READY = "a worker waits ready"
HELD = "a live member holds the newest state: nobody has to stop"
LIVES = "its process lives"
EMPTY = "its place would stay empty: who is slow does more than nobody"
WORKING = "nobody waits for a node while all work"
EQUAL = "members of equal replicas have equal shares"
SPREAD = "what came of its wrong state is in everybody's state by now"


def of_dead(*, fixed: bool, filled: bool) -> Bars:
    """Others hold the state. `filled`: a worker waits ready for each role."""
    barred = {Action.RESTART: HELD, Action.ROLL_BACK: HELD}
    if not fixed:
        barred |= {Action.RESPAWN: BESIDE, Action.RESCHEDULE: BESIDE}
    elif filled:
        barred |= {Action.RESPAWN: READY, Action.RESCHEDULE: READY}
    return barred


def of_slow(*, pipeline: bool = False) -> Bars:
    """A standby takes its role in a planned change, or nobody does."""
    return {Action.SHRINK: EMPTY, Action.RESCHEDULE: WORKING, **({} if pipeline else {Action.REROUTE: EQUAL})}


def of_corrupt(*, kept: bool) -> Bars:
    """All live. `kept`: a state of when replicas were alike; then all go back to it, as gradients were summed since."""
    able = {Action.RETRY, Action.ROLL_BACK, Action.LEAVE, Action.GROW, Action.STOP}
    barred = {action: LIVES for action in Action if action not in able}
    return {**barred, Action.RETRY: SPREAD} if kept else barred

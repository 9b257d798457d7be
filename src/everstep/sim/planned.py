"""Faults that a scenario has written down ([[faults]]): when they are due, and what strikes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.sim.books import Phase
from everstep.sim.scenario import Fault

if TYPE_CHECKING:
    from everstep.sim.engine import Engine


def strike(engine: Engine, fault: Fault) -> None:
    """Now, or when it is due."""
    engine.settle()
    node = fault.node
    if node in engine.fleet.out:
        return
    wait_s = _early(engine, fault)
    if wait_s:
        engine.clock.after(wait_s, strike, engine, fault)
        return
    engine.got.failed(engine.now, 1, fault.kind)
    match fault.kind:
        case "node-lost":
            engine.take_out([node], fault.kind, engine.cluster.repair_s)
        case "slow":
            engine.slow.began(node, fault.slowdown, fault.lasts_s)
        case "corrupt":
            engine.flips.struck(node, otherwise_s=0.0)
        case _:
            engine.crashed([node], fault.kind)


def _early(engine: Engine, fault: Fault) -> float:
    """Seconds after which to look again whether it is due; 0: it is."""
    books, fleet = engine.books, engine.fleet
    steps = fault.at_step - books.progress.steps
    if steps > 0:
        return max(steps, 0.5) * books.full_step_s
    whole = books.phase is Phase.RUN and not fleet.missing and not books.slow and not engine.flips.awaited
    whole = whole and len(fleet.standbys) >= engine.cluster.standbys
    return books.full_step_s if fault.whole and not whole else 0.0

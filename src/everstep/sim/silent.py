"""Silent corruption: a bit flips in one node's state, and nobody knows until replicas compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.core import events as e
from everstep.core.types import Blame
from everstep.sim.books import Phase
from everstep.sim.progress import Save
from everstep.sim.scenario import OTHERS_SILENT_S
from everstep.sim.sensing import compared, named_by_redo

if TYPE_CHECKING:
    from everstep.sim.engine import Engine

CAUSE = "silent-corruption"
LATER_S = 60.0  # something else is under way: look again


class Flips:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.awaited = 0  # flips that a comparison will show

    def struck(self, node: int, otherwise_s: float = OTHERS_SILENT_S) -> None:
        """`otherwise_s`: until it is found by other systems than ours."""
        engine, progress = self.engine, self.engine.books.progress
        mark, given_s = progress.durable(engine.now), engine.strategy.silent_detect_s
        if given_s is None and engine.system.shipped:
            every = engine.senses.compared_every(engine.books.full_step_s)
            at = (progress.steps // every + 1) * every
            self.awaited += 1
            engine.after_steps(at, self._compared, node, mark, progress.steps, at)
        elif wait_s := otherwise_s if given_s is None else given_s:
            engine.clock.after(wait_s, self._found, node, mark)
        else:
            self._found(node, mark)

    def _compared(self, node: int, mark: Save, since: int, at: int) -> None:
        """The states after `at` steps; the flip came after `since`."""
        engine, job = self.engine, self.engine.job
        self.awaited -= 1
        replicas = engine.fleet.present if job.law in ("table", "nodes") else engine.fleet.whole_replicas
        shown = compared(replicas) if engine.asked.in_steps else None
        if shown is None:
            engine.got.unnoticed["silent"] += 1
        else:
            suspects = [node] if shown.sure else [node, *self._twins(node)]
            self._found(node, mark, suspects, since, at)

    def _twins(self, node: int) -> list[int]:
        """Who holds the same state in the other replica, of two."""
        fleet, seat = self.engine.fleet, self.engine.fleet.seat_of(node)
        others = (fleet.holder(n % fleet.seats) for n in range(seat + fleet.per_replica, seat + fleet.seats))
        return [other for other in others if other >= 0][:1] if seat >= 0 else []

    def _found(self, node: int, mark: Save, suspects: list[int] | None = None, since: int = 0, at: int = 0) -> None:
        """A healthy copy heals it, or all go back to before it: what was made since is worthless."""
        engine = self.engine
        engine.settle()
        if mark.steps > engine.books.progress.steps or engine.fleet.seat_of(node) < 0:
            return  # the job has gone back to before it already, or the node is out
        if engine.books.phase is not Phase.RUN:
            engine.clock.after(LATER_S, self._found, node, mark, suspects, since, at)
            return
        nodes = [each for each in suspects or [node] if engine.fleet.seat_of(each) >= 0]
        seats = [engine.fleet.seat_of(each) for each in nodes]
        cause = CAUSE if len(nodes) == 1 else f"{CAUSE}?"
        incident = engine.respond("corrupt", nodes, cause, seats, places=len(seats), mark=mark)
        if len(nodes) > 1 and incident.redone:
            engine.after_steps(at, self._redone, incident.id, node, since, at)

    def _redone(self, incident: str, node: int, since: int, at: int) -> None:
        """The steps that led to the difference were made again."""
        if named_by_redo(at, since + 1):
            why = f"the steps done again show that n{node} was wrong"
            self.engine.say(e.IncidentUpdated(incident, (Blame(-1, f"n{node}", CAUSE),), why=why))

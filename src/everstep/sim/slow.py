"""Members that are slow for a while: the ladder of plan.escalation, climbed in simulated time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from everstep.core import events as e
from everstep.core.decisions import Action
from everstep.core.types import Blame, Verdict
from everstep.plan.escalation import LEFT_ROLE, Rung, climbed, ladder, watched
from everstep.plan.policy import Situation
from everstep.sim.asked import scaled
from everstep.sim.books import Phase
from everstep.sim.chance import Stream

if TYPE_CHECKING:
    from everstep.sim.engine import Engine

LATER_S = 60.0  # something else is under way, or nobody could take its place: look again


class SlowNodes:
    """Who is slow now, and what is done about it. A phase is known by its number: nodes are slow more than once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.phases: dict[int, int] = {}  # node -> number of its phase
        self.since: dict[int, int] = {}  # node -> steps when it began to be slow
        self.incidents: dict[int, tuple[str, float]] = {}  # number of a phase that was found -> incident, since when
        self.count = 0
        self.chance = Stream(engine.chance.random())

    def began(self, node: int, slowdown: float, lasts_s: float) -> None:
        engine = self.engine
        self.count += 1
        self.phases[node] = self.count
        self.since[node] = engine.books.progress.steps
        engine.books.slow[node] = slowdown
        engine.books.changed()
        engine.clock.after(lasts_s, self._ended, node, self.count)
        engine.clock.after(engine.strategy.slow_detect_s, self._found, node, self.count)

    def _is_slow(self, node: int, phase: int) -> bool:
        return self.phases.get(node) == phase and node in self.engine.books.slow

    def _ended(self, node: int, phase: int) -> None:
        if self._is_slow(node, phase):
            self.engine.settle()
            del self.engine.books.slow[node], self.phases[node]
            self.engine.books.changed()
            self._close(phase, "passed")

    def _close(self, phase: int, outcome: str) -> None:
        incident, since_s = self.incidents.pop(phase, ("", 0.0))
        if incident:
            self.engine.say(e.IncidentClosed(incident, outcome, -1.0, {"slow": self.engine.now - since_s}))

    def _found(self, node: int, phase: int) -> None:
        """The detector is sure. The first rung is due once the phase has cost as much as it would."""
        if self._is_slow(node, phase):
            engine = self.engine
            number = engine.got.incidents.total() + 1
            engine.got.incidents["slow"] += 1
            blame = (Blame(-1, f"n{node}", "slow"),)
            slowdown, steps = engine.books.slow[node], engine.books.progress.steps
            why = f"{slowdown:.2f} times slower"
            engine.say(e.IncidentOpened(f"i{number}", "slow", blame, why))
            verdict = Verdict("slow", blame, why)
            engine.say(e.SlowJudged(f"i{number}", verdict, "compute", slowdown - 1, self.since.get(node, 0), steps))
            self.incidents[phase] = f"i{number}", engine.now
            self._decided(node, phase, None)
            self._plan(node, phase, 0)

    def _plan(self, node: int, phase: int, taken: int) -> None:
        engine = self.engine
        slowdown = engine.books.slow[node]
        situation = self._situation(node)
        rungs = ladder(situation, engine.asked.costs, engine.system.actions)
        if taken < len(rungs) and slowdown > 1:
            due_s = rungs[taken].cost / (situation.workers * (1 - 1 / slowdown))
            engine.clock.after(due_s, self._climb, node, phase, taken, rungs[taken])

    def _situation(self, node: int) -> Situation:
        engine = self.engine
        made = engine.asked.situation("slow", [engine.fleet.seat_of(node)], 0, engine.books.slow[node])
        return msgspec.structs.replace(made, target=f"n{node}")

    def _decided(self, node: int, phase: int, rung: Rung | None) -> None:
        """None: nothing is done yet."""
        engine, situation = self.engine, self._situation(node)
        costs, actions = engine.asked.costs, engine.system.actions
        made = climbed(situation, costs, rung, actions) if rung else watched(situation, costs, actions)
        engine.say(e.Decided(self.incidents[phase][0], scaled(made, engine.asked.per_node)))

    def _climb(self, node: int, phase: int, taken: int, rung: Rung) -> None:
        engine = self.engine
        if not self._is_slow(node, phase) or engine.fleet.seat_of(node) < 0:
            return
        needs_standby = rung.action in (Action.PROMOTE, Action.EVICT)
        if engine.books.phase is not Phase.RUN or (needs_standby and not engine.fleet.standbys):
            engine.clock.after(LATER_S, self._climb, node, phase, taken, rung)
            return
        engine.settle()
        engine.got.actions[rung.action] += 1
        self._decided(node, phase, rung)
        if rung.action is Action.REROUTE:
            engine.books.slow[node] = 1 / (1 - rung.residual)
            engine.books.changed()
            self._plan(node, phase, taken + 1)
        else:
            if needs_standby and engine.fleet.fits(engine.fleet.seat_of(node)) >= 0:
                self._close(phase, LEFT_ROLE)
                engine.replace(node, rung.action)
                return
            self._close(phase, "recovered")
            engine.take_out([node], "slow", engine.cluster.repair_s, alive=True)

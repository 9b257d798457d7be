"""Members that are slow for a while: when that is noticed, and the ladder of plan.escalation in simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from everstep.control.slowness import patience_s, worth
from everstep.core import events as e
from everstep.core.config import Straggler as Settings
from everstep.core.decisions import Action
from everstep.core.types import Blame, Verdict
from everstep.plan.escalation import LEFT_ROLE, Rung, climbed, ladder, watched
from everstep.plan.policy import Situation
from everstep.sim.asked import scaled
from everstep.sim.books import Phase
from everstep.sim.chance import Stream
from everstep.sim.scenario import OTHERS_SLOW_S

if TYPE_CHECKING:
    from everstep.sim.engine import Engine

LATER_S = 60.0  # something else is under way, or nobody could take its place: look again
MANY = 1000  # steps: the detector has learned what it can


class Spell(msgspec.Struct):
    """A node's slow phase. `number`: nodes are slow more than once."""

    number: int
    since: int  # steps when it began
    believed: float = 0.0  # how many times as long it takes, as the verdict has it; 0: there is none
    phase: str = "compute"
    after: int = -1  # steps that it took to be sure; -1: not known
    incident: str = ""
    opened_s: float = 0.0


class SlowNodes:
    """Who is slow now, and what is done about it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.spells: dict[int, Spell] = {}  # by node
        self.count = 0
        self.chance = Stream(engine.chance.random())
        self.lasts_s = Settings().lasts_s
        self._fixed_s = engine.strategy.slow_detect_s
        if self._fixed_s is None and not engine.system.shipped:
            self._fixed_s = OTHERS_SLOW_S
        self._seated: dict[int, int] = {}  # node -> steps when it took its seat

    def began(self, node: int, slowdown: float, lasts_s: float) -> None:
        engine = self.engine
        self.count += 1
        engine.books.slow[node] = slowdown
        engine.books.changed()
        self.spells[node] = Spell(self.count, engine.books.progress.steps)
        engine.clock.after(lasts_s, self._ended, node, self.count)
        self._watch(node, self.spells[node])

    def left(self, node: int) -> None:
        """It is out, so nobody waits for it."""
        spell = self.spells.pop(node, None)
        self.engine.books.slow.pop(node, None)
        self.engine.books.eased.pop(node, None)
        if spell is not None:
            self._close(spell, LEFT_ROLE)

    def seated(self, nodes: Sequence[int]) -> None:
        """The detector knows nothing yet of who sits down."""
        for node in nodes:
            self._seated[node] = self.engine.books.progress.steps

    def _watch(self, node: int, spell: Spell) -> None:
        """Ask the detector what it will say, unless the scenario says when; and plan that."""
        engine, slowdown = self.engine, self.engine.books.slow[node]
        if self._fixed_s is not None:
            spell.believed = slowdown
            engine.clock.after(self._fixed_s, self._found, node, spell.number)
            return
        told = engine.senses.slow(slowdown, spell.since - self._seated.get(node, -MANY))
        step_s = engine.books.full_step_s
        if told is None or not worth(told.slowdown, step_s):
            return
        spell.believed, spell.phase, spell.after = 1.0 + told.slowdown, told.phase, told.steps
        spell.since += told.since
        rest_s = max(0.0, patience_s(told.steps - 1 - told.since, step_s, self.lasts_s))
        engine.after_steps(spell.since - told.since + told.steps, self._sure, node, spell.number, rest_s)

    def _sure(self, node: int, number: int, rest_s: float) -> None:
        self.engine.clock.after(rest_s, self._found, node, number)

    def _is_slow(self, node: int, number: int) -> bool:
        return node in self.spells and self.spells[node].number == number

    def _ended(self, node: int, number: int) -> None:
        if self._is_slow(node, number):
            self.engine.settle()
            spell = self.spells.pop(node)
            if not spell.incident:
                self.engine.got.unnoticed["slow"] += 1
            del self.engine.books.slow[node]
            self.engine.books.eased.pop(node, None)
            self.engine.books.changed()
            self._close(spell, "passed")

    def _close(self, spell: Spell, outcome: str) -> None:
        if spell.incident:
            lasted = {"slow": self.engine.now - spell.opened_s}
            self.engine.say(e.IncidentClosed(spell.incident, outcome, -1.0, lasted))
            spell.incident = ""  # once only

    def _found(self, node: int, number: int) -> None:
        """The detector is sure. The first rung is due once the phase has cost as much as it would."""
        if self._is_slow(node, number) and self.engine.fleet.seat_of(node) >= 0:
            engine, spell = self.engine, self.spells[node]
            engine.settle()
            of_run = engine.got.incidents.total() + 1
            engine.got.incidents["slow"] += 1
            blame = (Blame(-1, f"n{node}", "slow"),)
            sure = f" in {spell.phase}, clear after {spell.after} steps" if spell.after >= 0 else ""
            why = f"{spell.believed:.2f} times slower{sure}"
            spell.incident, spell.opened_s = f"i{of_run}", engine.now
            engine.say(e.IncidentOpened(spell.incident, "slow", blame, why))
            verdict, slowdown = Verdict("slow", blame, why), round(spell.believed - 1, 4)
            steps = engine.books.progress.steps
            engine.say(e.SlowJudged(spell.incident, verdict, spell.phase, slowdown, spell.since, steps))
            self._decided(node, None)
            self._plan(node, number, 0)

    def _plan(self, node: int, number: int, taken: int) -> None:
        engine = self.engine
        situation = self._situation(node)
        rungs = ladder(situation, engine.asked.costs, engine.system.actions)
        if taken < len(rungs) and situation.slowdown > 1:
            due_s = rungs[taken].cost / (situation.workers * (1 - 1 / situation.slowdown))
            engine.clock.after(due_s, self._climb, node, number, taken, rungs[taken])

    def _situation(self, node: int) -> Situation:
        """What the job loses by what is believed of the node."""
        engine = self.engine
        slowdown = engine.books.grown(node, self.spells[node].believed)
        made = engine.asked.situation("slow", [engine.fleet.seat_of(node)], 0, slowdown)
        return msgspec.structs.replace(made, target=f"n{node}")

    def _decided(self, node: int, rung: Rung | None) -> None:
        """None: nothing is done yet."""
        engine, situation = self.engine, self._situation(node)
        costs, actions = engine.asked.costs, engine.system.actions
        made = climbed(situation, costs, rung, actions) if rung else watched(situation, costs, actions)
        engine.say(e.Decided(self.spells[node].incident, scaled(made, engine.asked.per_node)))

    def _climb(self, node: int, number: int, taken: int, rung: Rung) -> None:
        engine = self.engine
        if not self._is_slow(node, number) or engine.fleet.seat_of(node) < 0:
            return
        needs_standby = rung.action in (Action.PROMOTE, Action.EVICT)
        if engine.books.phase is not Phase.RUN or (needs_standby and not engine.fleet.standbys):
            engine.clock.after(LATER_S, self._climb, node, number, taken, rung)
            return
        engine.settle()
        engine.got.actions[rung.action] += 1
        self._decided(node, rung)
        if rung.action is Action.REROUTE:
            engine.books.eased[node] = 1 / (1 - rung.residual)
            engine.books.changed()
            self._plan(node, number, taken + 1)
        elif needs_standby and engine.fleet.fits(engine.fleet.seat_of(node)) >= 0:
            self._close(self.spells[node], LEFT_ROLE)
            engine.replace(node, rung.action)
        else:
            self._close(self.spells[node], "recovered")
            engine.take_out([node], "slow", engine.cluster.repair_s, alive=True)

"""Whole pipelines of so many nodes: who has a role, who waits without one, and whose neighbour computes for it too.

As Bamboo's public simulator has it: the predecessor of a lost member holds a copy of its stage and computes for both,
which makes the whole job slower but loses nothing. At the end of that step all meet, and form anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everstep.core.decisions import Action
from everstep.core.errors import UsageError
from everstep.observe.view import Bucket
from everstep.sim.books import Phase
from everstep.sim.fleet import Fleet
from everstep.sim.scenario import seconds_of

if TYPE_CHECKING:
    from everstep.sim.engine import Engine, Incident

AT_RISK = 0.05  # with more than this share of members whose loss could not be borne, all form anew
SOON = 1e-3  # of a step: looks for its end are at least so far apart


class Roles:
    """Who does what since all formed last. `formed`: the nodes that there were then, those without a role too."""

    def __init__(self, fleet: Fleet, depth: int, order: Sequence[int] = ()) -> None:
        self.fleet, self.depth = fleet, depth
        self.form(order)

    def form(self, order: Sequence[int] = ()) -> None:
        """The first nodes fill whole pipelines, in this order or that of their numbers."""
        self.fleet.fill()
        here = list(order) or self.fleet.seated()
        places = len(here) // self.depth * self.depth
        self.formed = len(here)
        self.holder = here[:places]  # by pipeline, then by stage
        self.idle = set(here[places:])
        self.doubled: set[int] = set()  # who computes for a neighbour too
        self.slowed = False
        self.fatal = False  # a stage is lost with both that held it
        self.stale = False

    @property
    def working(self) -> int:
        return len(self.holder) - len(self.doubled)

    def lost(self, node: int) -> bool:
        """Whether it had a role, which its predecessor has now."""
        self.stale = True
        self.idle.discard(node)
        if node not in self.holder:
            return False
        place = self.holder.index(node)
        stage = place % self.depth
        helper = self.holder[place - stage + (stage - 1) % self.depth]
        self.fatal = self.fatal or bool({node, helper} & self.doubled) or helper in self.fleet.out or helper == node
        self.holder[place] = helper
        self.doubled.add(helper)
        self.slowed = True
        return True

    def joined(self) -> None:
        self.stale = True
        self.fleet.fill()
        self.idle.update(set(self.fleet.seated()) - set(self.holder))

    def due(self) -> bool:
        """Whether to form anew: somebody could help, too many are at risk, or there can be one pipeline more."""
        doubled, idle = len(self.doubled), len(self.idle)
        if doubled and (idle >= doubled or 2 * doubled / self.working > AT_RISK):
            return True
        return (self.working + idle) // self.depth > len(self.holder) // self.depth


class Forming:
    """When all form anew: at the end of a step in which somebody was lost or came, or with the end of any pause.

    Without `job.pipeline_nodes` it says that every loss matters, and does nothing else.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, depth = engine, engine.job.pipeline_nodes
        if depth:
            engine.books.roles = Roles(engine.fleet, depth, self._order(engine.scenario.cluster.ready))
        self._incident: Incident | None = None
        self._token = 0  # of the end of a step that is awaited

    def _order(self, ready: Sequence[str]) -> list[int]:
        order = [self.engine.nodes_of.get(name, -1) for name in ready]
        if ready and sorted(order) != self.engine.fleet.seated():
            raise UsageError("cluster.ready: expected each node that the trace has at its begin, once")
        return order

    @property
    def keeps_step(self) -> bool:
        roles = self.engine.books.roles
        return roles is not None and not roles.fatal and Action.TAKE_OVER in self.engine.system.actions

    def lost(self, nodes: Sequence[int]) -> bool:
        """Whether something has to be done about it. Whoever goes while all meet makes them meet again."""
        books = self.engine.books
        if books.roles is None:
            return True
        had = [books.roles.lost(node) for node in nodes]
        runs = books.phase is Phase.RUN
        if runs and self.engine.strategy.idle_slows:
            books.roles.slowed = True
        books.changed()
        return any(had) or not runs

    def joined(self) -> bool:
        """Somebody came. True: without a role for now."""
        books = self.engine.books
        if books.roles is None:
            return False
        books.roles.joined()
        books.changed()
        if books.phase is Phase.RUN:
            self._await_step()
        return True

    def takes_over(self, incident: Incident) -> bool:
        """The job goes on, and all meet later. False: it is not made of whole pipelines."""
        if self.engine.books.roles is None:
            return False
        self._incident = incident
        if self.engine.books.phase is Phase.RUN:
            self._await_step()
        else:
            self._meet()
        return True

    def form(self) -> None:
        """A pause is over."""
        books = self.engine.books
        if books.roles is not None and books.roles.stale:
            books.roles.form()
            books.changed()

    def _await_step(self) -> None:
        self._token += 1
        self._look(self._token, self.engine.books.progress.steps + 1)

    def _look(self, token: int, steps: int) -> None:
        engine, books = self.engine, self.engine.books
        if token != self._token or books.phase is not Phase.RUN:
            return
        engine.settle()
        if books.progress.steps < steps:
            pace = books.pace()
            wait_s = max(books.progress.step_ends_s(pace), SOON * pace.step_s)
            engine.clock.after(wait_s, self._look, token, steps)
        elif books.roles is not None and books.roles.due():
            self._meet()
        else:
            engine.close_all()

    def _meet(self) -> None:
        engine, incident = self.engine, self._incident
        usual_s = engine.asked.costs.seconds(Action.TAKE_OVER, engine.fleet.seats)
        down_s = seconds_of(engine.scenario, usual_s, Action.TAKE_OVER, engine.fleet.present)
        if incident is not None and incident.id in engine.open:
            engine.recover(incident, Action.TAKE_OVER, down_s)
        else:
            engine.pause([(Bucket.RECOVERY, down_s)])

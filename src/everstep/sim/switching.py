"""Jobs that work on at their old pace until what follows a loss is ready, and then switch to it.

So do those of the simulator that was published with Oobleck. A switch may tear a save: the workers that write it are
stopped, and those whose step it cuts off may be in the way of another one until that step would have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.sim.books import Phase

if TYPE_CHECKING:
    from everstep.sim.engine import Engine, Incident


class Switching:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.switches = 0
        self.awaited = False  # somebody waits for the next one
        self.stands = False

    def prepare(self, incident: Incident, for_s: float) -> None:
        """Ready after so long."""
        self.awaited = True
        if incident.redone:
            self._epoch()
        self.engine.clock.after(for_s, self._ready, incident)

    def formed(self) -> None:
        """All that are there work together."""
        self.awaited = self.stands = False

    def _ready(self, incident: Incident) -> None:
        """The step under way is lost. Nobody waits for this if all went with an earlier switch, or began with it."""
        engine = self.engine
        engine.settle()
        engine.teller.seen()
        self.switches += 1
        if self.switches in engine.strategy.tears:
            left_s = engine.books.progress.step_ends_s(engine.books.pace())
            self._tear()
            engine.clock.after(left_s, self._tear)
        engine.books.progress.release(engine.now)
        engine.books.undo_part()
        if self.awaited or engine.strategy.overlap != "stands":
            self._switch(incident)
        else:
            self.stands = True
            engine.wait()

    def _switch(self, incident: Incident) -> None:
        engine, books = self.engine, self.engine.books
        stood = self.stands and books.phase is Phase.WAIT and books.can_run()
        self.formed()
        books.switched()
        self._epoch()
        if stood:
            books.phase = Phase.RUN
            engine.close_all()
        elif incident.id in engine.open:
            engine.close(incident, "recovered")

    def _tear(self) -> None:
        self.engine.settle()
        self.engine.teller.seen()
        if self.engine.books.save_fails(self.engine.now):
            self._epoch()

    def _epoch(self) -> None:
        """Steps are counted anew from here on."""
        self.engine.teller.epoch += 1
        self.engine.teller.form()

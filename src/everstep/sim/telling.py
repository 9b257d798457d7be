"""What a simulated job tells of itself, beside its incidents: epochs, steps, stages and how many accelerators do what.

After each event of the simulation `Teller.look` compares, and says what is new. It changes nothing: a run comes to the
same with or without anybody who listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from everstep.core import events as e
from everstep.core.types import EpochPlan
from everstep.observe.view import Bucket
from everstep.sim.books import Phase

if TYPE_CHECKING:
    from everstep.sim.engine import Engine

Sink = Callable[[float, int, e.AnyEvent], None]  # seconds since the begin, epoch, what happened

STAGES = {Bucket.START: "forming", Bucket.DETECTION: "suspect", Bucket.RECOVERY: "re-seating"}  # of a pause


class Teller:
    def __init__(self, engine: Engine, sink: Sink | None) -> None:
        self.engine, self.sink = engine, sink
        self.epoch = 1
        self.stage = "checking"
        self._fleet: e.FleetSeen | None = None
        self._began = (0.0, 0, 0, 0.0)  # of the epoch: when; steps, saves and seconds in saves before it
        self._steps = 0  # of the epoch, said

    def say(self, event: e.AnyEvent) -> None:
        if self.sink is not None:
            self.sink(self.engine.now, self.epoch, event)

    def form(self) -> None:
        """An epoch without its list of members: with thousands, that would be the whole journal."""
        books = self.engine.books
        world = books.working * books.per_node
        self.say(e.EpochFormed(EpochPlan(self.epoch, (), world, "", 0, self.epoch - 1)))
        progress = books.progress
        self._began, self._steps = (self.engine.now, progress.steps, progress.saves, books.stalled_s), 0

    def seen(self, lost: bool = False) -> None:
        """Whole steps. Of one under way it is not told what will be lost of it."""
        began_s, steps, saves, stalled_s = self._began
        books, now = self.engine.books, self.engine.now
        progress = books.progress
        made = progress.steps - steps
        if made > self._steps and self.sink is not None:
            self._steps = made
            at_s = max(began_s, now - progress.part * books.pace().step_s) if lost else now
            stall_s = books.stalled_s - stalled_s
            durable = max((save.steps for save in progress.kept if save.durable_at_s <= now), default=-1)
            kept = max(-1, durable - steps)
            self.say(
                e.StepsSeen(
                    self.epoch, made, progress.steps, at_s, min(at_s, began_s + books.full_step_s),
                    progress.saves - saves, kept, stall_s=stall_s,
                )
            )  # fmt: skip

    def look(self) -> None:
        """After anything happened; the books are settled if something changed."""
        if self.sink is None:
            return
        stage, fleet = self._stage(), self._now()
        if stage != self.stage or fleet != self._fleet:
            self.seen()
        if stage != self.stage:
            self.say(e.StageChanged(self.stage, stage))
        if fleet != self._fleet:
            self.say(fleet)
        self.stage, self._fleet = stage, fleet

    def _stage(self) -> str:
        books, now = self.engine.books, self.engine.now
        if books.phase is Phase.RUN:
            return "running"
        if books.phase is not Phase.PAUSE:
            return "re-forming"
        part = next((bucket for bucket, until in books.pauses if until > now), Bucket.RECOVERY)
        return STAGES[part]

    def _now(self) -> e.FleetSeen:
        books = self.engine.books
        fleet, per_node = books.fleet, books.per_node
        runs = books.phase is Phase.RUN
        acting, spare = (books.working if runs else fleet.present), len(fleet.standbys)
        missing = books.total_nodes - spare - acting
        straggling, redundant = self._losses() if runs else (0.0, 0.0)
        slow = sum(fleet.seat_of(node) >= 0 for node in books.slow)
        return e.FleetSeen(
            acting * per_node, spare * per_node, missing * per_node, slow * per_node, straggling, redundant
        )

    def _losses(self) -> tuple[float, float]:
        """Shares of the time of steps, as the books have them."""
        books = self.engine.books
        pace, redundancy = books.pace(), books.redundancy()
        spent = pace.step_s * books.working * books.per_node
        if not spent:
            return 0.0, 0.0
        lost = spent - pace.worth
        redundant = min(lost, pace.worth * (redundancy - 1))
        straggling = lost - redundant
        rest = spent - straggling
        return straggling / spent, redundant / rest if rest else 0.0

"""How a drained target leaves, as a fold over the journal: one line for each thing that a person wants to know.

A target is a node, or the place of one worker (node/local_rank). What came before the wish was journalled does not
count.
"""

from __future__ import annotations

from everstep.core import events as e
from everstep.core.formation import Formation, Stage
from everstep.core.types import NodeLoss, NodeReport


class Leaving:
    """`gone`: nothing of the target is left in the job, and the others go on. `ended`: how the job did."""

    def __init__(self, target: str) -> None:
        self.target = target
        node, _, place = target.rpartition("/")
        self.node = node or target
        self.local_rank = int(place) if node else -1
        self.asked = self.gone = False
        self.ended: e.JobEnded | None = None
        self.step = -1  # the last one known of the job
        self._formation: Formation | None = None
        self._left = -1  # it gave its roles up after this many steps
        self._awaited = False  # the others stopped too, and are to be dealt a new epoch
        self._go_on = ""  # who does, in words
        self._departed = False

    def saw(self, event: e.AnyEvent) -> str:
        """What this event tells, in words; empty: nothing new."""
        match event:
            case e.DrainAsked(target, undo=False) if target == self.target:
                self._reset()
                return f"{self.target} is asked to leave"
            case e.StepsSeen(_, step, total_step):
                self.step = max(step, total_step)
            case e.FormationMade(formation):
                before, self._formation = self._formation, formation
                return self._seats(before, formation) if self.asked else ""
            case e.EpochFormed(plan):
                self._formation = None
                if self.asked and self._awaited and (self._departed or plan.member(self.node) is None):
                    nodes = ", ".join(member.node for member in plan.members)
                    self._awaited = False
                    self._go_on = f"{plan.world_size} workers on {nodes} go on from there in epoch {plan.epoch}"
                    return self._over()
            case e.IncidentOpened(_, "drain") if self.asked:
                self._awaited = True
            case e.WorkerEnded(_, node, exit) if self.asked and self._awaited and node == self.node:
                self._left = max(self._left, exit.total_step, exit.step)
            case e.NodeReported(report) if self.asked and report.node == self.node:
                return self._reported(report)
            case e.NodeLost(node, _, how) if self.asked and node == self.node:
                self._departed = True
                if how is not NodeLoss.LEFT:
                    self._go_on = f"it was lost on its way out ({how.value})"
                return self._over()
            case e.JobEnded():
                self.ended = event
        return ""

    def _reset(self) -> None:
        self.asked, self.gone = True, False
        self._left, self._awaited, self._go_on, self._departed = -1, False, "", False

    def _mine(self, worker: str) -> bool:
        node, _, rest = worker.rpartition("/")
        return node == self.node and self.local_rank in (-1, int(rest.partition("#")[0]))

    def _seats(self, before: Formation | None, formation: Formation) -> str:
        """A formation without it says who goes on."""
        former = {seat.worker for seat in before.seats} if before is not None else set()
        if any(self._mine(seat.worker) for seat in formation.seats) or not any(map(self._mine, former)):
            return ""
        came = [seat.worker.partition("#")[0] for seat in formation.seats if seat.worker not in former]
        taken = f", {', '.join(came)} in its place" if came else ""
        count = len(formation.seats)
        self._go_on = f"{count} member{'s go' if count > 1 else ' goes'} on{taken}"
        return f"it leaves at the end of a step, {self._go_on} (formation {formation.epoch})"

    def _reported(self, report: NodeReport) -> str:
        mine = [worker for worker in report.workers if self.local_rank in (-1, worker.local_rank)]
        for worker in mine:
            if worker.session is not None and worker.session.stage is Stage.LEFT:
                self._left = max(self._left, worker.session.committed)
        if self.local_rank >= 0 and all(worker.gone for worker in mine):
            self._departed = True
            return self._over()
        return ""

    def _over(self) -> str:
        if self.gone or not self._departed or self._awaited:
            return ""
        self.gone = True
        when = f" after step {self._left}" if self._left >= 0 else ""
        return f"{self.target} has left{when}{'; ' if self._go_on else ''}{self._go_on}"

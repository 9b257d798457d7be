"""What happens between a worker's word that it gave up waiting for another one, and the eviction that it brings about.

Evicted at once, the late worker would be stopped before anybody saw where it was. So reports which tell of nothing but
time-outs are held back for a moment, while the others' stacks are asked for. A new controller, which knows nothing of
this, gets the same reports again.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from everstep.control.job import ACTIVE, Job
from everstep.core.types import (
    Activity,
    Blame,
    EpochPlan,
    Exit,
    NodeReport,
    Phase,
    StacksAsked,
    StacksTaken,
    Verdict,
    WorkerProgress,
)
from everstep.detect.blame import is_victim
from everstep.detect.late import gave_up, late_one

PATIENCE_S = 1.0  # after the first complaint; the library waited for seconds or minutes before it
SETTLE_S = 0.5  # at least, also when all stacks are there: one may show a worker that is about to complain as well

Questions = list[tuple[str, StacksAsked]]


class Held(msgspec.Struct, frozen=True):
    report: NodeReport
    heard_s: float


class Patience:
    """The reports held back, of one epoch. Times are the controller's."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.until_s = 0.0
        self.asked: tuple[int, ...] = ()
        self.stacks: dict[int, str] = {}

    def holds(self, job: Job, report: NodeReport, now: float) -> bool:
        """Whether this report is to wait; a node's newest takes the place of the one before."""
        plan = job.plan
        member = plan.member(report.node) if plan else None
        running = report.activity is Activity.RUNNING and job.stage in ACTIVE and report.epoch == job.epoch
        ends = [w.exit for w in report.workers if w.exit is not None and w.exit.failed]
        known = self.held.pop(report.node, None)
        if not running or member is None or member.incarnation != report.incarnation:
            return False
        if not ends or not all(map(is_victim, ends)) or not (self.held or known or any(map(gave_up, ends))):
            return False  # a worker failed on its own: that is the cause
        if not self.held and known is None:
            self.until_s, self.asked, self.stacks = now + PATIENCE_S, (), {}
        self.held[report.node] = Held(report, now)
        return True

    def questions(self, plan: EpochPlan, workers: Mapping[int, WorkerProgress]) -> Questions:
        """Whose stacks to ask for, once: those that neither failed nor are stopped (a signal would wake them)."""
        if self.asked:
            return []
        failed = self._failed(plan)
        able = {r for r, w in workers.items() if r not in failed and not w.stopped and w.phase is not Phase.DONE}
        self.asked = tuple(sorted(able))
        found: Questions = []
        for member in plan.members:
            local = tuple(k for k in range(member.slots) if member.first_rank + k in able)
            if local:
                found.append((member.node, StacksAsked("", plan.epoch, local)))
        return found

    def saw(self, taken: StacksTaken) -> None:
        if self.held:
            self.stacks |= taken.stacks

    def settle(
        self, job: Job, workers: Mapping[int, WorkerProgress], now: float
    ) -> tuple[Verdict | None, list[NodeReport]]:
        """What is known by now, and the reports to go on with; none: go on waiting."""
        plan = job.plan
        if not self.held or plan is None:
            return None, []
        verdict = None
        if job.stage in ACTIVE and all(h.report.epoch == job.epoch for h in self.held.values()):
            failed = self._failed(plan)
            missing = any(r not in self.stacks and r not in failed for r in self.asked)
            if now < self.until_s - (0.0 if missing else PATIENCE_S - SETTLE_S):
                return None, []
            if len(workers) == plan.world_size:
                verdict = self._judge(plan, workers, failed)
        held, self.held = self.held, {}
        # Ages count from when a report is taken in.
        return verdict, [
            msgspec.structs.replace(h.report, sent_s=h.report.sent_s + now - h.heard_s) for h in held.values()
        ]

    def _failed(self, plan: EpochPlan) -> dict[int, Exit]:
        return {
            plan.rank(node, w.local_rank): w.exit
            for node, held in self.held.items()
            for w in held.report.workers
            if w.exit is not None and w.exit.failed
        }

    def _judge(
        self, plan: EpochPlan, workers: Mapping[int, WorkerProgress], failed: Mapping[int, Exit]
    ) -> Verdict | None:
        first = next((r for r in sorted(failed) if gave_up(failed[r])), None)
        if first is None:  # who did ended otherwise after all
            return None
        odd = late_one([workers[rank] for rank in sorted(workers)], failed, self.stacks)
        if not odd.ranks:
            return None
        nodes = {m.first_rank + k: m.node for m in plan.members for k in range(m.slots)}
        message = " ".join(failed[first].message.split())[:200]
        late = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in odd.ranks)
        why = f"rank {first} on {nodes[first]} gave up waiting ({message}); late was {late}: {odd.what}"
        return Verdict("hang", tuple(Blame(r, nodes[r], odd.cause, odd.what) for r in odd.ranks), why, odd.confidence)

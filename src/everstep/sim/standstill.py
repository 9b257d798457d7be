"""A few members that make steps together until one stands still: how long until the hang detector is sure, and of whom.

They report as agents do. The faulty one has not entered the collective that all others wait in. Nobody's stacks say
more than that; they are there when they are asked for.
"""

from __future__ import annotations

from typing import NamedTuple

from everstep.core.config import Control, Hang
from everstep.core.types import EpochPlan, Member, NodeProgress, Phase, StacksTaken, Verdict, WorkerProgress
from everstep.detect.hang import HangDetector, HangState, SuspectStacksWanted
from everstep.detect.timeouts import LEARN_STEPS, Limits
from everstep.sim.chance import Chance, below

SETTLED = LEARN_STEPS + 3  # steps that teach the limit, of an epoch that nobody is new in
REPORTS = 40  # a step, at most: of long ones fewer tell as much
NEW_REPORT_S = 2.0  # while somebody is new the limit is minutes
TAIL = 1.96  # deviations within which 19 of 20 lie


class Stood(NamedTuple):
    """`took_s`: from the moment it stands still to the verdict. `right`: it names the member, and no other."""

    took_s: float
    right: bool


class _Crew:
    """A session's members. In an epoch after the first, rank 0 is a new process on a new node."""

    def __init__(self, members: int, step_s: float, jitter: float, report_s: float, chance: Chance) -> None:
        hang = Hang()
        self.members, self.step_s, self.jitter, self.report_s, self.chance = members, step_s, jitter, report_s, chance
        self.detector = HangDetector(
            Limits(hang.timeout_s, hang.first_step_s, hang.save_s, hang.eval_s, hang.safety_factor, report_s)
        )
        self.state = HangState()
        self.epoch, self.formed_s, self.former = 0, 0.0, 0
        self.times = [0.0]  # ends of steps

    def form(self) -> None:
        """A new epoch."""
        self.epoch, self.formed_s, self.former = self.epoch + 1, self.times[-1], len(self.times) - 1
        names = (f"n{rank}" if rank else f"n0-{self.epoch}" for rank in range(self.members))
        seats = tuple(Member(name, "", "", n, n, 1) for n, name in enumerate(names))
        self.plan = EpochPlan(self.epoch, seats, self.members, "", 0, 0)
        self.state = self.detector.begin(self.plan, self.state)

    def work(self, steps: int) -> None:
        for _ in range(steps):
            length_s = self.step_s * max(0.1, 1.0 + self.jitter / TAIL * self.chance.gauss(0.0, 1.0))
            self.times.append(self.times[-1] + length_s)

    def told(self) -> None:
        """All reports of the steps of this epoch."""
        at_s = self.formed_s + self.report_s * self.chance.random()
        while at_s < self.times[-1]:
            assert self.report(at_s, -1) is None, "a healthy job was judged"
            at_s += self.report_s

    def report(self, now: float, stuck: int) -> Verdict | None:
        """All members tell where they are; `stuck` did not enter the collective of this step."""
        for rank, seat in enumerate(self.plan.members):
            worker = self._worker(rank, now, stuck)
            verdict = self._tell(NodeProgress(seat.node, "", self.epoch, now, (worker,)), now)
            if verdict is not None:
                return verdict
        return None

    def _worker(self, rank: int, now: float, stuck: int) -> WorkerProgress:
        steps = sum(end <= now for end in self.times[1:])
        entered = steps if rank == stuck else steps + 1
        new = steps == self.former and (self.epoch == 1 or rank == 0)
        age = now - (self.formed_s if new else self.times[steps])
        made, phase = (0, Phase.START) if new else (steps, Phase.TRAIN)
        return WorkerProgress(
            rank, 0, made, made, phase, age, age, age, collectives=entered, batches=steps + 1, stepped=not new
        )

    def _tell(self, message: NodeProgress | StacksTaken, now: float) -> Verdict | None:
        self.state, output = self.detector.step(self.state, message, now)
        if isinstance(output, SuspectStacksWanted):
            return self._tell(StacksTaken("", "", self.epoch, dict.fromkeys(output.ranks, "")), now)
        return output if isinstance(output, Verdict) else None


def stood(members: int, step_s: float, jitter: float, made: int, chance: Chance, starts: int = 0) -> Stood:
    """One of `members` stands still `made` steps after somebody began anew; SETTLED and more: nobody is new.

    `starts`: how often somebody began anew in this job, the last time too; 0: these are its first steps.
    """
    settled = made >= LEARN_STEPS
    report_s = max(Control().heartbeat_s if settled else NEW_REPORT_S, step_s / REPORTS)
    stuck = below(chance, members)
    crew = _Crew(members, step_s, jitter, report_s, chance)
    for _ in range(0 if settled else starts):
        crew.form()
        crew.work(SETTLED)
        crew.told()
    crew.form()
    crew.work(SETTLED if settled else made)
    from_s, now = crew.times[-1] + step_s * chance.random() / 2, crew.formed_s + report_s * chance.random()
    while True:
        verdict = crew.report(now, stuck if now >= from_s else -1)
        if verdict is not None:
            return Stood(max(0.0, now - from_s), tuple(blame.rank for blame in verdict.culprits) == (stuck,))
        now += report_s

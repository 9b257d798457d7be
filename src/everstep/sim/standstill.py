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
NEW_REPORT_S = 2.0  # while somebody is new the limit is that of the first step, half an hour
TAIL = 1.96  # deviations within which 19 of 20 lie


class Stood(NamedTuple):
    """`took_s`: from the moment it stands still to the verdict. `right`: it names the member, and no other."""

    took_s: float
    right: bool


class _Crew:
    def __init__(self, members: int, report_s: float) -> None:
        hang = Hang()
        self.detector = HangDetector(
            Limits(hang.timeout_s, hang.first_step_s, hang.save_s, hang.eval_s, hang.safety_factor, report_s)
        )
        seats = tuple(Member(f"n{n}", "", "", n, n, 1) for n in range(members))
        self.plan = EpochPlan(1, seats, members, "", 0, 0)
        self.state: HangState = self.detector.begin(self.plan)
        self.times = [0.0]  # ends of steps

    def report(self, now: float, stuck: int) -> Verdict | None:
        """All members tell where they are; `stuck` did not enter the collective of this step."""
        steps = sum(end <= now for end in self.times[1:])
        age = now - self.times[steps]
        for rank in range(self.plan.world_size):
            entered = steps if rank == stuck else steps + 1
            phase = Phase.TRAIN if steps else Phase.START
            worker = WorkerProgress(rank, 0, steps, steps, phase, age, age, age, collectives=entered, batches=steps + 1)
            verdict = self._tell(NodeProgress(f"n{rank}", "", 1, now, (worker,)), now)
            if verdict is not None:
                return verdict
        return None

    def _tell(self, message: NodeProgress | StacksTaken, now: float) -> Verdict | None:
        self.state, output = self.detector.step(self.state, message, now)
        if isinstance(output, SuspectStacksWanted):
            return self._tell(StacksTaken("", "", 1, dict.fromkeys(output.ranks, "")), now)
        return output if isinstance(output, Verdict) else None


def stood(members: int, step_s: float, jitter: float, made: int, chance: Chance) -> Stood:
    """One of `members` stands still `made` steps after somebody began anew; SETTLED and more: nobody is new."""
    report_s = max(Control().heartbeat_s if made >= LEARN_STEPS else NEW_REPORT_S, step_s / REPORTS)
    stuck = below(chance, members)
    crew = _Crew(members, report_s)
    for _ in range(made if made < LEARN_STEPS else SETTLED):
        crew.times.append(crew.times[-1] + step_s * max(0.1, 1.0 + jitter / TAIL * chance.gauss(0.0, 1.0)))
    from_s, now = crew.times[-1] + step_s * chance.random() / 2, report_s * chance.random()
    while True:
        verdict = crew.report(now, stuck if now >= from_s else -1)
        if verdict is not None:
            return Stood(max(0.0, now - from_s), tuple(blame.rank for blame in verdict.culprits) == (stuck,))
        now += report_s

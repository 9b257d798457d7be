"""The hang detector in the controller's hands: feeds it one epoch's heartbeats and stacks, and says what to do."""

from __future__ import annotations

import msgspec

from everstep.core.config import RunConfig
from everstep.core.events import Ticked
from everstep.core.types import EpochPlan, StacksAsked, Verdict
from everstep.detect.hang import HangDetector, HangEvent, SuspectStacksWanted, SuspicionLifted
from everstep.detect.timeouts import Limits


class Outcome(msgspec.Struct, frozen=True):
    """At most one of them is set: a suspicion with what to ask, its end, or a verdict."""

    suspect: str = ""
    questions: tuple[tuple[str, StacksAsked], ...] = ()  # node, message
    cleared: bool = False
    verdict: Verdict | None = None


NOTHING = Outcome()


class HangWatch:
    """One detector over the epochs of a job; what it learned about the job stays."""

    def __init__(self, config: RunConfig) -> None:
        hang = config.hang
        self.detector = HangDetector(
            Limits(
                timeout_s=hang.timeout_s,
                first_step_s=hang.first_step_s,
                save_s=hang.save_s,
                eval_s=hang.eval_s,
                factor=hang.safety_factor,
                report_s=config.heartbeat_s,
            )
        )
        self.state = self.detector.begin(None)

    def new_epoch(self, plan: EpochPlan | None) -> None:
        self.state = self.detector.begin(plan, self.state)

    def saw(self, event: HangEvent, now: float) -> Outcome:
        self.state, output = self.detector.step(self.state, event, now)
        match output:
            case SuspectStacksWanted(epoch, why, ranks):
                return Outcome(suspect=why, questions=self._questions(epoch, set(ranks)))
            case SuspicionLifted():
                return Outcome(cleared=True)
            case Verdict():
                return Outcome(verdict=output)
        return NOTHING

    def tick(self, now: float) -> Outcome:
        return self.saw(Ticked(), now)

    def _questions(self, epoch: int, ranks: set[int]) -> tuple[tuple[str, StacksAsked], ...]:
        """Which node is asked about which of its workers."""
        plan = self.state.plan
        assert plan is not None
        asked = []
        for member in plan.members:
            local = tuple(k for k in range(member.slots) if member.first_rank + k in ranks)
            if local:
                asked.append((member.node, StacksAsked("", epoch, local)))
        return tuple(asked)

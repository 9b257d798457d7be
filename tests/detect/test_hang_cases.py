"""The hang detector case by case: limits, excuses, evidence, and what an epoch forgets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.core.events import Ticked
from everstep.core.types import EpochPlan, Member, NodeProgress, Phase, StacksTaken, Verdict, WorkerProgress
from everstep.detect.hang import HangDetector, HangState, SuspectStacksWanted, SuspicionLifted
from everstep.detect.starts import Start, Starting
from everstep.detect.timeouts import Learned, Limits

TWO = Limits(timeout_s=2.0, report_s=0.1)
LEARNING = Limits(report_s=0.5)


def rounds(count: int, work_s: float, world: int = 4, first_s: float = 1.0) -> list[dict[int, Any]]:
    start = {r: [(Phase.START, first_s)] for r in range(world)}
    return [start, *({r: [(Phase.TRAIN, work_s)] for r in range(world)} for _ in range(count))]


def one(rank: int = 0, step: int = 9, phase: Phase = Phase.TRAIN, age_s: float = 0.0, **more: Any) -> WorkerProgress:
    ages = {"phase_age_s": age_s, "step_age_s": age_s, "life_age_s": age_s}
    return WorkerProgress(
        **{"rank": rank, "local_rank": rank, "step": step, "total_step": step, "phase": phase} | ages | more
    )


class Feed:
    """One node, reports by hand, `gap_s` apart."""

    def __init__(self, limits: Limits, world: int, stacks: dict[int, str] | None = None, gap_s: float = 0.1) -> None:
        plan = EpochPlan(1, (Member("node0", "inc", "h", 0, 0, world),), world, "h", 1, 0)
        self.detector, self.stacks, self.gap_s = HangDetector(limits), stacks, gap_s
        self.state = self.detector.begin(plan)
        self.t = 0.0
        self.outputs: list[Any] = []

    def report(self, *workers: WorkerProgress) -> None:
        self.t += self.gap_s
        self.step(NodeProgress("node0", "inc", 1, self.t, workers))
        if self.outputs and isinstance(self.outputs[-1], SuspectStacksWanted) and self.stacks:
            self.step(StacksTaken("node0", "", 1, self.stacks))

    def step(self, event: Any) -> None:
        self.state, output = self.detector.step(self.state, event, self.t)
        if output is not None:
            self.outputs.append(output)

    def silent(self, seconds: float, *workers: WorkerProgress) -> Verdict | None:
        """The same workers, ageing."""
        for i in range(1, round(seconds / self.gap_s) + 1):
            aged = (
                msgspec.structs.replace(
                    w,
                    phase_age_s=w.phase_age_s + i * self.gap_s,
                    step_age_s=w.step_age_s + i * self.gap_s,
                    life_age_s=w.life_age_s + i * self.gap_s,
                )
                for w in workers
            )
            self.report(*aged)
        return next((o for o in self.outputs if isinstance(o, Verdict)), None)


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("stopped", [True, False])
def test_timeout_of_2_s_judges_within_300_ms(paper: Any, answer: bool, stopped: bool) -> None:
    job = paper.build(rounds(30, 0.2), rank=3, fault_s=4.0, stopped=stopped)
    outputs = list(paper.play(job, TWO, 30.0, answer=answer))
    assert [type(o) for _, o, _ in outputs] == [SuspectStacksWanted, Verdict]
    at_s = outputs[1][0]
    assert job.last_step_s + 2.0 <= at_s <= job.last_step_s + 2.3
    assert outputs[0][0] < at_s - 0.4  # time enough for stacks
    assert [b.rank for b in outputs[1][1].culprits] == [3]
    assert outputs[1][1].culprits[0].cause == ("stopped" if stopped else "hang")


def test_stopped_worker_is_not_asked_for_its_stacks(paper: Any) -> None:
    job = paper.build(rounds(30, 0.2), rank=3, fault_s=4.0, stopped=True)
    asked = next(o for _, o, _ in paper.play(job, TWO, 30.0) if isinstance(o, SuspectStacksWanted))
    assert asked.ranks == (0, 1, 2)


def test_timeout_of_2_s_never_judges_a_long_first_step_save_or_evaluation(paper: Any) -> None:
    made = rounds(3, 0.3, first_s=15.0)
    made[0][1] = [(Phase.START, 0.5)]
    for phase in (Phase.SAVE, Phase.EVAL):
        made.append({r: [(phase, 10.0)] if r == 0 else [(Phase.TRAIN, 0.3)] for r in range(4)})
        made.append({r: [(phase, 10.0), (Phase.TRAIN, 0.5)] for r in range(4)})
    job = paper.build(made)
    assert job.last_step_s > 55
    assert paper.verdict_of(paper.play(job, TWO, job.last_step_s)) is None


def test_suspended_world_that_wakes_up_is_healthy(paper: Any) -> None:
    job = paper.build(rounds(30, 0.4))
    assert paper.verdict_of(paper.play(job, TWO, 12.0, pauses=((3.05, 400.0), (7.0, 30.0)))) is None


def test_missing_reports_are_nobodys_hang() -> None:
    feed = Feed(TWO, 2)
    feed.report(one(0), one(1))
    for _ in range(100):
        feed.t += 1.0
        feed.step(Ticked())
    assert feed.outputs == []


def test_node_that_does_not_report_holds_the_verdict_on_those_who_wait(paper: Any) -> None:
    job = paper.build(rounds(30, 0.2), rank=3, fault_s=4.0)
    plan = job.plan()
    detector = HangDetector(TWO)
    state: HangState = detector.begin(plan)
    for tick in range(200):
        t = tick / 10
        for member in plan.members[: 1 if t > 4 else 2]:
            workers = tuple(
                job.worker(r, t, lambda at, t=t: t - at) for r in (member.first_rank, member.first_rank + 1)
            )
            state, output = detector.step(state, NodeProgress(member.node, "inc", 1, t, workers), t)
            assert output is None


def test_stopped_during_an_excused_phase_is_found_and_excuses_nobody() -> None:
    feed = Feed(TWO, 2)
    verdict = feed.silent(2.5, one(0, phase=Phase.SAVE, stopped=True), one(1))
    assert verdict is not None and [b.rank for b in verdict.culprits] == [0]
    assert "stopped" in verdict.why and "limit 2.0 s" in verdict.why


def test_stopped_without_a_configured_limit_is_found_after_30_s() -> None:
    feed = Feed(LEARNING, 2, gap_s=0.5)
    start = one(0, step=0, phase=Phase.START, stopped=True)
    assert feed.silent(29.0, start, one(1, step=0, phase=Phase.START)) is None
    verdict = feed.silent(33.0, start, one(1, step=0, phase=Phase.START))
    assert verdict is not None and verdict.culprits[0].cause == "stopped"


def test_left_early_is_named_with_its_step(paper: Any) -> None:
    feed = Feed(TWO, 3, {0: paper.waiting, 1: paper.waiting})
    verdict = feed.silent(2.5, one(0, step=12), one(1, step=12), one(2, step=12, phase=Phase.DONE))
    assert verdict is not None
    assert [(b.rank, b.cause) for b in verdict.culprits] == [(2, "left-early")]
    assert "left early" in verdict.why and "step 12" in verdict.why


def test_last_one_may_finish_alone_what_it_does_after_training(paper: Any) -> None:
    feed = Feed(Limits(timeout_s=2.0, first_step_s=20.0, report_s=0.1), 2, {0: paper.busy})
    workers = (one(0, step=50), one(1, step=50, phase=Phase.DONE))
    assert feed.silent(19.0, *workers) is None
    verdict = feed.silent(21.0, *workers)
    assert verdict is not None and [b.rank for b in verdict.culprits] == [0]


def test_who_waited_for_the_last_save_has_time_to_end_after_it(paper: Any) -> None:
    feed = Feed(TWO, 2, {0: paper.waiting, 1: paper.waiting})
    assert feed.silent(10.0, one(0, step=50), one(1, step=50, phase=Phase.SAVE)) is None
    assert feed.silent(1.0, one(0, step=50, age_s=10.0), one(1, step=50, phase=Phase.DONE)) is None


def test_all_alike_gives_a_verdict_without_a_rank(paper: Any) -> None:
    feed = Feed(TWO, 3, dict.fromkeys(range(3), paper.waiting))
    verdict = feed.silent(2.5, one(0), one(1), one(2))
    assert verdict is not None
    assert [(b.rank, b.node) for b in verdict.culprits] == [(-1, "")]
    assert verdict.confidence < 0.5 and "3 of 3 workers" in verdict.why


def test_worker_of_a_loose_job_is_judged_while_the_others_step_on() -> None:
    feed = Feed(TWO, 2)
    for i in range(1, 40):
        feed.report(one(0, step=5, age_s=i * 0.1), one(1, step=5 + i))
    verdict = next(o for o in feed.outputs if isinstance(o, Verdict))
    assert [b.rank for b in verdict.culprits] == [0]


def test_progress_lifts_the_suspicion_and_later_ones_come_later() -> None:
    feed = Feed(TWO, 1)
    seen = []
    for step in range(5):
        feed.outputs.clear()
        feed.silent(1.9, one(0, step=step + 1))
        seen.append([type(o) for o in feed.outputs])
    assert seen[0] == [SuspectStacksWanted]
    assert seen[1][0] is SuspicionLifted
    assert seen[-1] == []  # by now the lead is too short for steps of 1.9 s


def test_one_verdict_an_epoch_and_the_next_forgets_all_but_what_was_learned() -> None:
    feed = Feed(TWO, 1)
    feed.silent(20.0, one(0))
    assert sum(isinstance(o, Verdict) for o in feed.outputs) == 1
    plan = EpochPlan(2, feed.state.plan.members, 1, "h", 1, 1)  # type: ignore[union-attr]
    fresh = feed.detector.begin(plan, feed.state)
    assert fresh == HangState(plan, feed.state.learned, Starting({"node0": "inc"}))


def test_messages_of_another_epoch_or_incarnation_change_nothing() -> None:
    feed = Feed(TWO, 1)
    before = feed.state
    feed.step(NodeProgress("node0", "inc", 7, 1.0, (one(0),)))
    feed.step(NodeProgress("node0", "older", 1, 1.0, (one(0),)))
    feed.step(NodeProgress("node9", "inc", 1, 1.0, (one(0),)))
    assert feed.state is before


def test_learned_limit_follows_the_longest_gap_and_never_goes_below_the_floor() -> None:
    feed = Feed(LEARNING, 1, gap_s=0.5)
    for step in range(1, 8):
        feed.silent(9.5, one(0, step=step))
    longest = feed.state.learned.longest_s[Phase.TRAIN]
    assert 9.0 <= longest <= 10.0
    assert feed.silent(longest * 5 - 2, one(0, step=8)) is None
    assert feed.silent(longest * 5 + 4, one(0, step=8)) is not None
    assert feed.state.learned.doubled == 1
    quick = Learned({Phase.TRAIN: 0.1})
    assert LEARNING.train_s(quick) == 30.0
    assert LEARNING.train_s(quick, Start.FIRST) == 1800.0
    assert LEARNING.train_s(quick.judged()) == 60.0


def test_batches_are_signs_of_work_when_limits_are_learned_but_not_when_configured() -> None:
    learned, configured = Feed(LEARNING, 1, gap_s=0.5), Feed(TWO, 1, gap_s=0.5)
    for i in range(1, 200):
        accumulating = one(0, age_s=i * 0.5, batches=i, life_age_s=0.1)
        learned.report(accumulating)
        configured.report(accumulating)
    assert not any(isinstance(o, Verdict) for o in learned.outputs)
    assert any(isinstance(o, Verdict) for o in configured.outputs)


def test_endless_alternation_of_phases_is_found_in_the_end() -> None:
    limits = Limits(timeout_s=2.0, first_step_s=3.0, save_s=3.0, eval_s=3.0, report_s=0.1)
    feed = Feed(limits, 2)
    for i in range(1, 600):
        feed.report(
            one(0, phase=Phase.EVAL, phase_age_s=(i % 20) / 10, step_age_s=i / 10),
            one(1, phase_age_s=i / 10, step_age_s=i / 10),
        )
    verdict = next(o for o in feed.outputs if isinstance(o, Verdict))
    assert verdict is not None and feed.t > limits.stepless_s


def test_phase_limits_extend_with_what_was_seen_and_are_never_below_the_timeout() -> None:
    limits = Limits(timeout_s=100.0, save_s=10.0)
    assert limits.phase_s(Phase.SAVE, Learned()) == 100.0
    assert limits.phase_s(Phase.SAVE, Learned({Phase.SAVE: 30.0})) == 150.0
    assert limits.phase_s(Phase.LOAD, Learned({Phase.SAVE: 30.0})) == 100.0
    assert limits.phase_s(Phase.EVAL, Learned({Phase.EVAL: 1.0})) == 1800.0

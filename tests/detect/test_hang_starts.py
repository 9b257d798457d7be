"""Limits of starts: learned by kind, never from a warmer one alone, and given back to the configured one in doubt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.core.types import EpochPlan, Member, NodeProgress, Phase, Verdict, WorkerProgress
from everstep.detect.hang import HangDetector, HangState
from everstep.detect.starts import Start, Starting
from everstep.detect.timeouts import START_FLOOR_S, Learned, Limits

EVERY_S = 2.0
LIMITS = Limits(report_s=EVERY_S)
NEW, ALIVE = {"born_age_s": 0.5}, {"born_age_s": 900.0, "stepped": True}


class Job:
    """Two members of one worker each, epoch after epoch, on one detector."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.detector, self.now, self.steps = HangDetector(limits), 0.0, 0
        self.state: HangState | None = None
        self.lives = ["a", "b"]

    def form(self, *who: str) -> None:
        """`who`: new incarnations of both, or those they had."""
        self.lives = list(who) or self.lives
        epoch = self.state.plan.epoch + 1 if self.state and self.state.plan else 1
        seats = tuple(Member(f"node{n}", life, "h", n, n, 1) for n, life in enumerate(self.lives))
        self.state = self.detector.begin(EpochPlan(epoch, seats, 2, "h", 1, 0), self.state)

    def runs(self, seconds: float, *workers: dict[str, Any]) -> Verdict | None:
        """Both report for so long, and do nothing else. Each worker: what is not usual about it."""
        for tick in range(int(seconds / EVERY_S) + 1):
            age_s = tick * EVERY_S
            verdict = self.told(age_s, *workers)
            if verdict is not None:
                self.judged_s = age_s
                return verdict
        return None

    def told(self, age_s: float, *workers: dict[str, Any]) -> Verdict | None:
        assert self.state is not None and self.state.plan is not None
        epoch = self.state.plan.epoch
        self.now += EVERY_S
        verdict = None
        for rank, more in enumerate(workers):
            step = more.get("step", 0)
            known = {"phase": Phase.TRAIN if step else Phase.START, "step": step, "total_step": step}
            ages = {"phase_age_s": age_s, "step_age_s": age_s, "life_age_s": age_s}
            worker = WorkerProgress(**{"rank": rank, "local_rank": 0} | known | ages | more)
            message = NodeProgress(f"node{rank}", self.lives[rank], epoch, self.now, (worker,))
            self.state, output = self.detector.step(self.state, message, self.now)
            verdict = verdict or (output if isinstance(output, Verdict) else None)
        return verdict

    def starts(self, seconds: float, *workers: dict[str, Any]) -> None:
        """Both come to their first steps after so long, and make a few more."""
        assert self.runs(seconds, *workers) is None
        for step in range(1, 7):
            self.steps += 1
            counts = [{**more, "step": max(step, more.get("step", 0) + step), "stepped": True} for more in workers]
            assert self.told(0.0, *counts) is None

    def kind(self) -> Start:
        assert self.state is not None
        return self.state.starting.kind


def known() -> Job:
    """A job that began and was begun anew once, both times in a minute."""
    job = Job()
    for _ in range(2):
        job.form()
        job.starts(60.0, NEW, NEW)
    return job


def test_first_starts_have_the_configured_limit_and_later_ones_five_times_what_was_seen() -> None:
    job = Job()
    for kind in (Start.FIRST, Start.ALL_RESPAWNED):
        job.form()
        job.starts(1700.0 if kind is Start.FIRST else 100.0, NEW, NEW)
        assert job.kind() is kind
    job.form()
    verdict = job.runs(3000.0, NEW, NEW)
    assert verdict is not None and 500.0 <= job.judged_s <= 520.0
    assert "no sign of life in its start" in verdict.why and "learned" in verdict.why


def test_never_below_five_minutes_and_a_colder_start_is_another_kind() -> None:
    job = known()
    job.form()
    assert job.runs(3000.0, NEW, NEW) is not None and 300.0 <= job.judged_s <= 320.0
    job = known()
    job.form("a", "new")
    verdict = job.runs(3000.0, NEW, NEW)
    assert verdict is not None and 1800.0 <= job.judged_s <= 1810.0 and "configured" in verdict.why


def test_signs_of_life_hold_the_learned_limit_but_not_the_configured_one() -> None:
    job = known()
    job.form()
    reading = {**NEW, "life_age_s": 1.0}
    assert job.runs(3000.0, reading, NEW) is not None
    assert 1800.0 <= job.judged_s <= 1810.0


def test_a_verdict_gives_the_configured_limit_back_until_such_a_start_has_ended() -> None:
    job = known()
    job.form()
    assert job.runs(3000.0, NEW, NEW) is not None
    job.form()
    job.starts(800.0, NEW, NEW)
    job.form()
    assert job.runs(5000.0, NEW, NEW) is not None and 4000.0 <= job.judged_s <= 4020.0
    job = known()
    job.form()
    assert job.runs(3000.0, NEW, NEW) is not None
    job.form()
    job.starts(30.0, NEW, NEW)
    job.form()
    assert job.runs(3000.0, NEW, NEW) is not None and 300.0 <= job.judged_s <= 320.0


def test_configured_limits_are_obeyed() -> None:
    job = Job(Limits(timeout_s=400.0, first_step_s=500.0, report_s=EVERY_S))
    for _ in range(3):
        job.form()
        job.starts(60.0, NEW, NEW)
    job.form()
    assert job.runs(3000.0, NEW, NEW) is not None and 500.0 <= job.judged_s <= 510.0


def test_who_trains_on_has_five_minutes_for_its_first_step_and_teaches_nothing_of_later_ones() -> None:
    """A session's members in a new epoch: other shapes may have to be compiled."""
    job = known()
    job.form()
    trained = {**ALIVE, "step": 40}
    job.starts(290.0, trained, trained)
    assert job.state is not None and job.state.learned.longest_s[Phase.TRAIN] < 10.0
    assert job.runs(100.0, {**ALIVE, "step": 47}, {**ALIVE, "step": 47}) is not None
    assert job.judged_s <= 40.0
    job = known()
    job.form()
    assert job.runs(3000.0, trained, trained) is not None and 300.0 <= job.judged_s <= 320.0


def test_a_newcomer_among_survivors_holds_them_up_for_as_long_as_newcomers_need() -> None:
    job = known()
    for limit_s in (1800.0, 300.0):
        trained = {**ALIVE, "step": 40}
        job.form("new", "b")
        if limit_s < 1800.0:
            job.starts(20.0, NEW, trained)
            assert job.kind() is Start.JOINED
            job.form("newer", "b")
        assert job.runs(3000.0, NEW, trained) is not None and limit_s <= job.judged_s <= limit_s + 10.0


@pytest.mark.parametrize(
    ("workers", "kind"),
    [
        ([("old", {"step": 9, "stepped": True})], Start.REFORMED),
        ([("old", {"step": 9, "stepped": True}), ("old", {"stepped": True})], Start.RERUN),
        ([("old", {"stepped": True}), ("new", {"born_age_s": 90.0})], Start.PROMOTED),
        ([("old", {"stepped": True}), ("old", {"born_age_s": 1.0})], Start.RESPAWNED),
        ([("old", {"stepped": True}), ("new", {"born_age_s": 1.0}), ("old", {})], Start.JOINED),
        ([("old", {}), ("new", {"born_age_s": 90.0})], Start.ALL_RESPAWNED),
        ([("old", {}), ("new", {"born_age_s": 1.0})], Start.ALL_JOINED),
    ],
)
def test_the_coldest_member_makes_the_kind(workers: list[tuple[str, dict[str, Any]]], kind: Start) -> None:
    starting = Starting({"old": "x"}, first=False)
    for node, more in workers:
        known = {"rank": 0, "local_rank": 0, "step": 0, "total_step": 0, "phase": Phase.START}
        ages = {"phase_age_s": 0.0, "step_age_s": 0.0, "life_age_s": 0.0}
        starting = starting.saw(node, WorkerProgress(**known | ages | more))
    assert starting.kind is kind
    assert Starting({}, True, starting.coldest, starting.survived).kind is Start.FIRST


def test_a_node_is_warm_where_steps_were_made_and_as_long_as_it_stays() -> None:
    starting = Starting().next(None, {"node0": "a", "node1": "b"}, False)
    seats = (Member("node0", "a", "h", 0, 0, 1), Member("node1", "other", "h", 1, 1, 1), Member("n", "c", "h", 2, 2, 1))
    assert starting.next(EpochPlan(2, seats, 3, "h", 1, 0), {}, False) == Starting({"node0": "a"}, False)


@settings(max_examples=200, deadline=None)
@given(seen=st.lists(st.tuples(st.sampled_from(list(Start)), st.floats(0.1, 1000.0)), max_size=12))
def test_five_times_any_start_of_the_kind_is_allowed(seen: list[tuple[Start, float]]) -> None:
    learned = Learned()
    for kind, duration_s in seen:
        learned = learned.started(kind, duration_s).saw(Phase.START, duration_s)
    most_s = LIMITS.phase_s(Phase.START, learned)
    limits = {kind: LIMITS.start_s(kind, learned) for kind in Start}
    for kind, limit_s in limits.items():
        longest_s = max((s for k, s in seen if k is kind), default=None)
        assert START_FLOOR_S <= limit_s <= most_s
        if kind is Start.FIRST or (longest_s is None and kind is not Start.REFORMED):
            assert limit_s == most_s
        assert limit_s >= LIMITS.factor * (longest_s or 0.0)
        assert LIMITS.start_s(kind, learned.misjudged(kind)) == most_s
    by_cold = [limits[kind] for kind in sorted({kind for kind, _ in seen})]
    assert by_cold == sorted(by_cold), "a warmer start is not allowed more than a colder one"


@settings(max_examples=25, deadline=None)
@given(first_s=st.floats(1.0, 1700.0), later=st.lists(st.floats(0.01, 0.97), min_size=1, max_size=4))
def test_healthy_starts_up_to_the_limit_are_never_judged(paper: Any, first_s: float, later: list[float]) -> None:
    state, longest_s = None, 0.0
    for epoch, share in enumerate([0.0, *later]):
        allowed_s = 1800.0 if epoch < 2 else min(1800.0, max(300.0, 5 * longest_s))
        start_s = share * allowed_s if epoch else first_s
        longest_s = max(longest_s, start_s if epoch else 0.0)
        start = {r: [(Phase.START, start_s if r == 0 else 1.0)] for r in range(4)}
        job = paper.build([start, *({r: [(Phase.TRAIN, 4.0)] for r in range(4)} for _ in range(3))])
        state = _after(job, state)


def _after(job: Any, state: Any, every_s: float = 8.0) -> Any:
    """What the detector knows after all that this job's agents told."""
    detector = HangDetector(Limits(report_s=every_s))
    state = detector.begin(job.plan(), state)
    for tick in range(int(job.last_step_s / every_s) + 2):
        t = tick * every_s
        for member in job.plan().members:
            ranks = range(member.first_rank, member.first_rank + member.slots)
            workers = tuple(job.worker(r, t, lambda at, t=t: t - at) for r in ranks)
            state, output = detector.step(state, NodeProgress(member.node, "inc", 1, t, workers), t)
            assert not isinstance(output, Verdict)
    return state

"""The controller's watch over slow workers: whose work of which step is compared, and what becomes of the verdicts."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

import pytest

from everstep.control import straggling
from everstep.control.straggling import SAMPLES, Lineup, StragglerWatch
from everstep.core import events as e
from everstep.core.config import Straggler
from everstep.core.types import EpochPlan, Member, NodeProgress, Phase, StacksAsked, WorkerProgress
from everstep.core.work import StepWork

STEP_S = 0.1
Extra = Callable[[int, int], float]  # (step, rank) -> seconds beyond the usual


def plan_of(*nodes: str, epoch: int = 1) -> EpochPlan:
    members = tuple(Member(name, "a", "127.0.0.1", n, n, 1) for n, name in enumerate(nodes))
    return EpochPlan(epoch, members, len(nodes), "127.0.0.1", 1, 0)


class Job:
    """Three nodes with a worker each. `run` makes steps and reports them, some at a time."""

    def __init__(self, settings: Straggler | None = None) -> None:
        self.watch = StragglerWatch(settings or Straggler(lasts_s=0))
        self.records: list[e.Record] = []
        self.asked: list[tuple[str, StacksAsked]] = []
        self.chance = random.Random(1)
        self.step = 0
        self.begin("node0", "node1", "node2")

    def begin(self, *nodes: str, epoch: int = 1) -> None:
        self.plan = plan_of(*nodes, epoch=epoch)
        self.records += self.watch.new_epoch(self.plan, frozenset(range(len(nodes))))

    def run(self, steps: int, extra: Extra = lambda step, rank: 0.0) -> list[e.Record]:
        """New records."""
        before = len(self.records)
        for first in range(self.step + 1, self.step + steps + 1, 5):
            for rank, member in enumerate(self.plan.members):
                work = [self.work(step, extra(step, rank)) for step in range(first, first + 5)]
                self.records += self.watch.saw(beat(self.plan, member.node, rank, work), first * STEP_S, self._ask)
                self.watch.wait()
        self.step += steps
        return self.records[before:]

    def _ask(self, node: str, asked: StacksAsked) -> None:
        self.asked.append((node, asked))

    def work(self, step: int, extra: float) -> StepWork:
        return StepWork(step, STEP_S * self.chance.gauss(1, 0.01) + extra)


def beat(plan: EpochPlan, node: str, rank: int, work: list[StepWork]) -> NodeProgress:
    last = work[-1].step
    worker = WorkerProgress(rank, 0, last, last, Phase.TRAIN, 0.0, 0.0, 0.0, work=tuple(work))
    return NodeProgress(node, "a", plan.epoch, 0.0, (worker,))


def only(rank: int, seconds: float = 0.05) -> Extra:
    return lambda step, member: seconds if member == rank else 0.0


def test_a_slow_worker_is_one_incident_until_it_is_well_again() -> None:
    job = Job()
    assert not job.run(40)
    judged, opened = job.run(20, only(1))
    assert isinstance(judged, e.SlowJudged) and isinstance(opened, e.IncidentOpened)
    assert (judged.incident, judged.phase) == (opened.incident, "compute") == ("S001", "compute")
    assert judged.slowdown == pytest.approx(0.5, abs=0.1)
    assert 38 <= judged.since <= judged.step <= 46
    assert opened.kind == "slow"
    assert [(b.rank, b.node, b.cause) for b in opened.culprits] == [(1, "node1", "slow-compute")]
    assert "rank 1 on node1 is slow in compute" in opened.why
    cost = re.search(r"all wait for it: a step takes (\d+) % longer than without that", opened.why)
    assert cost is not None and int(cost[1]) == pytest.approx(100 * judged.slowdown, abs=6)
    assert job.asked == [("node1", StacksAsked("S001", 1, (0,), alive=True))] * SAMPLES
    (closed,) = job.run(40)
    assert isinstance(closed, e.IncidentClosed)
    assert closed.incident == "S001" and closed.outcome.startswith(
        "well again: compute takes as long as before again, since step 6"
    )
    _, opened = job.run(20, only(1))
    assert isinstance(opened, e.IncidentOpened)
    assert opened.incident == "S002" and "2 times so far on this node" in opened.why


def test_a_slow_worker_that_nobody_waits_for_is_said_to_cost_nothing() -> None:
    """Rank 0 has half as much work again in every step; rank 1 becomes 30 % slower, and is still not the last."""
    job = Job()
    job.run(40, only(0))
    told = job.run(20, lambda step, rank: [0.05, 0.03, 0.0][rank])
    (opened,) = (record for record in told if isinstance(record, e.IncidentOpened))
    assert [blame.rank for blame in opened.culprits] == [1]
    assert opened.why.endswith("so far nobody waits for it: others take as long")


def test_pauses_that_go_around_are_told_and_nobody_is_blamed() -> None:
    job = Job()
    job.run(40)
    told = job.run(120, lambda step, rank: 0.1 if step % 9 == 3 * rank else 0.0)
    assert [record.kind for record in told if isinstance(record, e.Alert)] == ["jitter"]
    assert len(told) == 1
    (alert,) = job.run(200)
    assert isinstance(alert, e.Alert) and alert.text.startswith("over: ")


def test_what_does_not_last_is_told_nobody() -> None:
    """Steps of 0.1 s: it has to last for 30 of them, counted from its onset."""
    job = Job(Straggler(lasts_s=3.0))
    job.run(40)
    assert not job.run(20, only(1)) and not job.run(40)
    assert not job.run(120, lambda step, rank: 0.1 if step % 9 == 3 * rank and step < 120 else 0.0)
    assert not job.run(25, only(2))
    assert [type(record) for record in job.run(10, only(2))] == [e.SlowJudged, e.IncidentOpened]


def test_a_small_loss_is_told_only_when_it_becomes_worth_it() -> None:
    """A tenth of 100 ms is at the limit of what is worth an incident; 6 ms are under it."""
    job = Job(Straggler(threshold=0.03, lasts_s=0))
    job.run(40)
    assert not job.run(100, only(2, 0.006))
    assert [type(record) for record in job.run(60, only(2, 0.05))] == [e.SlowJudged, e.IncidentOpened]


def test_a_restart_forgets_nothing_of_the_same_places() -> None:
    job = Job()
    job.run(40)
    assert len(job.run(20, only(0))) == 2
    job.begin("node0", "node1", "node2", epoch=2)
    assert not job.run(20, only(0))  # it is known already
    job.begin("node2", "node0", "node1", epoch=3)  # in other ranks
    assert not job.run(10, only(1))
    (closed,) = job.run(40)
    assert isinstance(closed, e.IncidentClosed)


def test_other_members_are_watched_anew() -> None:
    job = Job()
    job.run(40)
    job.run(20, only(0))
    job.begin("node1", "node2", "node3", epoch=2)
    assert job.records[-1] == e.IncidentClosed("S001", "it holds no role any more")
    job.run(40)
    opened = job.run(20, only(2))[-1]
    assert isinstance(opened, e.IncidentOpened)
    assert [(b.rank, b.node) for b in opened.culprits] == [(2, "node3")]


def test_who_acts_no_more_is_left_out() -> None:
    """A member died and its place is being filled: the others go on, and are compared."""
    job = Job()
    job.run(40)
    job.watch.new_epoch(job.plan, frozenset({0, 1}))
    opened = job.run(20, only(0))[-1]
    assert isinstance(opened, e.IncidentOpened) and opened.culprits[0].rank == 0


def test_who_takes_a_place_is_forgotten_alone() -> None:
    """A slow member stays known while another one is replaced, and the newcomer is judged once it has been seen."""
    job = Job()
    job.run(40)
    (_, opened) = job.run(20, only(2))
    assert isinstance(opened, e.IncidentOpened)
    before = len(job.records)
    job.begin("node0", "node3", "node2", epoch=2)
    assert not job.run(10, only(2)) and len(job.records) == before, "nothing is closed, and nobody new is slow"
    (_, other) = job.run(10, lambda step, rank: [0.05, 0.0, 0.05][rank])
    assert isinstance(other, e.IncidentOpened) and other.culprits[0].node == "node0"
    job.run(10)
    newcomer = job.run(20, only(1))[-1]
    assert isinstance(newcomer, e.IncidentOpened) and newcomer.culprits[0].node == "node3"


def test_a_newcomer_among_the_first_steps_is_not_taken_for_who_was_there() -> None:
    """Its place was three times as slow as the others until it came."""
    job = Job()
    job.run(10, only(1, 0.2))
    job.begin("node0", "node3", "node2", epoch=2)
    assert not job.run(60)
    opened = job.run(20, only(1))[-1]
    assert isinstance(opened, e.IncidentOpened) and opened.culprits[0].node == "node3"


def test_a_new_controller_closes_what_it_cannot_follow() -> None:
    job = Job()
    job.run(40)
    job.run(20, only(1))
    entries = [e.Entry(n, 0.0, 0.0, "job", 1, record) for n, record in enumerate(job.records)]
    later = Job()
    assert later.watch.adopt(entries) == [e.IncidentClosed("S001", "a new controller watches anew")]
    later.run(40)
    opened = later.run(20, only(1))[-1]
    assert isinstance(opened, e.IncidentOpened) and opened.incident == "S002"


def test_at_the_end_of_the_job_nothing_stays_open() -> None:
    job = Job()
    job.run(40)
    job.run(20, only(1))
    assert job.watch.end() == [e.IncidentClosed("S001", "slow to the end of the job")]


def test_one_worker_alone_and_a_watch_that_is_off_say_nothing() -> None:
    alone, off = Job(), Job(Straggler(enabled=False))
    alone.begin("node0")
    for job in (alone, off):
        job.run(40)
        assert not job.run(40, only(0, 0.5))


def test_a_controller_without_numpy_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straggling, "DETECTOR", "everstep.detect.no_such_detector")
    job = Job()
    (alert,) = job.run(20)
    assert isinstance(alert, e.Alert) and "no_such_detector" in alert.text


def test_a_defect_of_the_detector_ends_the_watch_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.run(20)
    monkeypatch.setattr("everstep.detect.straggler.Straggler.saw", lambda self, step, work: 1 / 0)
    (alert,) = job.run(20)
    assert isinstance(alert, e.Alert) and "ZeroDivisionError" in alert.text
    assert not job.run(20)


# Steps side by side -------------------------------------------------------------------------------------


def lined_up(*reports: Mapping[int, list[int]]) -> list[tuple[int, list[int]]]:
    """Of reports (rank -> steps), which steps became complete, with whose work."""
    lineup = Lineup((0, 1))
    found = []
    for report in reports:
        for rank, steps in report.items():
            for step in steps:
                lineup.add(rank, StepWork(step, 1.0))
        found += [(step, sorted(told)) for step, told in lineup.complete()]
    return found


def test_a_step_waits_for_everybody() -> None:
    assert lined_up({0: [1, 2]}, {1: [1]}, {1: [2]}) == [(1, [0, 1]), (2, [0, 1])]


def test_what_a_member_left_out_is_unknown() -> None:
    assert lined_up({0: [1, 2, 3, 4], 1: [2, 4]}) == [(1, [0]), (2, [0, 1]), (3, [0]), (4, [0, 1])]


def test_what_comes_too_late_and_from_strangers_is_dropped() -> None:
    assert lined_up({0: [1, 3], 1: [1, 3]}, {0: [2], 1: [2], 7: [4]}) == [(1, [0, 1]), (3, [0, 1])]


def test_who_never_tells_does_not_fill_the_memory() -> None:
    found = lined_up({0: list(range(1, 2001))})
    assert 2000 - straggling.MOST_STEPS <= len(found) < 2000
    assert all(told == [0] for _, told in found)

"""The fold that people's view of a job is made of: its numbers, and that it stays small however long the job is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core import events as e
from everstep.core.decisions import Action, Alternative, Decision
from everstep.core.formation import Formation, Seat, SessionReport, Stage
from everstep.core.types import (
    Activity,
    Blame,
    EpochPlan,
    Exit,
    ExitCause,
    JobSpec,
    Member,
    NodeLoss,
    NodeReport,
    Verdict,
    WorkerReport,
)
from everstep.observe.series import Curve
from everstep.observe.summary import summarize
from everstep.observe.view import KEPT_INCIDENTS, POINTS, NodeState, Series, View, WorkerState
from everstep.observe.viewer import Viewer

UNSEEN = {e.NodeGone, e.SaveAsked, e.CostLearned, e.Ticked, e.StepsDealt, e.LookTaken}  # nothing of these is shown
NODES, SLOTS = 125, 8


def folded(entries: list[e.Entry]) -> Viewer:
    viewer = Viewer()
    for entry in entries:
        viewer.add(entry)
    return viewer


def test_it_agrees_with_the_summary(journal: list[e.Entry]) -> None:
    view, summary = folded(journal).view, summarize(journal)
    assert (view.job, view.script, view.exit_code, view.why) == ("demo", "train_gpt.py", 0, summary.why)
    assert (view.steps, view.redone_steps, view.step) == (140, 20, 120)
    assert (view.restarts, view.saved_step, view.downtime_s) == (2, summary.last_save_step, summary.downtime_s)
    assert view.step_s == pytest.approx(0.25) and view.ended_s == pytest.approx(41.2)
    assert (view.num_incidents, view.by_kind, view.by_cause) == (2, {"crash": 1, "hang": 1}, {"signal": 1, "hang": 1})


def test_incidents_have_a_time_line(journal: list[e.Entry]) -> None:
    crash, hang = folded(journal).view.incidents
    phases = ["sign", "detect", "act", "act", "act", "detect", "recover", "act", "recover", "close"]
    assert [line.phase for line in crash.timeline] == phases
    assert (crash.step, crash.downtime_s, crash.redone_steps, crash.outcome) == (40, 1.15, 10, "recovered")
    assert crash.first_sign_s == pytest.approx(11.85) and crash.told_s == pytest.approx(11.9)
    assert crash.files == ("incidents/I001/rank2-log.txt",) and hang.culprits[0].rank == 1
    assert [node.incidents for node in folded(journal).view.nodes] == [1, 1]


def test_every_kind_of_event_is_shown_or_left_out_on_purpose() -> None:
    assert set(Viewer()._handlers) | UNSEEN == set(e.Event.__subclasses__())


def test_a_controller_on_another_machine_goes_on_with_the_time_line(journal: list[e.Entry]) -> None:
    half = next(n for n, entry in enumerate(journal) if isinstance(entry.event, e.HangJudged))
    replace = msgspec.structs.replace
    moved = [replace(x, t_s=x.t_s - 900.0) for x in journal[half:] if not isinstance(x.event, e.StepsSeen)]
    started = replace(moved[0], event=e.ControllerStarted(2))
    view = folded([*journal[:half], started, *moved]).view
    assert view.now_s == pytest.approx(41.2) and view.term == 2


@pytest.mark.parametrize("data", [b"", b"\xc0", b"{}", Viewer().dump()[:-3]])
def test_what_is_no_dump_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="snapshot"):
        Viewer.load(data)


def test_a_dump_of_another_version_is_refused() -> None:
    data = msgspec.msgpack.encode(msgspec.msgpack.decode(Viewer().dump()) | {"version": 0})
    with pytest.raises(ValueError, match="version 0"):
        Viewer.load(data)


# Size -----------------------------------------------------------------------------------------------------


def long_job(rounds: int) -> Iterator[e.Entry]:
    """1,000 workers; in each round a node is lost, and what is told of it is long."""
    count, at_s = 0, 0.0

    def entry(event: e.AnyEvent) -> e.Entry:
        nonlocal count
        count += 1
        return e.Entry(count, at_s, at_s, "long", 1, event)

    names = [f"node-{n:03d}" for n in range(NODES)]
    yield entry(e.JobSubmitted(JobSpec("long", min_nodes=NODES, max_nodes=NODES)))
    for name in names:
        yield entry(e.NodeJoined(name, "i", "10.0.0.1", SLOTS))
    members = tuple(Member(name, "i", "", n, n * SLOTS, SLOTS) for n, name in enumerate(names))
    plan = EpochPlan(1, members, NODES * SLOTS, "", 0, 0)
    yield entry(e.EpochFormed(plan))
    yield entry(e.StageChanged("forming", "running"))
    seats = tuple(Seat(f"{name}/{k}#0", name, "h" * 36, "10.0.0.1:12345") for name in names for k in range(SLOTS))
    yield entry(e.FormationMade(Formation(1, seats, False, 0)))
    step, why = 0, "some words about it, as long as these are " * 8
    others = tuple(Alternative(action, 1.5, why[:100]) for action in Action)
    for number in range(rounds):
        for _ in range(15):
            at_s += 61.7
            step += 30
            yield entry(e.StepsSeen(1, step, step, at_s, 1.0))
            yield entry(e.MetricsSeen(step, {f"metric_{n}": 1 / (step + n) for n in range(70)}))
        yield entry(e.WorkersSeen(1, (0.123456789,) * len(seats), (1 << 35,) * len(seats)))
        victim = names[number % NODES]
        at_s += 1.0
        for rank in range(SLOTS):
            yield entry(e.WorkerEnded(rank, victim, Exit(ExitCause.ERROR, at_s, message=why), at_s))
        yield entry(e.NodeLost(victim, "i", NodeLoss.SILENT))
        blames = tuple(Blame(rank, victim, f"cause {number}", why) for rank in range(40))
        yield entry(e.IncidentOpened(f"I{number}", "node-lost", blames, why))
        yield entry(e.StageChanged("running", "re-seating", why))
        yield entry(e.Decided(f"I{number}", Decision(Action.PROMOTE, 3.5, why, "t", others)))
        yield entry(e.CauseFound(f"I{number}", Verdict("crash", blames[:1], why)))
        yield entry(e.FormationMade(Formation(number + 2, seats[number % 7 :], True, 0)))
        at_s += 5.0
        yield entry(e.NodeJoined(victim, "i", "10.0.0.1", SLOTS))
        yield entry(e.PlanAmended(plan))
        yield entry(e.StageChanged("re-seating", "running"))
        yield entry(e.IncidentClosed(f"I{number}", "recovered", 6.0, {"detect": 1.0}, 2))
        yield entry(e.SaveRequested(step))
        yield entry(e.SaveDurable(step))
        yield entry(e.Alert("what", why))


def test_a_year_with_1000_workers_stays_below_a_megabyte() -> None:
    viewer = Viewer()
    for entry in long_job(270):
        viewer.add(entry)
    data = viewer.dump()
    view = Viewer.load(data).view
    assert len(data) < 1_000_000
    assert len(view.incidents) == KEPT_INCIDENTS and view.num_incidents == 270
    assert view.incidents[-1].alternatives and not view.incidents[0].alternatives
    assert len(view.series["step_s"].mean) <= POINTS and len(view.workers.states) == NODES * SLOTS
    assert sum(view.by_cause.values()) == 270 and len(view.by_cause) <= 65
    lost = sum(view.costs.values())
    assert lost + view.buckets["productive"] == pytest.approx(sum(view.buckets.values()))


def test_nodes_that_never_come_back_are_forgotten() -> None:
    viewer = Viewer()
    spec = JobSpec("j", min_nodes=1, max_nodes=1)
    events: list[e.AnyEvent] = [e.JobSubmitted(spec)]
    for number in range(1000):
        name = f"spot-{number}"
        plan = EpochPlan(number + 1, (Member(name, "i", "", 0, 0, 2),), 2, "", 0, 0)
        events += [e.NodeJoined(name, "i", "", 2), e.EpochFormed(plan), e.NodeLost(name, "i", NodeLoss.CLOSED)]
    for n, event in enumerate(events[:-1]):
        viewer.add(e.Entry(n + 1, float(n), float(n), "j", 1, event))
    view = viewer.view
    assert len(view.nodes) < 300 and view.nodes[-1].state is NodeState.UP
    assert [view.nodes[n].name for n in view.workers.nodes] == ["spot-999"] * 2
    assert view.workers.states == [WorkerState.WARMS] * 2


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(-1e6, 1e6)), min_size=1, max_size=60))
def test_a_curve_keeps_what_was_least_and_most(points: list[tuple[float, float]]) -> None:
    series, curve = Series(), Curve()
    for at_s, value in sorted(points):
        curve.add(series, at_s, value)
        curve.add(series, at_s, math.nan)
    known = [value for _, value in points]
    assert len(series.mean) == len(series.low) == len(series.high) <= POINTS
    assert min(x for x in series.low if x is not None) == pytest.approx(min(known), rel=1e-5)
    assert max(x for x in series.high if x is not None) == pytest.approx(max(known), rel=1e-5)
    assert int(max(at_s for at_s, _ in points) / series.every_s) == len(series.mean) - 1


def test_a_view_survives_json(journal: list[e.Entry]) -> None:
    view = folded(journal).view
    assert msgspec.json.decode(msgspec.json.encode(view), type=View) == view


def test_who_joins_a_formation_warms_up_until_its_first_step() -> None:
    """Its own report tells of that, long before the next record of all workers."""

    def says(seq: int, stage: Stage, epoch: int, resumed: bool) -> e.NodeReported:
        session = SessionReport("n1/0#0", stage, 5, epoch, epoch, "h:1", "h", resumed=resumed)
        workers = (WorkerReport(0, 1, session=session),)
        return e.NodeReported(NodeReport("n1", "i", seq, 0.0, 1, "", 0, 1, Activity.RUNNING, workers))

    members = tuple(Member(name, "i", "", n, n, 1) for n, name in enumerate(("n0", "n1")))
    first, second = (Seat(f"{name}/0#0", name, "h", "h:1") for name in ("n0", "n1"))
    events: list[e.AnyEvent] = [e.JobSubmitted(JobSpec("j", min_nodes=2, max_nodes=2))]
    events += [e.NodeJoined(name, "i", "", 1) for name in ("n0", "n1")]
    events += [e.EpochFormed(EpochPlan(1, members, 2, "", 0, 0)), e.FormationMade(Formation(1, (first,), False, 0))]
    events += [e.StepsSeen(1, 5, 5, 4.0, 3.0), says(1, Stage.READY, 0, False)]
    joins = [e.FormationMade(Formation(2, (first, second), False, 5)), says(2, Stage.MEMBER, 2, False)]
    viewer, states = Viewer(), []
    for n, event in enumerate([*events, *joins, says(3, Stage.MEMBER, 2, True)]):
        viewer.add(e.Entry(n + 1, float(n), float(n), "j", 1, event))
        states += viewer.view.workers.states[1:2]
    assert states[-4:] == [WorkerState.WAITS, *[WorkerState.WARMS] * 2, WorkerState.ACTS]


def test_a_script_that_is_entered_again_goes_on_with_its_steps() -> None:
    """Its processes count from 1 again, within one epoch of the plan (`everstep.restartable`)."""
    plan = EpochPlan(1, (Member("n0", "i", "", 0, 0, 1),), 1, "", 0, 0)
    for counted in (True, False):  # by an optimizer

        def seen(step: int, total: int, at_s: float, first_s: float, counted: bool = counted) -> e.StepsSeen:
            return e.StepsSeen(1, step, total if counted else -1, at_s, first_s)

        viewer = Viewer()
        events: list[tuple[float, e.AnyEvent]] = [
            (0.0, e.JobSubmitted(JobSpec("j"))), (0.0, e.NodeJoined("n0", "i", "", 1)), (0.0, e.EpochFormed(plan)),
            (1.1, seen(1, 1, 1.0, 1.0)), (4.1, seen(31, 31, 4.0, 1.0)),
            (5.2, seen(1, 31, 5.1, 5.1)),
            (6.1, seen(10, 41, 6.0, 5.1)), (7.1, seen(20, 51, 7.0, 5.1)), (9.1, seen(40, 71, 9.0, 5.1)),
        ]  # fmt: skip
        for n, (at_s, event) in enumerate(events):
            viewer.add(e.Entry(n + 1, at_s, at_s, "j", 1, event))
        view = viewer.view
        assert (view.step, view.steps, view.redone_steps, view.last_step_s) == (71, 71, 0, 9.0)
        assert view.step_s == pytest.approx(0.1)
        assert sum(view.buckets.values()) == pytest.approx(view.now_s * view.fleet.total)


def test_a_newcomer_to_a_session_takes_up_the_jobs_count() -> None:
    plan = EpochPlan(1, (Member("n0", "i", "", 0, 0, 2),), 2, "", 0, 0)
    viewer = Viewer()
    steps = (e.StepsSeen(1, 1, 1, 1.0, 1.0), e.StepsSeen(1, 27, 27, 3.0, 1.0), e.StepsSeen(1, 1, 27, 4.0, 4.0))
    events = [e.JobSubmitted(JobSpec("j")), e.NodeJoined("n0", "i", "", 2), e.EpochFormed(plan), *steps]
    for n, event in enumerate([*events, e.StepsSeen(1, 35, 35, 5.0, 4.0)]):
        viewer.add(e.Entry(n + 1, float(n), float(n), "j", 1, event))
    assert (viewer.view.step, viewer.view.steps, viewer.view.redone_steps) == (35, 35, 0)

"""The fold that people's view of a job is made of: its numbers, and that it stays small however long the job is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from told_jobs import Told, folded

from everstep.core import events as e
from everstep.core.decisions import Action, Alternative, Decision
from everstep.core.formation import Formation, Seat, SessionReport, Stage
from everstep.core.load import DeviceLoad, NodeLoad
from everstep.core.types import (
    Blame,
    EpochPlan,
    Exit,
    ExitCause,
    JobSpec,
    Member,
    NodeLoss,
    Verdict,
)
from everstep.observe.series import Curve
from everstep.observe.summary import summarize
from everstep.observe.view import KEPT_INCIDENTS, POINTS, NodeState, Series, View, WorkerState
from everstep.observe.viewer import Viewer

UNSEEN = {e.NodeGone, e.SaveAsked, e.CostLearned, e.Ticked, e.StepsDealt, e.LookTaken}  # nothing of these is shown
NODES, SLOTS = 125, 8


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


def test_who_is_gone_has_no_step_time_and_no_memory() -> None:
    told = Told()
    told.joined(0, "a", "b")
    told.epoch(1, 1, "a", "b")
    seen = e.WorkersSeen(1, (0.1,) * 4, (1 << 30,) * 4)  # of the dead: what was heard of them last
    ends = e.WorkerEnded(1, "a", Exit(ExitCause.ERROR, 5.0), 5.0), e.NodeLost("b", "i", NodeLoss.SILENT)
    for events in ((seen, *ends), (seen,)):
        told.at(5, *events)
        workers = folded(told.entries).view.workers
        assert (workers.own_s, workers.rss_bytes) == ([0.1, -1.0, -1.0, -1.0], [1 << 30, 0, 0, 0])


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
    devices = (DeviceLoad(97, 83, 61),) * 8
    busy = NodeLoad(6341, 128, 10**6, 10**6, 10**6, 10**6, 10**5, 10**5, (125,) * 8, 10**5, devices)
    others = tuple(Alternative(action, 1.5, why[:100]) for action in Action)
    for number in range(rounds):
        for _ in range(15):
            at_s += 61.7
            step += 30
            yield entry(e.StepsSeen(1, step, step, at_s, 1.0))
            yield entry(e.MetricsSeen(step, {f"metric_{n}": 1 / (step + n) for n in range(70)}))
        yield entry(e.WorkersSeen(1, (0.123456789,) * len(seats), (1 << 35,) * len(seats)))
        yield entry(e.LoadSeen(dict.fromkeys(names, busy)))
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
    data = folded(long_job(270)).dump()
    view = Viewer.load(data).view
    assert len(data) < 1_000_000
    assert len(view.incidents) == KEPT_INCIDENTS and view.num_incidents == 270
    assert view.incidents[-1].alternatives and not view.incidents[0].alternatives
    assert len(view.series["step_s"].mean) <= POINTS and len(view.workers.states) == NODES * SLOTS
    assert sum(view.by_cause.values()) == 270 and len(view.by_cause) <= 65
    lost = sum(view.costs.values())
    assert lost + view.buckets["productive"] == pytest.approx(sum(view.buckets.values()))


def test_the_load_of_nodes_outlives_those_that_are_lost(journal: list[e.Entry]) -> None:
    """Whom the newest record does not name is not known; who is lost has none, and the others keep theirs."""
    viewer, last = folded(journal[:-1]), journal[-1]
    both = e.LoadSeen({"node0": NodeLoad(150, 2, workers=(100, 50)), "node1": NodeLoad(10, 2)})

    def told(*events: e.AnyEvent) -> dict[str, NodeLoad]:
        for event in events:
            viewer.add(msgspec.structs.replace(last, event=event))
        return Viewer.load(viewer.dump()).view.loads

    assert told(both) == both.nodes
    assert told(e.NodeLost("node1", "inc1", NodeLoss.CLOSED)) == {"node0": both.nodes["node0"]}
    assert len(both.nodes) == 2  # the entry is not touched
    assert told(e.LoadSeen({"node1": NodeLoad(20, 2)})) == {"node1": NodeLoad(20, 2)}
    assert told(last.event, both) == {"node1": NodeLoad(20, 2)}  # a job that has ended stays as it was then


def test_nodes_that_never_come_back_are_forgotten() -> None:
    told = Told(1, 1)
    for number in range(1000):
        told.joined(3.0 * number, f"spot-{number}")
        told.epoch(3.0 * number + 1, number + 1, f"spot-{number}")
        told.at(3.0 * number + 2, e.NodeLost(f"spot-{number}", "i", NodeLoss.CLOSED))
    view = folded(told.entries[:-1]).view
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

    def says(t: float, stage: Stage, epoch: int, resumed: bool) -> None:
        told.says(t, "n1", SessionReport("n1/0#0", stage, 5, epoch, epoch, "h:1", "h", resumed=resumed))

    told = Told(slots=1)
    told.joined(1, "n0", "n1")
    told.epoch(2, 1, "n0", "n1")
    told.seated(3, 1, "n0/0#0")
    told.at(5, e.StepsSeen(1, 5, 5, 4.0, 3.0))
    says(6, Stage.READY, 0, False)
    told.seated(7, 2, "n0/0#0", "n1/0#0")
    says(8, Stage.MEMBER, 2, False)
    says(9, Stage.MEMBER, 2, True)
    viewer, states = Viewer(), []
    for entry in told.entries:
        viewer.add(entry)
        states += viewer.view.workers.states[1:2]
    assert states[-4:] == [WorkerState.WAITS, *[WorkerState.WARMS] * 2, WorkerState.ACTS]


def alone(slots: int) -> Told:
    """A job of one node, up to its first step."""
    told = Told(1, 1, slots)
    told.joined(0.0, "n0")
    told.epoch(0.0, 1, "n0")
    return told


def test_a_script_that_is_entered_again_goes_on_with_its_steps() -> None:
    """Its processes count from 1 again, within one epoch of the plan (`everstep.restartable`)."""
    for counted in (True, False):  # by an optimizer
        told = alone(1)
        seen = [(1.1, 1, 1, 1.0, 1.0), (4.1, 31, 31, 4.0, 1.0), (5.2, 1, 31, 5.1, 5.1)]
        seen += [(6.1, 10, 41, 6.0, 5.1), (7.1, 20, 51, 7.0, 5.1), (9.1, 40, 71, 9.0, 5.1)]
        for t, step, total, at_s, first_s in seen:
            told.at(t, e.StepsSeen(1, step, total if counted else -1, at_s, first_s))
        view = told.view()
        assert (view.step, view.steps, view.redone_steps, view.last_step_s) == (71, 71, 0, 9.0)
        assert view.step_s == pytest.approx(0.1)


def test_a_newcomer_to_a_session_takes_up_the_jobs_count() -> None:
    told = alone(2)
    for t, step, total, first_s in ((1.0, 1, 1, 1.0), (3.0, 27, 27, 1.0), (4.0, 1, 27, 4.0), (5.0, 35, 35, 4.0)):
        told.at(t, e.StepsSeen(1, step, total, t, first_s))
    view = told.view()
    assert (view.step, view.steps, view.redone_steps) == (35, 35, 0)

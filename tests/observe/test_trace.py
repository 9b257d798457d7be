"""A job as a trace: clocks of nodes on one time line, the job's own tracks, what goes into a window, and the format."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trace_rules
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep.core import events as e
from everstep.core.trace import MOMENTS, RECORD, Header, Kind, Record, pack_header
from everstep.core.types import NodeReport
from everstep.observe.clocks import Clocks, Timeline
from everstep.observe.trace import Story
from everstep.observe.trace_files import Span, Window, align, narrow, places
from everstep.observe.trace_json import LANES, TITLES, Lanes, job_events, worker_events

WALL_S = 1.7e9


def entry(t_s: float, event: e.AnyEvent, wall_s: float | None = None) -> e.Entry:
    return e.Entry(1, t_s, WALL_S + t_s if wall_s is None else wall_s, "demo", 1, event)


def reported(node: str, sent_s: float, incarnation: str = "inc") -> e.NodeReported:
    return e.NodeReported(NodeReport(node, incarnation, 1, sent_s, 2, "127.0.0.1", 1))


def header(node: str, boot: str, mono_s: float = 0.0, wall_s: float = WALL_S) -> Header:
    return Header(node, 0, "inc", boot, int(wall_s * 1e9), int(mono_s * 1e9))


def loads(events: Iterable[bytes]) -> dict[str, Any]:
    return {"displayTimeUnit": "ms", "traceEvents": [json.loads(event) for event in events]}


# Clocks -----------------------------------------------------------------------------------------------------


def test_the_quickest_report_says_how_a_nodes_clock_stands() -> None:
    chance, clocks, timeline = random.Random(3), Clocks(), Timeline()
    timeline.at(entry(500.0, e.Ticked()))
    for node, ahead_s in (("node0", 0.0), ("node1", 7000.0), ("node2", -400.0)):
        for k in range(30):
            sent_s = 510.0 + 10 * k
            event = reported(node, sent_s + ahead_s)
            clocks.add(event, timeline.at(entry(sent_s + 0.001 + chance.expovariate(20), event)))
    offsets = clocks.offsets([header(f"node{k}", f"boot{k}") for k in range(3)], WALL_S)
    found = [offsets[f"node{k}", "inc"] for k in range(3)]
    for offset_s, true_s in zip(found, (-500.0, -7500.0, -100.0), strict=True):
        assert 0.001 <= offset_s - true_s < 0.02


def test_nodes_of_one_machine_have_one_clock_and_drift_is_followed() -> None:
    clocks = Clocks()
    clocks.add(reported("node0", 1000.0), 10.004)
    clocks.add(reported("node1", 1000.0), 10.001)
    clocks.add(reported("node1", 1000.0 + 20 * 3600), 20 * 3600 + 8.0)
    first = [header("node0", "a", 1500.0), header("node1", "a", 1500.0)]
    assert set(clocks.offsets(first, WALL_S).values()) == {10.001 - 1000.0}
    later = clocks.offsets([header("node1", "a", 19.8 * 3600)], WALL_S)
    assert later["node1", "inc"] == pytest.approx(8.0 - 1000.0)


def test_a_node_that_the_journal_does_not_know_is_placed_by_its_wall_clock() -> None:
    offsets = Clocks().offsets([header("node0", "a", 100.0, WALL_S + 30.0)], WALL_S)
    assert offsets["node0", "inc"] == pytest.approx(-70.0)


def test_a_controller_on_another_machine_goes_on_in_the_same_time_line() -> None:
    timeline = Timeline()
    assert timeline.at(entry(5000.0, e.Ticked(), WALL_S)) == 0.0
    assert timeline.at(entry(5010.0, e.Ticked(), WALL_S + 10)) == 10.0
    assert timeline.at(entry(77.0, e.ControllerStarted(2), WALL_S + 13)) == pytest.approx(13.0)
    assert timeline.at(entry(78.0, e.Ticked(), WALL_S + 14)) == pytest.approx(14.0)


# The job ----------------------------------------------------------------------------------------------------


def test_the_job_s_incidents_phases_epochs_and_saves(journal: list[e.Entry]) -> None:
    story = Story()
    for each in journal:
        story.add(each)
    slices = story.end()
    crash = next(each for each in slices if each.name == "crash (I001)")
    assert crash.track == "incidents" and [name for name, _ in crash.parts][:2] == ["detect", "stop"]
    assert sum(seconds for _, seconds in crash.parts) <= crash.end_s - crash.begin_s + 1e-9
    assert [each.name for each in slices if each.track == "epochs"] == [f"epoch {k}: 4 workers" for k in (1, 2, 3)]
    events = [*job_events("demo", slices, story.steps, Window())]
    trace_rules.check(loads(events))
    shown = {event["name"] for event in loads(job_events("demo", slices, story.steps, Window(0, 5)))["traceEvents"]}
    assert "crash (I001)" not in shown and "epoch 1: 4 workers" in shown


def test_what_is_not_over_lasts_and_what_overlaps_gets_a_lane() -> None:
    story = Story()
    story.add(entry(0, e.JobSubmitted(e.JobSpec("demo"))))
    for t_s, event in (
        (1.0, e.IncidentOpened("I1", "crash", (), "")),
        (2.0, e.IncidentOpened("I2", "hang", (), "")),
        (3.0, e.SaveRequested(10)),
        (4.0, e.IncidentClosed("I1", "recovered", 1.0, {"detect": 0.5, "stop": 1.0, "form": 2.0})),
        (5.0, e.SaveFailed(10, "no room")),
        (6.0, e.SaveDurable(9)),
        (9.0, e.Alert("odd", "look")),
    ):
        story.add(entry(t_s, event))
    slices = {each.name: each for each in story.end()}
    assert (slices["crash (I1)"].begin_s, slices["crash (I1)"].end_s) == (0.5, 4.0)
    assert slices["hang (I2)"].end_s == 9.0
    assert slices["save of step 10"].args["outcome"] == "failed: no room"
    trace = loads(job_events("demo", story.end(), [(1.0, 5)], Window()))
    trace_rules.check(trace)
    tracks = {x["name"]: x["tid"] for x in trace["traceEvents"] if x["ph"] == "X"}
    assert tracks["crash (I1)"] == tracks["stop"] != tracks["hang (I2)"]


def test_the_counter_of_steps_of_a_long_job_is_thinned_out() -> None:
    story = Story()
    for k in range(100_000):
        story.add(entry(float(k), e.StepsSeen(1, k, k, float(k))))
    assert 5_000 < len(story.steps) < 20_000
    assert story.steps[0] == (0.0, 0) and story.steps[-1][1] > 99_000


# Workers ----------------------------------------------------------------------------------------------------

SPANS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 30), st.sampled_from([Kind.DATA, Kind.STEP]), st.integers(1, 2))
)


@given(SPANS)
def test_slices_of_a_track_lie_in_each_other_or_apart(spans: list[tuple[int, int, Kind, int]]) -> None:
    records = [Record(b * 1000, (b + d) * 1000, 0, 1, 1, kind, track, 0) for b, d, kind, track in spans]
    ordered = sorted((Span(r.begin_ns, r.end_ns, r) for r in records), key=lambda each: (each.begin_ns, -each.end_ns))
    trace = loads(worker_events(2, "rank 0", ordered))
    trace_rules.check(trace)
    shown = sum(event["ph"] == "X" for event in trace["traceEvents"])
    assert shown == len(spans) or (shown < len(spans) and len(spans) > LANES)


def test_rules_find_what_they_forbid() -> None:
    for slices in ([(0, 10), (5, 15)], [(0, 10), (0, 5), (4, 9)]):
        with pytest.raises(AssertionError):
            trace_rules.check_nested(slices, "1")
    lanes = Lanes(2, nest=True)
    assert [lanes.place(*each) for each in ((0, 10), (1, 9), (2, 11), (3, 12), (11, 12))] == [0, 0, 1, -1, 0]


def test_every_kind_has_its_text() -> None:
    records = [Record(k * 10, k * 10 + 5, 3, 7, 2, k, 1, 0) for k in (*Kind, 255)]
    spans = [Span(r.begin_ns, r.end_ns, r) for r in records]
    trace = loads([*worker_events(5, "rank 3", spans), *worker_events(6, "rank 4", spans)])
    trace_rules.check(trace)
    told = {x["name"]: x["args"] for x in trace["traceEvents"] if x["ph"] != "M"}
    assert told["all_reduce"] == {"step": 7, "epoch": 2, "bytes": 3}
    assert {"step 7", "epoch 2", "process 3 began", "ended in start", "3 records lost", "kind 255"} <= set(told)


def test_the_page_has_every_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")
    missing = [TITLES[kind] for kind in Kind if kind not in MOMENTS and kind <= Kind.COLLECTIVE]
    missing = [title for title in missing if f"`{title}" not in page]
    assert missing == []


def write_place(logs: Path, node: str, count: int, *, first_s: float = 0.0, half: int | None = None) -> None:
    """One span of 8 ms each 10 ms; of the older half in a file of its own."""
    folder = logs / node / "trace"
    folder.mkdir(parents=True)
    records = [
        RECORD.pack(int((first_s + k / 100) * 1e9), int((first_s + k / 100 + 0.008) * 1e9), 0, k, 1, Kind.STEP, 1, 0)
        for k in range(count)
    ]
    began = RECORD.pack(0, 0, 77, int(node[4:]), 1, Kind.BEGAN, 1, 0)
    head = pack_header(replace(header(node, node), rank=int(node[4:]))) + began
    for name, part in (("0.trace.old", records[:half] if half else []), ("0.trace", records[half or 0 :])):
        if part:
            (folder / name).write_bytes(head + b"".join(part))


def test_a_window_is_read_and_no_more_than_is_wanted(tmp_path: Path) -> None:
    write_place(tmp_path, "node0", 5000, half=3000)
    write_place(tmp_path, "node1", 5000, first_s=100.0)
    (tmp_path / "node1/trace/1.trace").write_bytes(b"nonsense")
    with places(tmp_path) as (found, (wrong,)):
        assert "1.trace" in wrong
        assert [place.rank for place in found] == [0, 1]
        align(found, {("node0", "inc"): 5.0, ("node1", "inc"): -95.0})
        window = narrow(found, Window(20.0, 31.0), most=10**6)
        assert window == Window(20.0, 31.0)
        for place in found:
            steps = [span.record.step for span in place.spans(window)]
            assert steps[0] in (1499, 1500) and steps == list(range(steps[0], 2601))
            assert place.num_wanted < 1400, "the rest of the file is not read"


def test_too_many_events_leave_the_newest_of_all_workers_alike(tmp_path: Path) -> None:
    write_place(tmp_path, "node0", 6000, half=2500)
    write_place(tmp_path, "node1", 3000, first_s=30.0)
    with places(tmp_path) as (found, _):
        align(found, {("node0", "inc"): 0.0, ("node1", "inc"): 0.0})
        window = narrow(found, Window(), most=4000)
        counts = [len(place.spans(window)) for place in found]
    assert sum(counts) <= 4000 and counts[0] == counts[1] > 1500
    assert window.first_s > 30.0 and window.last_s == math.inf

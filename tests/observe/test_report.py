"""The report: it answers what a person asks first, needs nothing else, stays small, and is readable for everybody."""

from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from told_jobs import folded

from everstep.core import events as e
from everstep.core.decisions import Action, Alternative
from everstep.core.load import DeviceLoad, NodeLoad
from everstep.core.types import Blame
from everstep.observe import charts, usage
from everstep.observe.charts import Frame, nice_ticks, time_ticks
from everstep.observe.explain import explain, state
from everstep.observe.html import BUCKETS, DARK, LIGHT
from everstep.observe.report import Report, encode, make
from everstep.observe.report_page import page
from everstep.observe.summary import brief
from everstep.observe.text import render
from everstep.observe.todo import to_do
from everstep.observe.units import Price, accelerator_time, money, percent, three_digits
from everstep.observe.view import (
    KEPT_EVENTS,
    KEPT_INCIDENTS,
    POINTS,
    Bucket,
    IncidentView,
    Moment,
    NodeView,
    SaveView,
    Series,
    Usage,
    View,
)

VOID = {"meta", "br"}


@pytest.fixture
def view(journal: list[e.Entry]) -> View:
    return folded(sorted(journal, key=lambda entry: entry.t_s)).view


class Page(HTMLParser):
    """Raises when tags do not match; gathers what is checked."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another one"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += f"{data} "

    def found(self, *names: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.tags if tag in names]


FREE = Price()


def whole(view: View, price: Price = FREE) -> Page:
    return Page(page(make(view, price), view))


def test_it_answers_what_a_person_asks_first(view: View) -> None:
    words = " ".join(whole(view, Price(2.5, "EUR")).words.split())
    for part in (
        "The job finished after 41.2 s: step 120.",  # how it ended
        "rank 2 on node1 was killed by signal 9 (sent from outside) at step 40",  # what, who and why
        "2023-11-14 22:13:31 UTC",  # when
        "Training stood still for 1.1 s, and 10 steps had to be made again",  # how long
        "detect 100 ms 8.70 % from the last step until it was noticed",
        "first-step 900 ms",  # phase by phase
        "Look for who sends signals on node1",  # what to do
        "What went wrong cost",  # what it cost
        "EUR",
    ):
        assert part in words, part
    assert "ranks 0, 1 and 3" in words, "who failed as a consequence"


def test_report_json_has_the_same_and_adds_up(view: View) -> None:
    view.metrics = {"loss": math.nan}
    told = make(view, Price(2.0))
    again = msgspec.json.decode(encode(told), type=Report)
    assert again.verdict == "finished" and again.metrics == {"loss": None}
    assert sum(item.share for item in again.buckets) == pytest.approx(1.0)
    assert sum(item.money or 0.0 for item in again.buckets) == pytest.approx(2.0 * again.accelerator_hours)
    assert again.accelerator_hours == pytest.approx(sum(view.buckets.values()) / 3600)
    first, second = again.incidents
    assert (first.who, second.who) == ("rank 2 on node1", "rank 1 on node0")
    assert first.accelerator_hours * 3600 == pytest.approx(sum(view.incidents[0].cost.values()))
    assert {item.incidents for item in again.to_do} == {("I001",), ("I002",)}


def test_a_page_needs_nothing_else_and_is_navigable(view: View) -> None:
    found = whole(view)
    assert not found.found("script", "link", "img", "iframe", "object", "base")
    assert not [value for _, attributes in found.tags for value in attributes.values() if "://" in value]
    names = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(names) == len(set(names))
    targets = [a["href"] for a in found.found("a")]
    assert {t[1:] for t in targets if t.startswith("#")} == set(names) == {"I001", "I002"}
    assert "incidents/I001/rank2-log.txt" in targets
    assert all(a.get("scope") for a in found.found("th")) and found.found("html")[0]["lang"] == "en"
    assert len(found.found("caption")) == len(found.found("table"))
    assert all(a.get("aria-label") for _, a in found.tags if a.get("role") == "img")
    levels = [int(tag[1]) for tag, _ in found.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_what_a_job_says_is_never_markup() -> None:
    nasty = '<script>alert("1")</script>'
    incident = IncidentView(
        "I001", nasty, 1, 1.0, nasty, (Blame(0, nasty, nasty, nasty),), outcome=nasty, files=(nasty,),
        answer=nasty, answer_why=nasty, alternatives=(Alternative(Action.STOP, 1.0, nasty),),
        timeline=[Moment(1.0, nasty, nasty)], phases={nasty: 1.0}, downtime_s=1.0, cost={nasty: 1.0},
    )  # fmt: skip
    view = View(job=nasty, script=nasty, stage=nasty, why=nasty, now_s=9.0, incidents=[incident], metrics={nasty: 1.0})
    view.nodes, view.costs, view.buckets = [NodeView(nasty)], {nasty: 1.0}, {Bucket.PRODUCTIVE.value: 9.0}
    view.series = {f"metric:{nasty}": Series(1.0, [1.0], [1.0], [1.0])}
    text = page(make(view), view, {nasty: nasty})
    assert "<script" not in text and 'alert("' not in text
    assert not Page(text).found("script")


def test_it_stays_small_however_much_happened() -> None:
    timeline = [Moment(float(n), "act", "x" * 400) for n in range(KEPT_EVENTS)]
    rejected = tuple(Alternative(action, 1.0, "y" * 100) for action in Action)
    made = [
        IncidentView(f"I{n:03d}", "crash", 1, float(n), "w" * 400, (Blame(n, f"node{n}", "signal"),), timeline=timeline,
                     alternatives=rejected, cost={"recovery": 1.0}, outcome="recovered", downtime_s=1.0)
        for n in range(KEPT_INCIDENTS)
    ]  # fmt: skip
    curve = [float(n % 7) for n in range(POINTS)]
    view = View(job="j", now_s=1e6, step=9, incidents=made, num_incidents=10_000, exit_code=0)
    view.series = {f"metric:m{n}": Series(1000.0, curve, curve, curve) for n in range(64)}
    view.bucket_series = {bucket.value: Series(1000.0, [0.1] * POINTS, [], []) for bucket in Bucket}
    view.buckets = dict.fromkeys(BUCKETS, 1e6)
    view.by_kind, view.costs = {"crash": 9_990, "drain": 10}, {"signal": 7e5, "other": 2e4, "start": 5.0}
    told = make(view)
    text = page(told, view)
    Page(text)
    assert len(text) < 2_000_000
    assert "Only the newest 256 are kept here" in text and "The other 224 have their line above" in text
    assert told.num_failures == 9_990 and told.incidents_accelerator_hours == pytest.approx(200)
    assert "9,990 failures: A worker died (9,990)" in text and "cost 200 accelerator-hours" in text
    shown = Page(text)
    assert {a["href"][1:] for a in shown.found("a")} <= {a["id"] for _, a in shown.tags if "id" in a}
    assert "(I000, I001, I002, I003, I004, I005, I006, I007 and 248 more)" in re.sub(r"<a [^>]*>|</a>", "", text)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "no save was seen, so unless the script kept it elsewhere, 60 steps left nothing"),
        ({"saves_failed": 2}, "2 saves failed, and none succeeded"),
        ({"memory_steps": {"0": 60}}, "it was kept in the nodes' memory only, which went with the job"),
        ({"saved_step": 40}, ""),
        ({"num_saves": 1}, ""),
        ({"exit_code": None}, ""),
        ({"steps": 0}, ""),
        ({"simulated": True}, ""),
    ],
)
def test_it_says_when_nothing_is_on_disk(fields: dict[str, object], why: str) -> None:
    """Beside "finished", that no save is named is easily overlooked."""
    view = msgspec.structs.replace(View(exit_code=0, step=60, steps=60), **fields)
    told, summary = make(view), render(brief(view))
    if why:
        assert told.story[0] == f"Its state was never saved to disk: {why}."
        assert f"its state was never saved to disk: {why}" in summary
    assert ("never saved" in summary) == any("never saved" in line for line in told.story) == bool(why)
    assert Page(page(told, view)).words.count("never saved to disk") == (2 if why else 0)  # on top, and beside saves


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"exit_code": 0, "step": 100, "goal": 100}, "finished after 10.0 s: step 100 of 100."),
        (
            {"exit_code": 3, "step": 7, "why": "the same failure"},
            "failed after 10.0 s at step 7: the same failure (exit",
        ),
        ({"exit_code": 143, "step": 7, "why": "asked"}, "was stopped by SIGTERM after 10.0 s at step 7: asked."),
        ({"stage": "running"}, "has not ended, as far as this record goes: 10.0 s, no step was made, running."),
    ],
)
def test_headlines(fields: dict[str, object], part: str) -> None:
    told = make(View(job="j", now_s=10.0, **fields))  # type: ignore[arg-type]
    assert part in told.headline
    assert Page(page(told, View(job="j", now_s=10.0))).words


def test_what_to_do_is_grouped_and_names_a_node_behind_most(view: View) -> None:
    view.incidents = [
        IncidentView(f"I{n}", "crash", 1, 1.0, "x", (Blame(0, "node1" if n < 5 else "node0", "signal"),), cost={"a": n})
        for n in range(7)
    ]
    items = to_do(view)
    assert items[0].text.startswith("Examine node1") and items[0].count == 5
    assert [(item.count, item.incidents[0]) for item in items[1:]] == [(7, "I6")]
    assert not to_do(View(exit_code=0))
    unsaved = to_do(View(exit_code=0, now_s=3600.0, saves=[SaveView(7, 1.0, failed="no folder")]))
    assert unsaved[0].text.endswith("so are all steps. A save failed: no folder.")


def test_a_decision_is_told_with_what_was_weighed() -> None:
    other = (Alternative(Action.RESPAWN, 8.0, "2 s down"), Alternative(Action.STOP, -1.0, "never"))
    incident = IncidentView(
        "I1", "crash", 2, 61.0, "rank 0 died", answer="promote-standby", answer_why="0.4 s down", answer_loss_s=1.6,
        alternatives=other, outcome="well again: as before", cost={"detection": 3.0, "recovery": 9.0}, step=4,
    )  # fmt: skip
    assert state(incident) == "well again"  # the whole sentence would not fit into a column
    parts = {part.question: " / ".join(part.lines) for part in explain(incident, 0.0, Price(36.0))}
    assert parts["What was done"] == (
        "a standby took its place (promote-standby): 0.4 s down, 1.60 accelerator-seconds expected / "
        "instead of respawn-in-place: 2 s down, "
        "8.00 accelerator-seconds expected / outcome: well again: as before"
    )
    assert parts["What it cost"].startswith("12.0 accelerator-seconds, 0.12 USD (recovery 9.00")
    assert parts["When"] == "1 min 01 s after the start, after step 4, in epoch 2"


def luminance(colour: str) -> float:
    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(int(colour[n : n + 2], 16) / 255) for n in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("theme", "number"), [(LIGHT, 0), (DARK, 1)])
def test_contrast(theme: dict[str, str], number: int) -> None:
    for ground in ("bg", "panel"):
        for name in ("ink", "soft", "link", "good", "bad", "warn"):
            assert contrast(theme[name], theme[ground]) >= 4.5, (name, ground)
    for name, pair in BUCKETS.items():
        assert contrast(pair[number], theme["bg"]) >= 3, name
    assert contrast(theme["curve"], theme["bg"]) >= 3 and contrast(theme["edge"], theme["bg"]) >= 4.4


def test_a_peak_does_not_flatten_the_curve() -> None:
    values: list[float | None] = [2.0 + n % 2 for n in range(60)]
    calm = charts.curve("c", Series(1.0, values, values, values), Frame(60.0), charts.number)
    values[30], values[40] = 5000.0, None
    text = charts.curve("c", Series(1.0, values, values, values), Frame(60.0), charts.number)
    assert "peaks up to 5,000 are cut off" in text and "cut off" not in calm
    assert ">4<" in text and "5,000<" not in text, "the axis is that of the others"
    assert "highest 5,000" in text, "and who does not see it is told"


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_cover_the_range(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    slack = 1e-6 * max(abs(low), span, 1e-9)
    assert ticks[0] <= low + slack and ticks[-1] >= low + span - slack
    assert 2 <= len(ticks) <= 7 and all(after > before for before, after in itertools.pairwise(ticks))


@given(st.floats(1e-3, 1e12))
def test_time_ticks_are_few(now_s: float) -> None:
    ticks = time_ticks(now_s)
    assert 1 <= len(ticks) <= 8 and ticks[0][0] == 0 and ticks[-1][0] <= now_s


def test_amounts() -> None:
    assert [three_digits(v) for v in (0, 0.0044, 0.44, 4.4, 44, 444, 4444.4)] == [
        "0", "0.0044", "0.44", "4.40", "44.0", "444", "4,444",
    ]  # fmt: skip
    assert accelerator_time(599) == "599 accelerator-seconds" and accelerator_time(7200) == "2.00 accelerator-hours"
    assert money(Price(), 1e9) == "" and money(Price(1.0), 1.0) == "less than 0.01 USD"
    assert money(Price(2.5, "EUR"), 3600 * 1000) == "2,500 EUR"
    assert [percent(v) for v in (0, 1e-5, 0.001, 0.05, 1)] == ["0.0 %", "below 0.01 %", "0.10 %", "5.00 %", "100.0 %"]


def test_a_job_without_devices_says_nothing_of_them() -> None:
    used = Usage()
    usage.add(used, {"n0": NodeLoad(150, 2), "n1": NodeLoad(150, 2, devices=(DeviceLoad(),))})
    assert used.looks == 2 and not any("device" in line for line in usage.lines(used))

"""A View as Prometheus text: every name, few series however large the job; and the files made from the table."""

from __future__ import annotations

import json
import re
from typing import Any

import monitoring
import promql
import pytest
from prometheus_client.parser import text_string_to_metric_families

from everstep.core import events as e
from everstep.core.load import DeviceLoad, NodeLoad
from everstep.observe.metrics import JOB, METRICS, prometheus_text
from everstep.observe.view import (
    AlertView,
    EpochView,
    Fleet,
    IncidentView,
    NodeState,
    NodeView,
    SaveView,
    View,
    Workers,
    WorkerState,
)
from everstep.observe.viewer import Viewer

BY_NAME = {metric.name: metric for metric in METRICS}
NAME = re.compile(r"\beverstep_\w+")


def whole(num_workers: int = 8, names: int = 2) -> View:
    """A View in which nothing is unknown; `names`: metrics, causes and kinds that are not ours."""
    workers = Workers(
        states=[WorkerState.ACTS] * (num_workers - 2) + [WorkerState.SLOW, WorkerState.WAITS],
        own_s=[0.5] * (num_workers - 2) + [0.8, -1.0],
        rss_bytes=[1000 + rank for rank in range(num_workers)],
    )
    nodes = [NodeView(f"node{i}") for i in range(num_workers // 2)] + [NodeView("gone", NodeState.LOST, "silent")]
    incidents = [
        IncidentView("I001", "crash", 1, 50.0, "why", outcome="recovered", downtime_s=3.5, phases={"detect": 0.1}),
        IncidentView("I002", "slow", 2, 90.0, "why"),
    ]
    return View(
        job="gpt", script="train.py", submitted_wall_s=1e9, now_s=100.0, stage="running", epoch=2, term=1, restarts=1,
        step=40, goal=100, steps=45, redone_steps=5, step_s=2.0, last_step_s=99.0,
        metrics={f"metric{i}": 0.5 for i in range(names)}, nodes=nodes, workers=workers,
        fleet=Fleet(total=8, acting=7, spare=1, missing=2, slow=1), incidents=incidents, num_incidents=2,
        by_kind={"crash": 1, "slow": 1} | {f"kind{i}": 1 for i in range(names)},
        by_cause={f"cause{i}": i for i in range(names)}, downtime_s=3.5,
        saves=[SaveView(10, 20.0, 25.0), SaveView(20, 45.0, 55.0), SaveView(30, 70.0, 75.0), SaveView(40, 98.0)],
        loads={"node0": NodeLoad(400, 8, 300, 1000, 90, 100, 1, 1, (150, 50), 80, (DeviceLoad(90, 75, 61),) * 2)},
        num_saves=3, saved_step=30, saves_failed=1, memory_steps={"0": 39, "1": 40},
        epochs=[EpochView(1, 1.0, 8), EpochView(2, 55.0, 7, links_kept=5, links_new=2)],
        alerts=[AlertView(10.0, "jitter", ""), AlertView(60.0, "jitter", "")],
        buckets={"productive": 600.0, "recovery": 100.0}, costs={f"cause{i}": 2.0 for i in range(names)}, ettr=0.9,
        exit_code=0, ended_s=100.0, entries=1000, offset=2**20,
    )  # fmt: skip


def read(view: View) -> promql.Vector:
    return promql.read_text(prometheus_text(view).decode())


def value(view: View, name: str, **labels: str) -> float:
    return read(view)[frozenset({"__name__": name, JOB: view.job, **labels}.items())]


def test_every_name_is_told() -> None:
    text = prometheus_text(whole()).decode()
    families = list(text_string_to_metric_families(text))
    told = {sample.name: family.type for family in families for sample in family.samples}
    assert told == {metric.name: metric.kind for metric in METRICS}
    assert all(sample.labels[JOB] == "gpt" for family in families for sample in family.samples)
    assert {s.name: set(s.labels) - {JOB} for f in families for s in f.samples} == {
        metric.name: set(metric.labels) for metric in METRICS
    }


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("step", {}, 40),
        ("steps_total", {}, 45),
        ("job_submitted_timestamp_seconds", {}, 1e9),
        ("last_step_timestamp_seconds", {}, 1e9 + 99),
        ("last_save_timestamp_seconds", {}, 1e9 + 75),
        ("alert_timestamp_seconds", {"kind": "jitter"}, 1e9 + 60),
        ("save_seconds", {}, 5),
        ("save_interval_seconds", {}, 25),
        ("save_pending_seconds", {}, 2),
        ("memory_step", {}, 39),
        ("epoch_members", {}, 7),
        ("epoch_links", {"which": "new"}, 2),
        ("job_stage", {"stage": "running"}, 1),
        ("job_stage", {"stage": "checking"}, 0),
        ("nodes", {"state": "lost"}, 1),
        ("workers", {"state": "slow"}, 1),
        ("worker_step_seconds", {"over_workers": "max"}, 0.8),
        ("worker_step_seconds", {"over_workers": "median"}, 0.5),
        ("worker_processors", {"over_workers": "max"}, 1.5),
        ("node_processors_busy_ratio", {"over_nodes": "median"}, 0.5),
        ("node_memory_used_ratio", {"over_nodes": "max"}, 0.7),
        ("device_busy_ratio", {"over_devices": "min"}, 0.9),
        ("incidents_total", {"kind": "crash"}, 1),
        ("incidents_total", {"kind": "hang"}, 0),
        ("incidents_open", {"kind": "slow"}, 1),
        ("incidents_open", {"kind": "crash"}, 0),
        ("incident_downtime_seconds", {}, 3.5),
        ("incident_phase_seconds", {"phase": "detect"}, 0.1),
        ("accelerator_seconds", {"bucket": "productive"}, 600),
        ("accelerator_seconds", {"bucket": "redone work"}, 0),
    ],
)
def test_values(name: str, labels: dict[str, str], expected: float) -> None:
    assert value(whole(), f"everstep_{name}", **labels) == expected


def test_along_a_job_no_counter_becomes_less(journal: list[e.Entry]) -> None:
    viewer, before = Viewer(), dict[promql.Labels, float]()
    for entry in journal:
        viewer.add(entry)
        now = read(viewer.view)
        for labels, told in before.items():
            kind = BY_NAME[dict(labels)["__name__"]].kind
            assert kind == "gauge" or now.get(labels, -1.0) >= told, labels
        before = now
    view = viewer.view
    assert value(view, "everstep_incidents_total", kind="hang") == 1
    assert value(view, "everstep_redone_steps_total") == 20
    spent = [v for labels, v in before.items() if ("__name__", "everstep_accelerator_seconds") in labels]
    assert sum(spent) == pytest.approx(4 * 41.2, rel=0.01)


def test_what_is_not_known_is_not_told() -> None:
    names = {dict(labels)["__name__"] for labels in read(View())}
    unknown = "step last_step_timestamp_seconds last_save_timestamp_seconds save_interval_seconds saved_step"
    unknown += " memory_step job_exit_code goal_step worker_step_seconds incident_downtime_seconds"
    assert names.isdisjoint(f"everstep_{name}" for name in unknown.split())
    assert {"everstep_job_ended", "everstep_incidents_total", "everstep_accelerator_seconds"} <= names


def test_a_save_that_a_newer_one_overtook_is_not_waited_for() -> None:
    saves = [SaveView(10, 20.0), SaveView(20, 30.0, 40.0), SaveView(30, 50.0, failed="disk full")]
    assert value(View(job="j", now_s=90.0, saves=saves), "everstep_save_pending_seconds") == 0


def test_few_series_however_large_the_job() -> None:
    small, large = len(read(whole())), len(read(whole(4000, names=500)))
    assert small < 150
    assert large < small + 64 + 3 * 33 + 1
    assert value(whole(8, names=500), "everstep_lost_accelerator_seconds", cause="other") == 2.0 * (500 - 32)


def test_names_from_outside_cannot_break_the_format() -> None:
    evil = 'a"} 1\neverstep_step 9 \\' + "x" * 300
    view = View(job=evil, script=evil, stage=evil, metrics={evil: 1.0}, costs={evil: 1.0}, by_kind={evil: 1})
    families = list(text_string_to_metric_families(prometheus_text(view).decode()))
    assert "everstep_step" not in {family.name for family in families}
    labels = {text for family in families for sample in family.samples for text in sample.labels.values()}
    assert any(label.startswith('a"} 1 everstep_step 9 \\xxx') for label in labels)
    assert max(map(len, labels)) == 64


# What is made from the table --------------------------------------------------------------------------------


def test_files_are_current() -> None:
    for file, made in ((monitoring.PAGE, monitoring.page()), (monitoring.DASHBOARD, monitoring.dashboard())):
        assert file.read_text(encoding="utf-8") == made, "run: python scripts/monitoring.py"


def expressions() -> dict[str, str]:
    """Where each expression stands -> itself, for alerts and dashboard."""
    found = {rule.name: rule.expr for rule in monitoring.read_rules(monitoring.RULES.read_text(encoding="utf-8"))}
    board = json.loads(monitoring.dashboard())
    for panel in board["panels"]:
        found |= {f"{panel['title']} {target['refId']}": target["expr"] for target in panel.get("targets", [])}
    found |= {item["name"]: item["expr"] for item in board["annotations"]["list"]}
    return found | {item["name"]: item["query"]["query"] for item in board["templating"]["list"][1:]}


def test_every_name_used_exists() -> None:
    for where, text in expressions().items():
        used = set(NAME.findall(text))
        assert (used and used <= BY_NAME.keys()) or text.startswith("up{"), where
        for name, inside in re.findall(r"(everstep_\w+)\{([^}]*)\}", text):
            labels = {label for label, _, _ in promql.PAIR.findall(inside)}
            assert labels <= {JOB, *BY_NAME[name].labels}, where
        for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", text):
            known = {JOB, "instance", *(label for name in used for label in BY_NAME[name].labels)}
            assert set(names.split(", ")) <= known, where


def test_only_counters_are_asked_for_increases() -> None:
    for where, text in expressions().items():
        for function, name in re.findall(r"\b(increase|rate|delta)\((everstep_\w+)", text):
            assert (BY_NAME[name].kind == "counter") == (function != "delta"), where


def test_every_metric_is_shown_or_judged() -> None:
    used = {name for text in expressions().values() for name in NAME.findall(text)}
    spared = {"everstep_restarts_total", "everstep_accelerators", "everstep_epoch_members", "everstep_epoch_links"}
    spared |= {"everstep_saves_total", "everstep_incident_downtime_seconds"}
    assert set(BY_NAME) - used == spared


def test_panels_do_not_overlap() -> None:
    places: set[tuple[int, int]] = set()
    board: dict[str, Any] = json.loads(monitoring.dashboard())
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not places & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= cells
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)

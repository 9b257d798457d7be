"""Each alert of deploy/prometheus/alerts.yml fires in a job made for it, and none fires in a healthy one.

Our evaluator judges always; promtool (Debian: apt install prometheus) judges the same jobs where it is there.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import monitoring
import promql
import pytest

from everstep.core.load import NodeLoad
from everstep.observe.metrics import JOB, METRICS
from everstep.observe.view import AlertView, Fleet, IncidentView, SaveView, View

RULES = {rule.name: rule for rule in monitoring.read_rules(monitoring.RULES.read_text(encoding="utf-8"))}
EVERY_MIN, END_MIN, SICK_MIN = 2, 150, 60
TARGET = {"job": "everstep", "instance": "node0:7070"}
UP = frozenset({("__name__", "up")})
PROMTOOL = shutil.which("promtool")


def healthy(minute: int) -> View:
    """A job of 8 accelerators at this minute: a step every two seconds, a save every ten minutes."""
    now, done = 60.0 * minute, minute // 10
    saves = [SaveView(300 * k, 600.0 * k - 20, 600.0 * k) for k in range(1, done + 1)]
    return View(
        job="gpt", now_s=now, stage="running", epoch=2, term=1, step=30 * minute, steps=30 * minute, step_s=2.0,
        last_step_s=now - 1, metrics={"loss": 2.0}, fleet=Fleet(total=8, acting=7, spare=1), saves=saves,
        num_saves=done, saved_step=300 * done, ettr=0.98, downtime_s=30.0, by_kind={"crash": 1, "drain": 1},
        loads={"node0": NodeLoad(390, 8, 300, 1000)}, entries=60 * minute,
        buckets={"productive": 6.9 * now, "recovery": 0.1 * now, "idle standby": now},
    )  # fmt: skip


def opened(view: View, kind: str) -> None:
    view.incidents = [IncidentView("I001", kind, 2, 60.0 * SICK_MIN, "why")]
    view.by_kind = view.by_kind | {kind: view.by_kind.get(kind, 0) + 1}


def failed(view: View) -> None:
    view.exit_code, view.stage, view.ended_s = 3, "failed", 60.0 * SICK_MIN


def stands(view: View) -> None:
    view.last_step_s, view.step = 60.0 * SICK_MIN, 30 * SICK_MIN


def never_began(view: View) -> None:
    view.last_step_s, view.step, view.steps = -1.0, -1, 0


def unsaved(view: View) -> None:
    view.saves = [save for save in view.saves if save.durable_s < 60 * SICK_MIN]


def silent(view: View) -> None:
    stands(view)
    view.entries = 60 * SICK_MIN


def unproductive(view: View) -> None:
    lost = 3.0 * (view.now_s - 60 * SICK_MIN)
    view.buckets = view.buckets | {"productive": view.buckets["productive"] - lost, "redone work": lost}


def lacks(view: View) -> None:
    view.fleet = Fleet(total=8, acting=6, spare=1, missing=1)


def spareless(view: View) -> None:
    view.fleet = Fleet(total=7, acting=7)


def stuck_save(view: View) -> None:
    unsaved(view)
    view.saves.append(SaveView(30 * SICK_MIN, 60.0 * SICK_MIN))


def refused(view: View) -> None:
    view.alerts = [AlertView(60.0 * SICK_MIN + 3000, "check-failed", "node1 is not used: disk")]


def many(view: View) -> None:
    view.by_kind = {"crash": 7}


# Alert -> what becomes of the job at SICK_MIN.
SICK: dict[str, Callable[[View], None]] = {
    "EverstepJobFailed": failed,
    "EverstepNoStep": stands,
    "EverstepNoFirstStep": never_began,
    "EverstepIncidentOpen": lambda view: opened(view, "hang"),
    "EverstepCorruptState": lambda view: opened(view, "corrupt"),
    "EverstepSavesOverdue": unsaved,
    "EverstepJournalSilent": silent,
    "EverstepDashboardGone": lambda view: None,  # it is not asked either
    "EverstepManyIncidents": many,
    "EverstepDowntime": lambda view: setattr(view, "downtime_s", 700.0),
    "EverstepGoodputLow": unproductive,
    "EverstepCapacityMissing": lacks,
    "EverstepMemoryShort": lambda view: view.loads.update(node0=NodeLoad(100, 8, 20, 1000)),
    "EverstepSparesGone": spareless,
    "EverstepStraggler": lambda view: opened(view, "slow"),
    "EverstepAnomaly": lambda view: opened(view, "anomaly"),
    "EverstepSaveFailed": lambda view: setattr(view, "saves_failed", 1),
    "EverstepSaveStuck": stuck_save,
    "EverstepControllerRestarts": lambda view: setattr(view, "term", 4),
    "EverstepNodeRefused": refused,
    "EverstepWorkRedone": lambda view: setattr(view, "redone_steps", 12),
}
ALWAYS = ("EverstepNoFirstStep",)  # not only from SICK_MIN on


def samples(view: View) -> promql.Vector:
    return {
        frozenset([("__name__", metric.name), (JOB, view.job), *zip(metric.labels, labels, strict=True)]): value
        for metric in METRICS
        for labels, value in metric.values(view).items()
    }


def scrapes(alert: str) -> Iterator[tuple[int, promql.Vector]]:
    """What Prometheus finds each time in the job made for that alert; in a healthy one if there is no such."""
    for minute in range(0, END_MIN + 1, EVERY_MIN):
        view, sick = healthy(minute), minute >= SICK_MIN or alert in ALWAYS
        if sick and alert in SICK:
            SICK[alert](view)
        gone = sick and alert == "EverstepDashboardGone"
        yield minute, {UP: 0.0} if gone else samples(view) | {UP: 1.0}


def firing(alert: str) -> dict[str, list[int]]:
    """Alerts -> minutes at which they fire in that job."""
    store, since, found = promql.Store(), dict.fromkeys(RULES, -1), dict[str, list[int]]()
    for minute, seen in scrapes(alert):
        store.add(60.0 * minute, seen, **TARGET)
        for name in RULES if alert == "" else [alert]:
            if not promql.evaluate(RULES[name].expr, store, 60.0 * minute):
                since[name] = -1
                continue
            since[name] = minute if since[name] < 0 else since[name]
            if minute - since[name] >= minutes(RULES[name].lasts):
                found.setdefault(name, []).append(minute)
    return found


def minutes(lasts: str) -> float:
    return float(lasts[:-1]) * promql.UNIT_S[lasts[-1]] / 60


def test_every_rule_is_read() -> None:
    text = monitoring.RULES.read_text(encoding="utf-8")
    assert list(RULES) == re.findall(r"- alert: (\w+)", text)
    assert {rule.severity for rule in RULES.values()} == {"critical", "warning", "info"}
    assert sum(rule.lasts != "0s" for rule in RULES.values()) == text.count("\n        for: ")
    assert set(SICK) == set(RULES), "each alert needs a job in which it fires"


def test_no_alert_fires_in_a_healthy_job() -> None:
    assert firing("") == {}


@pytest.mark.parametrize("alert", SICK)
def test_each_alert_fires_in_a_job_made_for_it(alert: str) -> None:
    when = firing(alert)
    assert when, f"{alert} never fires"
    assert min(when[alert]) >= SICK_MIN


def test_alerts_end_with_the_job() -> None:
    """Only those that tell of the end, or of what was within the last hour."""
    store = promql.Store()
    for minute in range(0, END_MIN + 1, EVERY_MIN):
        view = healthy(minute)
        opened(view, "hang")
        view.fleet = Fleet(total=8, acting=6, missing=2)
        stuck_save(view)
        stands(view)
        if minute > SICK_MIN:
            view.exit_code = 0
        store.add(60.0 * minute, samples(view), **TARGET)
    assert [name for name, rule in RULES.items() if promql.evaluate(rule.expr, store, 60.0 * END_MIN)] == []


# promtool ---------------------------------------------------------------------------------------------------


def unit_test(alert: str) -> dict[str, object]:
    """One test of `promtool test rules`: at its end these alerts fire, by our evaluator."""
    rows: dict[promql.Labels, dict[int, float]] = {}
    for minute, seen in scrapes(alert):
        for labels, value in seen.items():
            rows.setdefault(labels | frozenset(TARGET.items()), {})[minute] = value
    times, when = range(0, END_MIN + 1, EVERY_MIN), firing(alert)
    series = [
        {"series": _series(labels), "values": " ".join(_number(values.get(minute)) for minute in times)}
        for labels, values in rows.items()
    ]
    ends = [
        {
            "expr": f'count by (alertname) (ALERTS{{alertname="{name}", alertstate="firing"}})',
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1}] if minute in when.get(name, ()) else [],
        }
        for name in ([alert] if alert else RULES)
        for minute in (SICK_MIN - EVERY_MIN, 90, 120, END_MIN)
    ]
    return {"name": alert, "interval": f"{EVERY_MIN}m", "input_series": series, "promql_expr_test": ends}


def _series(labels: promql.Labels) -> str:
    values = dict(labels)
    inside = ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items() if key != "__name__")
    return f"{values['__name__']}{{{inside}}}"


def _number(value: float | None) -> str:
    return "_" if value is None else f"{value:.10g}"


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here")
def test_prometheus_judges_as_we_do(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    checks = {
        "rule_files": [str(monitoring.RULES)],
        "evaluation_interval": f"{EVERY_MIN}m",
        "tests": [unit_test(alert) for alert in ("", *SICK)],
    }
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps(checks), encoding="utf-8")
    config = monitoring.RULES.with_name("scrape.yml")
    for command in (["check", "config", str(config)], ["test", "rules", str(file)]):
        done = subprocess.run([PROMTOOL, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


# Our evaluator ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("2 + 3 * 4 - 6 / 2", 11.0),
        ('a{x!="2"} * 2', {(("x", "1"),): 20.0}),
        ("sum by (y) (a) > 29", {(): 30.0}),
        ("a > 10 or b", {(("__name__", "a"), ("x", "2")): 20.0, (("__name__", "b"),): 5.0}),
        ("a unless on () b", {}),
        ('a{x=~"1|7"} and a', {(("__name__", "a"), ("x", "1")): 10.0}),
        ("increase(c[10m])", {(): 3.0}),
        ("delta(c[10m])", {(): 1.0}),
        ("c - on (z) c / 0", {(): -math.inf}),
        ("old", {}),
    ],
)
def test_evaluator(expression: str, expected: object) -> None:
    store = promql.Store()
    store.add(1.0, promql.read_text("c 2\nold 1\n"))
    store.add(300.0, promql.read_text("c 1\n"))
    store.add(600.0, promql.read_text('a{x="1"} 10\na{x="2"} 20\nb 5\nc 3\n'))
    value = promql.evaluate(expression, store, 600.0)
    shown = value if isinstance(value, float) else {tuple(sorted(labels)): found for labels, found in value.items()}
    assert shown == expected


@pytest.mark.parametrize("expression", ["rate(a[5m])", "a[5m]", "a @ 5", "a * a a", "sum(a)", "a * on (y) a", "(a"])
def test_evaluator_refuses_what_it_does_not_know(expression: str) -> None:
    store = promql.Store()
    store.add(0.0, promql.read_text('a{x="1"} 1\na{x="2"} 2\n'))
    with pytest.raises(ValueError, match=r"\w"):
        promql.evaluate(expression, store, 0.0)

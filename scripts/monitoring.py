"""Writes docs/metrics.md and deploy/grafana/dashboard.json from the table of metrics: python scripts/monitoring.py

A test fails when they are not what this makes. The alert rules are written by hand; the page lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from everstep.observe.metrics import JOB, MAX_CAUSES, MAX_SCRIPT_METRICS, METRICS, SECTIONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/metrics.md"
DASHBOARD = ROOT / "deploy/grafana/dashboard.json"
RULES = ROOT / "deploy/prometheus/alerts.yml"
SOURCE: dict[str, str] = {"type": "prometheus", "uid": "${datasource}"}
OURS = f'{JOB}="$job"'
INTRO = f"""# Metrics

`GET /metrics` of a job's dashboard (`everstep run` prints its address) answers in Prometheus' text format.
This page is made from `src/everstep/observe/metrics.py`, the table of all names, by `python scripts/monitoring.py`.

- Units are in the names: seconds, bytes, ratios (0 to 1). `_timestamp_seconds` are seconds since 1970.
- Every series has the label `{JOB}`. No label has unbounded values: nothing is told by rank, node or incident
  (the dashboard does); of metrics of the script the first {MAX_SCRIPT_METRICS} are told, of causes the greatest
  {MAX_CAUSES} by name, the others as `other`.
- A counter never becomes less. What may be put right later is a gauge: `everstep_accelerator_seconds` moves time from
  `productive` to `detection` once a fault is known. Use `delta` of it, not `rate`.
- What is not known yet is not there, and so matches no alert.
- Workers' times and memory are told as their least, median and greatest (`over_workers`): as many series for 8 workers
  as for 8,000.
"""
SCRAPE = """
## Set it up

[scrape.yml](../deploy/prometheus/scrape.yml) is a configuration to start from, with the rules of
[alerts.yml](../deploy/prometheus/alerts.yml). [dashboard.json](../deploy/grafana/dashboard.json) is for Grafana
(Dashboards, New, Import); data source and job are chosen at its top.

## Alerts

| alert | severity | when | for |
|---|---|---|---|
"""
OTEL = """
## OpenTelemetry

`pip install 'everstep[otel]'`, then `everstep run --set dashboard.otlp=http://collector:4318`, or
`everstep dashboard --otlp http://collector:4318`: the same metrics under the same names every 15 s over OTLP/HTTP, and
a trace for each incident, half a minute after it is over: a span from the first sign to the first new step, one below
it for each phase, events for its time line; kind, culprits, cause, answer and cost are attributes. Ids follow from the
job and the incident, so what is sent twice (by a dashboard that was started again) is the same trace. OpenTelemetry's
variables hold: `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE`, `OTEL_RESOURCE_ATTRIBUTES`. A collector
that does not answer costs the job nothing: that is said once, the next round has the newest metrics, and the newest 256
incidents wait.
"""


class Rule(NamedTuple):
    """One alert, as alerts.yml has it. `lasts`: the expression has to hold for so long."""

    name: str
    expr: str
    severity: str
    when: str
    lasts: str


def read_rules(text: str) -> list[Rule]:
    """The rules of our file; not YAML in general: `key: value`, `key: |` and text below it, quoted text."""
    found: list[dict[str, str]] = []
    block, depth = "", 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        key, _, value = line.strip().removeprefix("- ").partition(":")
        if block and line.strip() and indent > depth:
            found[-1][block] += f" {line.strip()}"
            continue
        block = ""
        if key == "alert":
            found.append({})
        if found and value.strip() == "|":
            block, depth = key, indent
            found[-1][key] = ""
        elif found and value.strip() and not key.startswith("#"):
            found[-1][key] = value.strip().strip('"')
    return [Rule(r["alert"], r["expr"].strip(), r["severity"], r["when"], r.get("for", "0s")) for r in found]


def page() -> str:
    parts = [INTRO]
    for title, metrics in SECTIONS.items():
        rows = (
            f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} |\n" for m in metrics
        )
        parts.append(f"\n## {title}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n{''.join(rows)}")
    parts.append(SCRAPE)
    for rule in read_rules(RULES.read_text(encoding="utf-8")):
        lasts = "" if rule.lasts == "0s" else rule.lasts
        parts.append(f"| {rule.name} | {rule.severity} | {rule.when} | {lasts} |\n")
    return "".join([*parts, OTEL])


# Grafana ----------------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """`queries`: expression, to whose names the job is added, and legend."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    stacked: bool = False
    most: float | None = None
    warn: tuple[tuple[str, float | None], ...] = (("green", None),)  # colours and from which value on


RED_ABOVE_0 = (("green", None), ("red", 1.0))
LOW_IS_BAD = (("red", None), ("orange", 0.8), ("green", 0.95))
SPREAD = "{{over_workers}}"
ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        Panel("Stage", (("everstep_job_stage == 1", "{{stage}}"),), kind="stat", width=4),
        Panel("Step", (("everstep_step", "step"), ("everstep_goal_step", "of")), "locale", "stat", 4),
        Panel("ETTR", (("everstep_ettr_ratio", ""),), "percentunit", "stat", 4, warn=LOW_IS_BAD),
        Panel(
            "Open incidents",
            (("sum by (training_job) (everstep_incidents_open)", ""),),
            kind="stat",
            width=4,
            warn=RED_ABOVE_0,
        ),
        Panel("Accelerators missing", (("everstep_accelerators_missing", ""),), "short", "stat", 4, warn=RED_ABOVE_0),
        Panel("Newest save", (("time() - everstep_last_save_timestamp_seconds", ""),), "s", "stat", 4),
    ),
    "Training": (
        Panel("Metrics of the script", (('everstep_script_metric{name=~"$metric"}', "{{name}}"),)),
        Panel("Steps per second", (("rate(everstep_steps_total[$__rate_interval])", "steps/s"),)),
        Panel(
            "Seconds a step",
            (("everstep_step_seconds", "step"), ("everstep_worker_step_seconds", f"a worker's own, {SPREAD}")),
            "s",
        ),
        Panel("Steps made again", (("increase(everstep_redone_steps_total[$__rate_interval])", "steps"),)),
    ),
    "Goodput": (
        Panel(
            "What accelerators' time went to",
            (
                (
                    "sum by (bucket) (delta(everstep_accelerator_seconds[$__rate_interval]))"
                    " / scalar(sum(delta(everstep_accelerator_seconds[$__rate_interval])))",
                    "{{bucket}}",
                ),
            ),
            "percentunit",
            stacked=True,
            most=1.0,
        ),
        Panel("In all", (("everstep_accelerator_seconds", "{{bucket}}"),), "s", "bargauge", 6),
        Panel("Lost, by cause", (("topk(10, everstep_lost_accelerator_seconds)", "{{cause}}"),), "s", "bargauge", 6),
    ),
    "Fleet": (
        Panel(
            "Accelerators",
            (
                ("everstep_accelerators_acting", "acting"),
                ("everstep_accelerators_spare", "spare"),
                ("everstep_accelerators_missing", "missing"),
                ("everstep_accelerators_slow", "slow"),
            ),
        ),
        Panel("Nodes", (("everstep_nodes", "{{state}}"),), stacked=True),
        Panel("Workers", (("everstep_workers", "{{state}}"),), stacked=True),
        Panel("Resident memory of a worker", (("everstep_worker_resident_bytes", SPREAD),), "bytes"),
    ),
    "Incidents": (
        Panel("Incidents", (("everstep_incidents_total > 0", "{{kind}}"),)),
        Panel("The newest, by phase", (("everstep_incident_phase_seconds", "{{phase}}"),), "s", stacked=True),
        Panel("By cause", (("everstep_incidents_by_cause", "{{cause}}"),), kind="bargauge"),
        Panel("Time without a step", (("everstep_downtime_seconds", "in all"),), "s"),
    ),
    "Saves and control": (
        Panel(
            "Steps that are safe",
            (
                ("everstep_step", "made"),
                ("everstep_memory_step", "in memory of the nodes"),
                ("everstep_saved_step", "on disk"),
            ),
        ),
        Panel(
            "Seconds a save takes",
            (("everstep_save_seconds", "newest"), ("everstep_save_pending_seconds", "pending")),
            "s",
        ),
        Panel("Memberships", (("everstep_epoch", "epoch"), ("everstep_controller_term", "lives of the controller"))),
        Panel("Journal", (("everstep_journal_bytes", "size"),), "bytes"),
    ),
}


def dashboard() -> str:
    return json.dumps(
        {
            "uid": "everstep-job",
            "title": "Everstep: a training job",
            "description": "One job of those that Prometheus knows. What the names mean: docs/metrics.md.",
            "tags": ["everstep", "training"],
            "schemaVersion": 39,
            "editable": True,
            "refresh": "15s",
            "graphTooltip": 1,  # a crosshair in all panels
            "time": {"from": "now-6h", "to": "now"},
            "templating": {"list": [_source(), *_variables()]},
            "annotations": {"list": [_incidents()]},
            "panels": list(_panels()),
        },
        indent=1,
    ) + "\n"  # fmt: skip


def _source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variables() -> Iterator[dict[str, Any]]:
    wanted = (
        ("job", "Job", "everstep_job_info", JOB),
        ("metric", "Metric", f"everstep_script_metric{{{OURS}}}", "name"),
    )
    for name, label, series, key in wanted:
        query = {"query": f"label_values({series}, {key})", "refId": name}
        several = {"multi": True, "includeAll": True, "current": {"text": ["All"], "value": ["$__all"]}}
        yield {
            "name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2,
            "sort": 1, **(several if name == "metric" else {}),
        }  # fmt: skip


def _incidents() -> dict[str, Any]:
    return {
        "name": "Incidents", "enable": True, "datasource": SOURCE, "iconColor": "red", "titleFormat": "{{kind}}",
        "expr": f"increase(everstep_incidents_total{{{OURS}}}[$__rate_interval]) > 0",
    }  # fmt: skip


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for title, panels in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []}
        number, y, x = number + 1, y + 1, 0
        height = 4 if panels[0].kind == "stat" else 8
        for panel in panels:
            if x + panel.width > 24:
                x, y = 0, y + height
            place = {"h": height, "w": panel.width, "x": x, "y": y}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            number, x = number + 1, x + panel.width
        y += height


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(65 + i), "datasource": SOURCE, "expr": _query(expr), "legendFormat": legend or "__auto"}
        for i, (expr, legend) in enumerate(panel.queries)
    ]
    steps = [{"color": color, "value": value} for color, value in panel.warn]
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none"}
        defaults |= {"min": 0} if panel.stacked else {}
        defaults["custom"] = {"stacking": stacking, "fillOpacity": 40 if panel.stacked else 0, "showPoints": "never"}
        legend = {"showLegend": True, "displayMode": "table", "placement": "right", "calcs": ["lastNotNull", "max"]}
        options = {"legend": legend}
        options["tooltip"] = {"mode": "multi", "sort": "desc"}
    else:
        options["reduceOptions"] = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.title == "Stage":
        options["textMode"] = "name"
    if panel.kind == "bargauge":
        sizes = {"titleSize": 13, "valueSize": 13}  # else few bars have names too large to be read whole
        options |= {"orientation": "horizontal", "namePlacement": "left", "text": sizes}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "type": panel.kind, "title": panel.title, "datasource": SOURCE, "description": _described(panel),
        "targets": targets, "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options,
    }  # fmt: skip


def _query(expression: str) -> str:
    """With the job that was chosen, beside the matchers that are there."""

    def chosen(match: re.Match[str]) -> str:
        return f"{match[1]}{{{', '.join(filter(None, [OURS, match[2]]))}}}"

    return re.sub(r"(everstep_\w+)(?:\{(.*?)\})?", chosen, expression)


def _described(panel: Panel) -> str:
    """What the numbers mean, from the table."""
    text = " ".join(expression for expression, _ in panel.queries)
    return " ".join(dict.fromkeys(metric.help for metric in METRICS if re.search(rf"\b{metric.name}\b", text)))


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    DASHBOARD.write_text(dashboard(), encoding="utf-8")


if __name__ == "__main__":
    main()

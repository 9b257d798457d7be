"""report.html: the answers first, then what they rest on. One file that needs nothing else, and no script.

Its size is bounded as the View's is: the newest and the dearest incidents are told whole, the others in a line each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple, TypeVar

from everstep.observe import charts, html
from everstep.observe.charts import Frame, Mark
from everstep.observe.explain import failure, title, whom
from everstep.observe.html import Column
from everstep.observe.incident_page import details
from everstep.observe.report import Report, Told
from everstep.observe.text import duration
from everstep.observe.units import (
    HOUR_S,
    Price,
    Unit,
    accelerator_time,
    bare_money,
    moment,
    money,
    percent,
    plural,
    unit_for,
)
from everstep.observe.unsaved import unsaved
from everstep.observe.usage import lines
from everstep.observe.view import Bucket, IncidentView, View

Value = TypeVar("Value")
MOST_ROWS = 20  # of the first table
MOST_WHOLE = 32  # incidents that are told whole
MOST_CURVES = 8  # of what the script logged
MOODS = {"finished": "good", "failed": "bad", "stopped": "warn", "unfinished": "warn"}
NEEDLESS = {"epoch", "step", "lr"}  # logged values that are shown last


class Amounts(NamedTuple):
    """Accelerators' time in columns: in one unit on the whole page, and in money if there is a price."""

    unit: Unit
    price: Price

    def heads(self, of: str = "") -> list[Column]:
        names = [self.unit.name, self.price.currency] if self.price.per_hour else [self.unit.name]
        return [Column(f"{of}{name}", True) for name in names]

    def cells(self, accelerator_hours: float) -> list[str]:
        spent = accelerator_hours * HOUR_S
        return [self.unit(spent), bare_money(self.price, spent)] if self.price.per_hour else [self.unit(spent)]

    def card(self, name: str, accelerator_hours: float) -> tuple[str, str, str]:
        """Name, number, and what the number means."""
        spent = accelerator_hours * HOUR_S
        paid = money(self.price, spent)
        return name, self.unit(spent), f"{self.unit.name}{f', {paid}' if paid else ''}"


class Links(NamedTuple):
    """Which incidents are told whole on the page: only these can be gone to."""

    whole: set[str]

    def __call__(self, name: str) -> str:
        return f'<a href="#{escape(name)}">{escape(name)}</a>' if name in self.whole else escape(name)

    def within(self, line: str) -> str:
        """A sentence, with the incidents that it names."""
        return "".join(self(part) for part in re.split(r"(\w+)", line.replace(" %", "\u00a0%")))


def page(report: Report, view: View, excerpts: Mapping[str, str] | None = None, beside: bool = True) -> str:
    """`excerpts`: file of an incident -> its last lines. `beside`: the page lies in the run folder, so that these files
    can be linked."""
    price = Price(report.price_per_hour, report.currency)
    amounts = Amounts(unit_for(report.accelerator_hours * HOUR_S), price)
    whole = _dearest(report.incidents, MOST_WHOLE)
    link = Links({told.id for told in whole})
    parts = [
        _head(report, view, link),
        _figures(report, amounts),
        _todo(report, link),
        _incidents(report, view, amounts, link),
        _buckets(report, amounts),
        _curves(view),
        _details(report, whole, price, excerpts or {}, beside),
        _state(report, view),
        _foot(report, view),
    ]
    return html.document(f"{report.job}: {report.verdict}", f"<main>{''.join(parts)}</main>", charts.STYLE)


def _head(report: Report, view: View, link: Links) -> str:
    began = moment(view.submitted_wall_s)
    where = [report.script, f"began {began}" if began else "", "simulated" if report.simulated else ""]
    story = "".join(f"<p>{link.within(line)}</p>" for line in report.story)
    return (
        f'<p class="note">{escape(" · ".join(filter(None, where)))}</p>'
        f"<h1>{escape(report.job)} {html.badge(report.verdict, MOODS[report.verdict])}</h1>"
        f'<div class="story"><p><strong>{escape(report.headline)}</strong></p>{story}</div>\n'
    )


def _figures(report: Report, amounts: Amounts) -> str:
    logged = [(name, value) for name, value in _by_weight(report.metrics) if value is not None][:1]
    cards = [
        ("Wall time", duration(report.wall_s), plural(report.accelerators, "accelerator")),
        ("Steps", _steps(report), f"{duration(report.step_s)} each at the end" if report.step_s else ""),
        *((name, charts.number(value), "at the end") for name, value in logged),
        ("Failures", f"{report.num_failures:,}", f"of {plural(report.num_incidents, 'incident')}"),
        ("Stood still", duration(report.downtime_s), "without a step, by incidents"),
        ("ETTR", percent(report.ettr), "effective training time, of the wall time"),
        amounts.card("Incidents cost", report.incidents_accelerator_hours),
        amounts.card("Whole job", report.accelerator_hours),
    ]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(note)}</small>' if note else ''}</dd></div>"
        for name, value, note in cards
    )
    return f'<dl class="figures">{items}</dl>\n'


def _steps(report: Report) -> str:
    if report.step < 0:
        return "none"
    return f"{report.step:,} of {report.goal:,}" if report.goal else f"{report.step:,}"


def _todo(report: Report, link: Links) -> str:
    if not report.to_do:
        return "<h2>What to do</h2><p>Nothing.</p>\n"
    items = []
    for item in report.to_do:
        names = ", ".join(link(name) for name in item.incidents)
        more = f" and {item.count - len(item.incidents)} more" if item.count > len(item.incidents) else ""
        items.append(f"<li>{escape(item.text)}{f' <small>({names}{more})</small>' if names else ''}</li>")
    return f'<h2>What to do</h2><ol class="todo">{"".join(items)}</ol>\n'


def _incidents(report: Report, view: View, amounts: Amounts, link: Links) -> str:
    if not report.incidents:
        return "<h2>What happened</h2><p>Nothing failed, and nobody asked for anything.</p>\n"
    columns = [
        Column("Incident"),
        Column("When"),
        Column("What, who and why", wide=True),
        Column("Training stood still", True),
    ]
    columns += [*amounts.heads("Cost, "), Column("How it ended")]
    missing = view.num_incidents - len(view.incidents)
    said = f"{plural(view.num_incidents, 'incident')}, in the order in which they began."
    said += f" Only the newest {len(view.incidents):,} are kept here." if missing else ""
    rows = {told.id: [link(told.id), *_line(told, view, amounts)] for told in report.incidents}
    whole = html.table(escape(said), columns, rows.values())
    if len(rows) <= MOST_ROWS:
        return f"<h2>What happened</h2>{whole}"
    dearest = _dearest(report.incidents, MOST_ROWS)
    first = html.table(f"The {MOST_ROWS} dearest of {escape(said)}", columns, [rows[told.id] for told in dearest])
    return f"<h2>What happened</h2>{first}<details><summary>All {len(rows):,} of them</summary>{whole}</details>\n"


def _line(told: Told, view: View, amounts: Amounts) -> list[str]:
    clock = moment(view.submitted_wall_s + told.facts.opened_s) if view.submitted_wall_s else ""
    when = f"{duration(told.facts.opened_s)}<br><small class=soft>{clock.partition(' ')[2]}</small>"
    when = f"<span class=tight>{when}</span>"
    words = f"{escape(told.title)}<br><small>{escape(whom(told.facts))}</small>"
    cells = [when, words, escape(told.stood_still)]
    cells += amounts.cells(told.accelerator_hours)
    return [*cells, html.badge(told.state, _mood(told.facts, view.exit_code == 0))]


def _mood(incident: IncidentView, finished: bool) -> str:
    if not incident.outcome:
        return "warn"
    if not failure(incident):
        return "soft"
    if incident.outcome.startswith("job ended"):
        return "soft" if finished else "bad"
    return "good"


def _buckets(report: Report, amounts: Amounts) -> str:
    """Buckets: every accelerator-second is in exactly one."""
    if not report.accelerator_hours:
        return ""
    bar = [(item.name, item.accelerator_hours, html.colour(item.name)) for item in report.buckets]
    words = ", ".join(f"{item.name} {percent(item.share)}" for item in report.buckets if item.share)
    columns = [Column("Spent on"), Column("Share", True), *amounts.heads(), Column("That is", wide=True)]
    rows = []
    for item in report.buckets:
        if item.share or item.name == Bucket.PRODUCTIVE.value:
            key = f'<span class="key" style="background:{html.colour(item.name)}"></span>{escape(item.name)}'
            rows.append([key, percent(item.share), *amounts.cells(item.accelerator_hours), escape(item.meaning)])
    total = f"{accelerator_time(report.accelerator_hours * 3600)} in all; each belongs to exactly one line."
    return (
        "<h2>Where the accelerators' time went</h2>"
        f"{html.bar(bar, words)}{html.table(escape(total), columns, rows)}{_causes(report, amounts)}"
    )


def _causes(report: Report, amounts: Amounts) -> str:
    if not report.causes:
        return ""
    columns = [Column("Lost by"), Column("Share", True), *amounts.heads(), Column("That is", wide=True)]
    rows = [
        [escape(item.name), percent(item.share), *amounts.cells(item.accelerator_hours), escape(item.meaning)]
        for item in report.causes[:20]
    ]
    return html.table("The same losses by their cause.", columns, rows)


def _curves(view: View) -> str:
    frame = Frame(view.now_s, [_mark(incident) for incident in view.incidents if failure(incident)], view.redone)
    drawn = []
    metrics = {name.removeprefix("metric:"): s for name, s in view.series.items() if name.startswith("metric:")}
    for name, _ in _by_weight(metrics)[:MOST_CURVES]:
        drawn.append(charts.curve(name, metrics[name], frame, charts.number, from_zero=False))
    for name, words, label in (
        ("steps_per_s", "Steps a second", charts.number),
        ("step_s", "Step time", duration),
        ("members", "Workers that train", charts.number),
    ):
        if name in view.series:
            drawn.append(charts.curve(words, view.series[name], frame, label))
    drawn.append(charts.shares(view.bucket_series, frame, "What the accelerators did"))
    shown = "".join(drawn)
    if not shown:
        return ""
    note = "Marks: failures" if frame.many else "Shaded: failures, from the last step before to the first one after"
    note += "; paler: steps that were made again later." if frame.redone else "."
    left_out = len(metrics) - MOST_CURVES
    more = f" {left_out} more values were logged; `everstep dashboard` shows all." if left_out > 0 else ""
    marked = f'<p class="note">{escape(note)}{escape(more)}</p>' if frame.marks else ""
    return f'<h2>Over time</h2>{marked}<div class="charts">{shown}</div>\n'


def _by_weight(metrics: Mapping[str, Value]) -> list[tuple[str, Value]]:
    """Losses first, then as logged; what only counts comes last."""
    return sorted(metrics.items(), key=lambda item: ("loss" not in item[0].lower(), item[0] in NEEDLESS))


def _mark(incident: IncidentView) -> Mark:
    """From the last step before to the first one after; one that never ended reaches to the end."""
    first = incident.opened_s - incident.phases.get("detect", 0.0)
    if incident.downtime_s >= 0:
        end = first + incident.downtime_s
    else:
        end = incident.closed_s if incident.closed_s >= 0 else float("inf")
    begin = max(0.0, min(first, incident.opened_s))
    return Mark(begin, max(begin, end), incident.id, f"{incident.id} {title(incident)}")


def _details(report: Report, whole: Sequence[Told], price: Price, excerpts: Mapping[str, str], beside: bool) -> str:
    if not whole:
        return ""
    rest = len(report.incidents) - len(whole)
    note = f" The other {rest:,} have their line above; `everstep explain ID` tells each whole." if rest else ""
    shown = "".join(details(told, report.submitted_wall_s, price, excerpts, beside) for told in whole)
    return f"<h2>Each incident</h2>{f'<p class=note>{escape(note)}</p>' if note else ''}{shown}"


def _dearest(incidents: Sequence[Told], count: int) -> list[Told]:
    """Failures before what was planned, the dearest and newest of many, in their order."""
    ranked = sorted(incidents, key=lambda told: (told.planned, -told.accelerator_hours, -told.facts.opened_s))
    kept = {told.id for told in ranked[:count]}
    return [told for told in incidents if told.id in kept]


def _state(report: Report, view: View) -> str:
    """Saves, nodes, epochs and alerts: for whoever looks further."""
    parts: list[tuple[str, tuple[str, ...]]] = []
    saved = f"newest on disk: step {report.saved_step:,}" if report.saved_step >= 0 else "none is on disk"
    saves = unsaved(view) or f"{plural(report.saves, 'durable save')}; {saved}"
    parts.append(("Saves", (escape(saves),)))
    if view.memory_steps:
        kept = ", ".join(f"{role}: step {step:,}" for role, step in sorted(view.memory_steps.items())[:16])
        parts.append(("Kept in memory", (escape(kept),)))
    if view.nodes:
        parts.append(("Nodes", tuple(escape(line) for line in _nodes(view))))
    if used := tuple(lines(view.usage)):
        parts.append(("Load", tuple(escape(line) for line in used)))
    parts.append(("Restarts of the workers", (f"{view.restarts:,}; the controller's life is number {view.term:,}",)))
    if report.alerts:
        parts.append(("Alerts", tuple(escape(alert) for alert in report.alerts[-16:])))
    return f"<h2>The rest</h2>{html.facts(parts)}{_epochs(view)}"


def _nodes(view: View) -> list[str]:
    lines = []
    for node in view.nodes[:16]:
        how = f" ({node.how})" if node.how else ""
        guilt = f", began {plural(node.incidents, 'incident')}" if node.incidents else ""
        lines.append(f"{node.name}: {node.state.value}{how}, {plural(node.slots, 'worker')}{guilt}")
    return [*lines, f"and {len(view.nodes) - 16} more"] if len(view.nodes) > 16 else lines


def _epochs(view: View) -> str:
    if not view.epochs:
        return ""
    columns = [
        Column("Epoch"),
        Column("Formed after", True),
        Column("Members", True),
        Column("Who changed"),
        Column("Why"),
    ]
    rows = []
    for epoch in view.epochs[-32:]:
        came = f"came: {', '.join(epoch.came)}" if epoch.came else ""
        left = f"left: {', '.join(epoch.left)}" if epoch.left else ""
        who = escape("; ".join(filter(None, [came, left])) or "nobody")
        rows.append([str(epoch.epoch), duration(epoch.formed_s), str(epoch.members), who, escape(epoch.why)])
    table = html.table("Who trained together, the newest last.", columns, rows)
    return f"<details><summary>Epochs ({len(view.epochs)})</summary>{table}</details>\n"


def _foot(report: Report, view: View) -> str:
    text = (
        f"A fold over {view.entries:,} entries of the job's journal, which has all of it: `everstep explain ID`, "
        "`everstep dashboard RUN`. The same as data: report.json. ETTR: the share of the wall time that made new steps."
    )
    return f'<p class="note small">{escape(text)}</p>\n'

"""One incident on the report's page: in words, phase by phase, with what it rests on and what else was weighed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from everstep.core.decisions import Alternative
from everstep.observe import html
from everstep.observe.explain import PHASES, explain, feasible
from everstep.observe.html import Column
from everstep.observe.report import Told
from everstep.observe.text import duration
from everstep.observe.units import Price, accelerator_time, percent
from everstep.observe.view import Bucket, IncidentView, Moment

PHASE_COLOURS = {
    "detect": html.colour(Bucket.DETECTION.value),
    "stop": html.colour(Bucket.WAITING.value),
    "form": html.colour(Bucket.START.value),
    "first-step": html.colour(Bucket.RECOVERY.value),
    "recover": html.colour(Bucket.RECOVERY.value),
}
ELSEWHERE = ("How long", "Look at")  # parts that are shown in another form
MOST_MOMENTS = 40  # of a time line; `everstep explain` has the others


def details(told: Told, began_wall_s: float, price: Price, excerpts: Mapping[str, str], beside: bool) -> str:
    """`beside`: links to the files of the run folder work."""
    incident = told.facts
    parts = [part for part in explain(incident, began_wall_s, price) if part.question not in ELSEWHERE]
    shown = [
        f'<h3 id="{escape(told.id)}">{escape(told.id)}: {escape(told.title)}</h3>',
        html.facts((escape(part.question), [escape(line) for line in part.lines]) for part in parts),
        _phases(incident),
        _weighed(incident.alternatives),
        _timeline(incident.timeline, incident),
        _files(incident.files, excerpts, beside),
    ]
    return f'<article class="incident" aria-labelledby="{escape(told.id)}">{"".join(shown)}</article>\n'


def _phases(incident: IncidentView) -> str:
    """How long training stood still, phase by phase."""
    phases = {name: took for name, took in incident.phases.items() if took >= 0}
    if not phases or incident.downtime_s < 0:
        return ""
    total = sum(phases.values()) or 1.0
    parts = [(name, took, PHASE_COLOURS.get(name, "var(--soft)")) for name, took in phases.items()]
    words = ", ".join(f"{name} {duration(took)}" for name, took in phases.items())
    rows = [
        [
            f'<span class="key" style="background:{shade}"></span>{escape(name)}',
            duration(took),
            percent(took / total),
            escape(PHASES.get(name, "")),
        ]
        for name, took, shade in parts
    ]
    columns = [Column("Phase"), Column("Took", True), Column("Share", True), Column("That is", wide=True)]
    redone = f" {incident.redone_steps:,} steps had to be made again." if incident.redone_steps else ""
    caption = escape(f"Training stood still for {duration(incident.downtime_s)}.{redone}")
    return html.bar(parts, words, thin=True) + html.table(caption, columns, rows)


def _weighed(alternatives: Sequence[Alternative]) -> str:
    if not alternatives:
        return ""
    rows = [
        [
            escape(alternative.action.value),
            accelerator_time(alternative.loss_s) if alternative.feasible else "not possible",
            escape(alternative.why),
        ]
        for alternative in alternatives
    ]
    columns = [Column("Instead"), Column("Would have cost", True), Column("Why", wide=True)]
    summary = f"What else was weighed ({len(feasible(alternatives))} possible)"
    table = html.table("Expected losses at the time of the decision.", columns, rows)
    return f"<details><summary>{summary}</summary>{table}</details>\n"


def _timeline(moments: Sequence[Moment], incident: IncidentView) -> str:
    if not moments:
        return ""
    begin = moments[0].at_s
    rows = [
        [f"+{duration(max(0.0, moment.at_s - begin))}", escape(moment.phase), escape(moment.text)]
        for moment in moments[:MOST_MOMENTS]
    ]
    columns = [Column("After", True), Column("Phase"), Column("What", wide=True)]
    caption = escape(f"From the first sign, {duration(begin)} after the job's start.")
    more = (
        f"; {len(moments) - MOST_MOMENTS} more: everstep explain {incident.id}" if len(moments) > MOST_MOMENTS else ""
    )
    return (
        f"<details><summary>Time line ({len(moments)}{more})</summary>{html.table(caption, columns, rows)}</details>\n"
    )


def _files(files: Sequence[str], excerpts: Mapping[str, str], beside: bool) -> str:
    if not files:
        return ""
    names = [f'<a href="{escape(name)}">{escape(name)}</a>' if beside else escape(name) for name in files[:24]]
    more = f", and {len(files) - 24} more" if len(files) > 24 else ""
    texts = "".join(
        f"<details><summary>Last lines of {escape(name)}</summary><pre>{escape(excerpts[name])}</pre></details>"
        for name in files
        if excerpts.get(name)
    )
    return f"<p>Files in the run folder: {', '.join(names)}{more}</p>{texts}\n"

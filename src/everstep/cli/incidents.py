"""`everstep incidents [RUN]`: what happened to a job, a line each; `everstep explain ID`: one of them, whole.

Run: everstep incidents
     everstep explain I001
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from everstep.cli.asking import LATEST
from everstep.cli.fold import folded
from everstep.cli.viewing import incident_of, price_of, view_of
from everstep.observe.explain import Part, cost_s, explain, state, still
from everstep.observe.text import duration, who
from everstep.observe.units import Price, plural, short_time
from everstep.observe.view import IncidentView, View

Flag = Annotated[bool, Parameter(negative=())]
HEADER = ("id", "after", "kind", "who", "stood still", "cost", "ended", "why")


def incidents(run: Path = LATEST, *, json: Flag = False) -> int:
    """List what happened to a job: when, to whom, how long training stood still, and what it cost.

    Args:
        run: its run folder or a journal (default: the newest run below ./everstep_runs).
        json: print them as JSON.
    """
    view = view_of(run)
    if json:
        return _json(view.incidents)
    print(folded(listing(view), 8))
    return 0


def explain_command(
    id: str, *, run: Path = LATEST, price: float | None = None, currency: str | None = None, json: Flag = False
) -> int:
    """Tell all that is known of one incident: what, who, why, what was done, what it cost, and what to do.

    Args:
        id: as `everstep incidents` lists it.
        run: the job's run folder or a journal (default: the newest run below ./everstep_runs).
        price: of an accelerator for an hour; then the cost is told in money too.
        currency: of the price.
        json: print it as JSON.
    """
    view = view_of(run)
    incident = incident_of(run, view, id)
    if json:
        return _json(incident)
    print(folded(told(incident, view, price_of(run, price, currency)), 4))
    return 0


def _json(value: object) -> int:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")
    return 0


def listing(view: View) -> str:
    """A table, and what is not in it."""
    if not view.incidents:
        return f"job {view.job or 'not started'}: no incident in {duration(view.now_s)}"
    rows = [HEADER, *map(_row, view.incidents)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    missing = view.num_incidents - len(view.incidents)
    lines += [f"and {missing:,} before these: `everstep explain ID` tells them too"] if missing else []
    lines.append(f"{plural(view.num_incidents, 'incident')}, {duration(view.downtime_s)} without a step in all")
    return "\n".join(lines)


def _row(incident: IncidentView) -> tuple[str, ...]:
    spent = cost_s(incident)
    return (
        incident.id,
        duration(incident.opened_s),
        incident.kind,
        who(incident.culprits) if incident.culprits else "-",
        still(incident),
        short_time(spent) if spent else "-",
        state(incident),
        incident.why,
    )


def told(incident: IncidentView, view: View, price: Price) -> str:
    """Its parts, then its time line."""
    lines = [f"{incident.id}  {incident.kind}  {state(incident)}"]
    for part in explain(incident, view.submitted_wall_s, price):
        lines += ["", *_part(part)]
    if incident.timeline:
        begin = incident.timeline[0].at_s
        lines += ["", "Time line"]
        lines += [f"    +{duration(max(0.0, m.at_s - begin)):<9} {m.phase:<8} {m.text}" for m in incident.timeline]
    return "\n".join(lines)


def _part(part: Part) -> list[str]:
    return [part.question, *(f"    {line}" for line in part.lines)]

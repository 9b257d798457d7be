"""An incident as a trace: its whole span, one span below it for each phase, and its time line as events.

Plain data, without a package for tracing. Ids follow from the job and the incident: whoever makes the trace of the same
incident again, on another machine or after a restart, makes the same one, and a store of traces keeps it once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from everstep.observe.text import who
from everstep.observe.view import IncidentView, View

Attribute = str | int | float | bool
WANTED = ("drain", "stop", "grow")  # kinds of incidents that somebody asked for: no errors
MAX_TEXT = 1000  # characters of an attribute


class Happened(NamedTuple):
    """An event of a span. `at_ns`: since 1970."""

    name: str
    at_ns: int
    attributes: dict[str, Attribute]


class Span(NamedTuple):
    """Times in ns since 1970. `parent_id` 0: the root of its trace. `error`: what went wrong, empty if nothing did."""

    trace_id: int  # 128 bits
    span_id: int  # 64 bits
    parent_id: int
    name: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Attribute]
    events: tuple[Happened, ...] = ()
    error: str = ""


def spans(view: View, incident: IncidentView) -> list[Span]:
    """Of an incident that is over; the root comes first."""
    assert incident.outcome
    key = f"{view.job} {view.submitted_wall_s!r} {incident.id}"
    trace_id, root_id = _number(key, 16), _number(f"{key} root", 8)
    phases = _phases(incident)
    begin_s, end_s = _reach(incident, phases)
    root = Span(
        trace_id, root_id, 0, f"incident: {incident.kind}", _ns(view, begin_s), _ns(view, end_s),
        _attributes(view, incident), tuple(_events(view, incident)), "" if incident.kind in WANTED else incident.why,
    )  # fmt: skip
    about: dict[str, Attribute] = {"everstep.job": view.job, "everstep.incident": incident.id}
    below = [
        Span(trace_id, _number(f"{key} phase {name}", 8), root_id, name, _ns(view, since_s), _ns(view, until_s), about)
        for name, since_s, until_s in phases
    ]
    return [root, *below]


def _phases(incident: IncidentView) -> list[tuple[str, float, float]]:
    """Name, begin and end: detection ends when the incident is opened, the others follow one another from then on."""
    found, at_s = [], incident.opened_s
    for name, took_s in incident.phases.items():
        if name == "detect":
            found.append((name, max(0.0, at_s - took_s), at_s))
        else:
            found.append((name, at_s, at_s := at_s + max(0.0, took_s)))
    return found


def _reach(incident: IncidentView, phases: list[tuple[str, float, float]]) -> tuple[float, float]:
    """From the first sign, or the last step before, to the first new step, or the end of it all."""
    begin_s = min([incident.opened_s, *(since_s for _, since_s, _ in phases)])
    if incident.first_sign_s >= 0:
        begin_s = min(begin_s, incident.first_sign_s)
    last_s = max([begin_s, *(until_s for _, _, until_s in phases)])
    return begin_s, last_s if "first-step" in incident.phases else max(last_s, incident.closed_s)


def _number(key: str, num_bytes: int) -> int:
    """As good as unique, and never 0, which means "none"."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:num_bytes], "big") or 1


def _ns(view: View, at_s: float) -> int:
    return round((view.submitted_wall_s + at_s) * 1e9)


def _attributes(view: View, incident: IncidentView) -> dict[str, Attribute]:
    """What is known of it; what is unknown is left out."""
    cause = incident.cause
    texts = {
        "job": view.job,
        "incident": incident.id,
        "kind": incident.kind,
        "why": incident.why,
        "outcome": incident.outcome,
        "culprits": who(incident.culprits) if incident.culprits else "",
        "cause": cause.culprits[0].cause if cause is not None and cause.culprits else "",
        "answer": incident.answer,
        "answer_why": incident.answer_why,
    }
    numbers: dict[str, float] = {
        "epoch": incident.epoch,
        "step": incident.step,
        "redone_steps": incident.redone_steps,
        "downtime_seconds": incident.downtime_s,
        "expected_loss_accelerator_seconds": incident.answer_loss_s,
    }
    numbers |= {f"lost_accelerator_seconds.{bucket}": lost for bucket, lost in incident.cost.items()}
    found: dict[str, Attribute] = {name: text[:MAX_TEXT] for name, text in texts.items() if text}
    found |= {name: value for name, value in numbers.items() if value >= 0}
    return {f"everstep.{name}": value for name, value in found.items()}


def _events(view: View, incident: IncidentView) -> Iterator[Happened]:
    for moment in incident.timeline:
        yield Happened(moment.phase, _ns(view, moment.at_s), {"everstep.text": moment.text[:MAX_TEXT]})

"""What a job amounts to, as an answer to whoever sees it first: report.json, and what report.html is written from.

Did it finish; what failed, when, why, who; how long training stood still; what it cost; what to do. It is made from
a `View`, so it is as large as that at most, however long the journal is. `VERSION` changes when a field changes its
meaning or goes; new ones may come at any time.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping

import msgspec

from everstep.observe.explain import (
    FOLLOWING,
    answer,
    cost_s,
    failure,
    is_failure,
    planned,
    state,
    still,
    title,
    title_of,
    what,
    when,
)
from everstep.observe.text import advise, duration, who
from everstep.observe.todo import ToDo, to_do
from everstep.observe.units import HOUR_S, Price, accelerator_time, money, percent, plural
from everstep.observe.unsaved import unsaved
from everstep.observe.view import Bucket, IncidentView, Usage, View

VERSION = 1

# docs/goodput.md has the whole of it.
MEANINGS = {
    Bucket.PRODUCTIVE: "steps that stayed",
    Bucket.DETECTION: "from a fault until it was noticed",
    Bucket.RECOVERY: "from there until steps were made again, and until an empty place was filled",
    Bucket.REDONE: "steps that were made again, and the one that was under way at a fault",
    Bucket.STALL: "training stood still for a save",
    Bucket.START: "before the first step, after the last one, and a newcomer's way to its first",
    Bucket.WAITING: "accelerators that the job wanted and had not, or had and could not use without others",
    Bucket.STANDBY: "spares that waited for work",
    Bucket.STRAGGLER: "all waited for a slow worker",
    Bucket.REDUNDANCY: "the same work on two workers, on purpose",
}


# Causes that go by a word of the runtime; those of logs and of simulated parts speak for themselves.
CAUSES = {
    "drain": "somebody was asked to leave",
    "error": "an exception in the script",
    "exit-code": "the script ended with an error",
    "grow": "new workers were taken in",
    "hang": "a worker made no progress",
    "corrupt": "wrong bits in a worker's state",
    "left-early": "a worker left the loop before the others",
    "out-of-memory": "the kernel killed a worker for memory",
    "signal": "a worker was killed by a signal",
    "stop": "the job was asked to stop",
    "stopped": "a worker was stopped (SIGSTOP, a debugger)",
    "unfinished": "the process ended before its script had",
} | {bucket.value: f"no incident: {meaning}" for bucket, meaning in MEANINGS.items()}


class Spent(msgspec.Struct, frozen=True):
    """Accelerators' time by bucket or cause. `share`: of all. `money`: None without a price."""

    name: str
    accelerator_hours: float
    share: float
    money: float | None = None
    meaning: str = ""


class Told(msgspec.Struct, frozen=True):
    """An incident in words, and what it cost; `facts` has all that is known of it."""

    id: str
    title: str
    planned: bool
    when: str
    who: str
    why: str
    stood_still: str
    state: str
    accelerator_hours: float
    money: float | None
    advice: str
    facts: IncidentView


class Report(msgspec.Struct, frozen=True):
    """`verdict`: finished, failed, stopped, or unfinished (it runs, or nobody wrote down how it ended)."""

    version: int
    job: str
    script: str
    simulated: bool
    verdict: str
    headline: str
    story: tuple[str, ...]
    exit_code: int | None
    why: str
    submitted_wall_s: float
    wall_s: float
    accelerators: int
    accelerator_hours: float
    price_per_hour: float
    currency: str
    ettr: float
    downtime_s: float
    step: int
    goal: int
    steps: int
    redone_steps: int
    step_s: float
    metrics: dict[str, float | None]
    buckets: tuple[Spent, ...]
    causes: tuple[Spent, ...]
    num_incidents: int
    num_failures: int
    incidents_accelerator_hours: float  # what all cost, also those that are not told
    incidents: tuple[Told, ...]
    to_do: tuple[ToDo, ...]
    by_kind: dict[str, int]
    saves: int
    saved_step: int
    alerts: tuple[str, ...]
    usage: Usage  # of machines


def make(view: View, price: Price = Price()) -> Report:  # noqa: B008 - frozen
    total = sum(view.buckets.values())
    return Report(
        VERSION, view.job, view.script, view.simulated, verdict(view), headline(view), tuple(story(view, price)),
        view.exit_code, view.why, view.submitted_wall_s, view.now_s, accelerators(view), total / HOUR_S,
        price.per_hour, price.currency, view.ettr, view.downtime_s, view.step, view.goal, view.steps,
        view.redone_steps, view.step_s, {name: _number(value) for name, value in view.metrics.items()},
        tuple(_spent(b.value, view.buckets.get(b.value, 0.0), total, price, MEANINGS[b]) for b in Bucket),
        tuple(_spent(name, s, total, price, CAUSES.get(name, "")) for name, s in _dearest(view.costs)),
        view.num_incidents, sum(failures_by_kind(view).values()), charged(view) / HOUR_S,
        tuple(_told(incident, view, price) for incident in view.incidents), tuple(to_do(view)), dict(view.by_kind),
        view.num_saves, view.saved_step, tuple(f"{a.kind}: {a.text} ({duration(a.at_s)})" for a in view.alerts),
        view.usage,
    )  # fmt: skip


def encode(report: Report) -> bytes:
    """report.json, readable."""
    return msgspec.json.format(msgspec.json.encode(report)) + b"\n"


def verdict(view: View) -> str:
    if view.exit_code is None:
        return "unfinished"
    if view.exit_code > 128:
        return "stopped"
    return "failed" if view.exit_code else "finished"


def headline(view: View) -> str:
    """How it ended, in a sentence."""
    job = "The simulated job" if view.simulated else "The job"
    after = f"after {duration(view.now_s)} at {_reached(view)}"
    match verdict(view):
        case "finished":
            return f"{job} finished after {duration(view.now_s)}: {_reached(view)}."
        case "failed":
            return f"{job} failed {after}: {view.why} (exit code {view.exit_code})."
        case "stopped":
            return f"{job} was stopped by {_signal(view)} {after}: {view.why}."
    return f"{job} has not ended, as far as this record goes: {duration(view.now_s)}, {_reached(view)}, {view.stage}."


def _signal(view: View) -> str:
    number = (view.exit_code or 0) - 128
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _reached(view: View) -> str:
    if view.step < 0:
        return "no step was made"
    return f"step {view.step:,} of {view.goal:,}" if view.goal else f"step {view.step:,}"


def story(view: View, price: Price) -> list[str]:
    """What a person wants to know next: what failed and why, how long it took, what it cost."""
    lost = unsaved(view)
    return [*([f"{lost[0].upper()}{lost[1:]}."] if lost else []), *_failed(view), *_aside(view), *_cost(view, price)]


def failures_by_kind(view: View) -> dict[str, int]:
    """Of all, also of those that are not kept; the most frequent first."""
    found = {kind: count for kind, count in view.by_kind.items() if is_failure(kind)}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _failed(view: View) -> list[str]:
    kinds, kept = failures_by_kind(view), [incident for incident in view.incidents if failure(incident)]
    count = sum(kinds.values())
    if not count:
        return ["Nothing failed."]
    if count <= 5 and count == len(kept):
        return [_one(incident, view) for incident in kept]
    counted = ", ".join(f"{title_of(kind)} ({number:,})" for kind, number in kinds.items())
    missing = view.num_incidents - len(view.incidents)
    older = f" The {missing:,} oldest incidents are counted, and not told here." if missing else ""
    lasted = f"Training stood still for {duration(view.downtime_s)} in all."
    of = "of the newest" if missing else "one"
    worst = [f"The dearest {of}: {_one(max(kept, key=cost_s), view)}"] if kept else []
    return [f"{plural(count, 'failure')}: {counted}. {lasted}{older}", *worst]


def _aside(view: View) -> list[str]:
    """What training went on through."""
    kinds: dict[str, list[str]] = {}
    for incident in view.incidents:
        if not planned(incident) and not failure(incident):
            kinds.setdefault(title(incident), []).append(incident.id)
    said = [f"{name} ({', '.join(ids[:4])}{' ...' if ids[4:] else ''})" for name, ids in kinds.items()]
    return [f"Training went on through this: {'; '.join(said)}."] if said else []


def _one(incident: IncidentView, view: View) -> str:
    made = f" Answer: {answer(incident)}." if incident.answer else ""
    after = f" {_lasted(incident, view)}." if incident.kind not in FOLLOWING or incident.downtime_s >= 0 else ""
    return f"{incident.id}, {duration(incident.opened_s)} after the start: {what(incident).rstrip('.')}.{made}{after}"


def _lasted(incident: IncidentView, view: View) -> str:
    if incident.downtime_s >= 0:
        none_lost = not view.redone_steps and not any(each.redone_steps for each in view.incidents)
        redone = ", and no finished step was lost" if incident.outcome == "recovered" and none_lost else ""
        if incident.redone_steps:
            redone = f", and {plural(incident.redone_steps, 'step')} had to be made again"
        return f"Training stood still for {duration(incident.downtime_s)}{redone}"
    if incident.outcome.startswith("job ended"):
        return "Training did not go on" if view.exit_code else "No step was seen after it"
    return "How long training stood still is not known" if incident.outcome else "It is still open"


def charged(view: View) -> float:
    """Accelerator-seconds that incidents cost, also those that are not kept: what else was lost goes by its bucket."""
    return sum(spent for cause, spent in view.costs.items() if cause not in set(Bucket))


def _cost(view: View, price: Price) -> list[str]:
    total = sum(view.buckets.values())
    if not total:
        return []
    asked = sum(cost_s(incident) for incident in view.incidents if planned(incident))
    lost = max(0.0, charged(view) - asked)
    useful = view.buckets.get(Bucket.PRODUCTIVE.value, 0.0) / total
    losses = {b: view.buckets.get(b.value, 0.0) for b in Bucket if b is not Bucket.PRODUCTIVE}
    worst = max(losses, key=lambda b: losses[b])
    most = f"; the largest loss was {worst.value}, {percent(losses[worst] / total)}" if losses[worst] else ""
    lines = [f"{percent(useful)} of the accelerators' time went into steps that stayed{most}."]
    for spent, name in ((lost, "What went wrong"), (asked, "What was asked for (stops, drains, newcomers)")):
        if spent:
            paid = money(price, spent)
            lines.append(
                f"{name} cost {accelerator_time(spent)}{f' ({paid})' if paid else ''}: {percent(spent / total)}."
            )
    return lines


def accelerators(view: View) -> int:
    """That the job had last, or all of its workers."""
    return view.fleet.total or len(view.workers.nodes)


def _dearest(costs: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(costs.items(), key=lambda item: -item[1])


def _spent(name: str, seconds: float, total: float, price: Price, meaning: str = "") -> Spent:
    paid = price.of(seconds) if price.per_hour else None
    return Spent(name, seconds / HOUR_S, seconds / total if total else 0.0, paid, meaning)


def _told(incident: IncidentView, view: View, price: Price) -> Told:
    seconds = cost_s(incident)
    return Told(
        incident.id, title(incident), planned(incident), when(incident, view.submitted_wall_s),
        who(incident.culprits), incident.why, still(incident), state(incident), seconds / HOUR_S,
        price.of(seconds) if price.per_hour else None, advise(incident), incident,
    )  # fmt: skip


def _number(value: float) -> float | None:
    """What JSON can say."""
    return value if math.isfinite(value) else None

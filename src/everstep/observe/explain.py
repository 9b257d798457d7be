"""One incident in words that a person on call can act on: `everstep explain`, and the report's page about it.

Each part is a question with its answer in lines. A part without an answer is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from everstep.core.decisions import Action, Alternative
from everstep.core.events import WATCHED
from everstep.core.types import Verdict
from everstep.observe.text import advise, duration, who
from everstep.observe.units import Price, accelerator_time, moment, money, plural, unit_for
from everstep.observe.view import IncidentView

# Nobody's mistake: somebody wanted it so. And what nobody stops for.
PLANNED = ("stop", "drain", "grow")
ASIDE = (*WATCHED, "save-failed")
FOLLOWING = ("rolled-back", "step-fell-back")  # part of what came before: that tells how long training stood still

TITLES = {
    "anomaly": "A metric left its usual range",
    "corrupt": "A worker had wrong bits in its state",
    "crash": "A worker died",
    "drain": "Somebody was asked to leave",
    "exception": "A step raised an error",
    "grow": "New workers were taken in",
    "hang": "A worker hung",
    "incomplete": "The script ended before its work was done",
    "left-early": "A worker left the loop before the others",
    "node-lost": "A node was lost",
    "rolled-back": "All went back to a kept state",
    "save-failed": "A save to disk failed",
    "slow": "A worker was slow",
    "step-fell-back": "The job began again from its start",
    "stop": "The job was asked to stop",
}

# What was done, in a sentence.
ANSWERS = {
    Action.LEAVE: "nothing was done",
    Action.RETRY: "the step was made again",
    Action.REROUTE: "the others took its micro-batches over",
    Action.TAKE_OVER: "a neighbour computed its stage too",
    Action.PROMOTE: "a standby took its place",
    Action.SHRINK: "the others went on without it",
    Action.GROW: "whoever came filled a free place",
    Action.RESPAWN: "the others waited for a new process in its place",
    Action.REPARTITION: "the layers were dealt anew over those who were left",
    Action.ROLL_BACK: "all went back to the newest kept state",
    Action.RESTART: "all workers were started again",
    Action.EVICT: "a spare node took the place of its node",
    Action.RESCHEDULE: "the job waited for a node in place of the lost one",
    Action.STOP: "the job was stopped",
}

PHASES = {
    "detect": "from the last step until it was noticed",
    "stop": "until all workers had stopped",
    "form": "until the new epoch was formed",
    "first-step": "until the first new step was made",
    "recover": "until training went on",
}

ROLES = {
    "names": "names the culprit",
    "tells": "saw it, and names nobody",
    "disagrees": "names somebody else",
    "unknown": "cannot tell",
}


class Part(NamedTuple):
    question: str
    lines: tuple[str, ...]


def title(incident: IncidentView) -> str:
    return title_of(incident.kind)


def title_of(kind: str) -> str:
    return TITLES.get(kind, kind.replace("-", " ").capitalize())


def what(incident: IncidentView) -> str:
    """What happened and to whom, in one sentence without its end."""
    if incident.why and (_named(incident) or not incident.culprits):
        return incident.why
    return f"{title(incident)}, {whom(incident)}"


def whom(incident: IncidentView) -> str:
    """Who and why, for whoever knows what happened."""
    if incident.why and (_named(incident) or not incident.culprits):
        return incident.why
    return f"{who(incident.culprits)}{f': {incident.why}' if incident.why else ''}"


def _named(incident: IncidentView) -> bool:
    """The sentence itself says who."""
    return any(f"rank {b.rank} " in incident.why or (b.node and b.node in incident.why) for b in incident.culprits)


def planned(incident: IncidentView) -> bool:
    return incident.kind in PLANNED


def failure(incident: IncidentView) -> bool:
    """Something went wrong, and training stopped for it."""
    return is_failure(incident.kind)


def is_failure(kind: str) -> bool:
    return kind not in PLANNED and kind not in ASIDE


def state(incident: IncidentView) -> str:
    """In a word or two, how it ended."""
    if not incident.outcome:
        return "still open"
    return incident.outcome.partition(":")[0]


def cost_s(incident: IncidentView) -> float:
    """Accelerator-seconds it is charged with."""
    return sum(incident.cost.values())


def explain(incident: IncidentView, began_wall_s: float = 0.0, price: Price = Price()) -> list[Part]:  # noqa: B008
    """All that is known of it. `began_wall_s`: when the job was submitted, since 1970; 0: not known."""
    parts = [
        Part("What happened", (f"{title(incident)}: {whom(incident)}",)),
        Part("When", (when(incident, began_wall_s),)),
        Part("Who", _who(incident)),
        Part("Why we think so", _reasons(incident)),
        Part("What was done", done(incident)),
        Part("How long", how_long(incident)),
        Part("What it cost", (cost(incident, price),)),
        Part("What to do", tuple(filter(None, [advise(incident)]))),
        Part("Look at", incident.files),
    ]
    return [part for part in parts if part.lines]


def when(incident: IncidentView, began_wall_s: float) -> str:
    text = f"{duration(incident.opened_s)} after the start"
    clock = moment(began_wall_s + incident.opened_s) if began_wall_s else ""
    text += f", {clock}" if clock else ""
    text += f", after step {incident.step}" if incident.step >= 0 else ""
    return f"{text}, in epoch {incident.epoch}"


def _who(incident: IncidentView) -> tuple[str, ...]:
    lines = []
    for blame in incident.culprits[:8]:
        detail = f", {blame.detail}" if blame.detail and blame.detail not in incident.why else ""
        lines.append(f"{who([blame])}: {blame.cause}{detail}")
    if len(incident.culprits) > 8:
        lines.append(f"and {len(incident.culprits) - 8} more")
    if incident.collateral:
        lines.append(f"as a consequence also {who(incident.collateral)}")
    return tuple(lines)


def _reasons(incident: IncidentView) -> tuple[str, ...]:
    lines = [_verdict(incident.cause)] if incident.cause is not None else []
    for role, verdict in incident.evidence:
        lines.append(f"{verdict.kind} {ROLES.get(role, role)} ({percent_sure(verdict)}): {verdict.why}")
    return tuple(lines)


def _verdict(verdict: Verdict) -> str:
    source = "its log" if verdict.kind == "log" else f"taken together: {verdict.kind}"
    return f"{source} ({percent_sure(verdict)}): {verdict.why}"


def percent_sure(verdict: Verdict) -> str:
    return f"{verdict.confidence:.0%} sure"


def done(incident: IncidentView) -> tuple[str, ...]:
    """What was decided, and how it ended; the rest of what was weighed is `weighed`."""
    lines = []
    if incident.answer:
        expected = f", {accelerator_time(incident.answer_loss_s)} expected" if incident.answer_loss_s >= 0 else ""
        lines += [f"{answer(incident)} ({incident.answer}): {incident.answer_why}{expected}"]
        lines += [f"instead of {text}" for text in map(_alternative, feasible(incident.alternatives)[:3])]
    lines.append(f"outcome: {incident.outcome or 'it is still open'}")
    return tuple(lines)


def answer(incident: IncidentView) -> str:
    """What was decided, in words; empty when nothing was."""
    return next((words for action, words in ANSWERS.items() if action.value == incident.answer), incident.answer)


def feasible(alternatives: Sequence[Alternative]) -> list[Alternative]:
    return [alternative for alternative in alternatives if alternative.feasible]


def _alternative(alternative: Alternative) -> str:
    return f"{alternative.action.value}: {alternative.why}, {accelerator_time(alternative.loss_s)} expected"


def still(incident: IncidentView) -> str:
    """How long training stood still, in a few words."""
    if incident.downtime_s >= 0:
        return duration(incident.downtime_s)
    if incident.kind in ASIDE:
        return "it went on"
    if incident.kind in FOLLOWING:
        return "as before it"
    if incident.outcome.startswith("job ended"):
        return "to the end"
    return "not known" if incident.outcome else "until now"


def how_long(incident: IncidentView) -> tuple[str, ...]:
    lines = []
    if incident.downtime_s >= 0:
        lines.append(f"training stood still for {duration(incident.downtime_s)}")
    elif incident.kind in ASIDE:
        lines.append("training went on meanwhile")
    elif not incident.outcome:
        lines.append("training has not gone on since, as far as this record goes")
    elif incident.outcome.startswith("job ended"):
        lines.append("training did not go on")
    lines += [f"{duration(took)} {PHASES.get(name, name)} ({name})" for name, took in incident.phases.items()]
    if incident.redone_steps:
        lines.append(f"{plural(incident.redone_steps, 'step')} had to be made again")
    if incident.closed_s >= 0:
        lines.append(f"over {duration(max(0.0, incident.closed_s - incident.opened_s))} after it was noticed")
    return tuple(lines)


def cost(incident: IncidentView, price: Price) -> str:
    total = cost_s(incident)
    if not total:
        return "nothing that is charged to it"
    unit, paid = unit_for(total), money(price, total)
    parts = [f"{name} {unit(spent)}" for name, spent in _spent(incident) if spent > 0]
    whole = f"{unit(total)} {unit.name}{f', {paid}' if paid else ''}"
    return f"{whole} ({'; '.join(parts)})" if len(parts) > 1 else f"{whole}, {parts[0].rpartition(' ')[0]}"


def _spent(incident: IncidentView) -> list[tuple[str, float]]:
    return sorted(incident.cost.items(), key=lambda item: -item[1])

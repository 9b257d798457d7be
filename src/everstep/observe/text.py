"""A `Summary` as plain text: what the end of a run prints, and sentences a person on call can act on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from everstep.core.types import Blame, Verdict
from everstep.observe.summary import IncidentSummary, Summary
from everstep.observe.view import IncidentView

AnyIncident = IncidentSummary | IncidentView
RULE_WIDTH = 78

# What to do next, by an incident's first culprit's cause or by its kind; the first that fits is printed.
ADVICE = {
    "out-of-memory": "Give the node more memory, or let the job use less: fewer loader workers, a smaller batch.",
    "signal": "Neither Everstep nor the kernel sent it. Look for who sends signals on {node}: scheduler, "
    "administrator, a guard of memory such as systemd-oomd, a script.",
    "stopped": "Somebody or something on {node} sent SIGSTOP, or a debugger is attached.",
    "left-early": "Look whether rank {rank} gets less data than the others, or returns on a condition of its own.",
    "unfinished": "The script, or a library, calls os._exit. Let it end by returning or by sys.exit.",
    "error": "The traceback is in {evidence}.",
    "exception": "The traceback is in the log of rank {rank} on {node}.",
    "not-started": "Nothing of the script ran: mend what is named above on {node}.",
    "exit-code": "The last lines of its log are in {evidence}.",
    "hang": "Read where it hangs in {evidence}.",
    "slow": "Where it spends its time: {evidence}. Look at {node}: other programs, clocks, temperature, disk.",
    "anomaly": "Look at the metrics around that step, and at what data it read; go back to a save if they stay.",
    "node-lost": "Check {node}: power, network, kernel log. It may join again by itself.",
    "incomplete": "The script returned before its work was done: look at its last log lines.",
    "step-fell-back": "Let the script load its newest checkpoint when it starts.",
    "rolled-back": "More standbys, replicas or saves make the steps between fewer.",
    "corrupt": "Test memory and processors of {node}, and leave it out if it happens there again.",
    "save-failed": "Check free space and permissions where the checkpoints go.",
}

# The same by what its log says (detect.signatures.Cause), where that asks for something else; it comes first.
ADVICE_BY_CLASS = {
    "device-memory": "Take {node} out of the job: the memory of its device is faulty. Reset or replace the device.",
    "device-lost": "Take {node} out of the job: a device does not answer. It needs a reboot, or a repair.",
    "device-link": "Take {node} out of the job: the link between its devices is faulty.",
    "device-out-of-memory": "Let a worker use less device memory: a smaller micro-batch, activation checkpointing.",
    "disk": "Check the disk of {node}: its kernel log tells which one.",
    "disk-space": "Free space, or write elsewhere: the line above says where.",
    "driver": "Make driver and libraries of {node} fit: a reboot after an update often does.",
    "host-fault": "Take {node} out of the job: its kernel or processor reported a fault.",
    "host-limits": "Raise the limit on {node} that the line above names (ulimit -n, ulimit -u, the cgroup's pids).",
    "mount": "Check the shared file system on {node}.",
    "network": "Check the network of {node}: cable, port, switch, routes.",
    "permission": "Give the job's user the right that the line above asks for.",
    "shared-memory": "Give the container more /dev/shm (docker: --shm-size).",
}


def duration(seconds: float) -> str:
    """Short text for people: 12 ms, 3.4 s, 2 min 05 s, 3 h 07 min, 30 d 4 h; "-" for a negative (unknown) one."""
    if seconds < 0:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


def who(blames: Sequence[Blame]) -> str:
    """Ranks and nodes in words: "rank 2 on node1", "node2", "ranks 0, 1 and 3"."""
    nodes = sorted({b.node for b in blames if b.rank < 0 and b.node})
    ranks = sorted((b for b in blames if b.rank >= 0), key=lambda b: b.rank)
    parts = nodes
    if len(ranks) == 1:
        parts = [*nodes, f"rank {ranks[0].rank} on {ranks[0].node}"]
    elif ranks:
        parts = [*nodes, f"ranks {_listed([str(b.rank) for b in ranks])}"]
    return _listed(parts) or "no single worker"


def _listed(items: Sequence[str]) -> str:
    if len(items) > 8:
        items = [*items[:7], f"{len(items) - 7} more"]
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)


def incident_lines(incident: IncidentSummary) -> list[str]:
    """What happened, to whom, what it cost, and what to do about it."""
    lines = [f"{incident.id}  {incident.kind} at {duration(incident.opened_s)}: {incident.why}"]
    if incident.culprits and not any(f"rank {b.rank} " in incident.why or b.rank < 0 for b in incident.culprits):
        lines.append(f"first cause: {who(incident.culprits)}")
    if incident.cause is not None:
        lines.append(_by_log(incident.why, incident.cause))
    if incident.collateral:
        lines.append(f"collateral: {who(incident.collateral)} failed as a consequence")
    if incident.answer:
        lines.append(f"decided: {incident.answer}")
    lines.append(_cost(incident))
    if incident.files:
        folder = incident.files[0].rpartition("/")[0]
        lines.append(f"evidence: {folder}/ ({len(incident.files)} file{'s' if len(incident.files) > 1 else ''})")
    advice = advise(incident)
    return [*lines, *([f"to do: {advice}"] if advice else [])]


def _by_log(why: str, cause: Verdict) -> str:
    """The class of the first cause, and the line that gave it away unless that was said already; or what several
    detectors came to together."""
    if cause.kind != "log" or not cause.culprits:
        return f"taken together: {cause.kind}, {who(cause.culprits)} ({cause.confidence:.0%} sure): {cause.why}"
    blame = cause.culprits[0]
    quoted = "" if blame.detail in why else f": {blame.detail}"
    return f"its log: {blame.cause} ({cause.confidence:.0%} sure){quoted}"


def _cost(incident: IncidentSummary) -> str:
    if not incident.outcome:
        return "still open"
    text = incident.outcome
    if incident.downtime_s >= 0:
        text += f" after {duration(incident.downtime_s)} without a step"
    if incident.phases:
        text += f" ({', '.join(f'{name} {duration(took)}' for name, took in incident.phases.items())})"
    if incident.redone_steps:
        text += f"; {incident.redone_steps} steps redone"
    return text


def template_of(incident: AnyIncident) -> str:
    """The advice for incidents of this sort, with {node}, {rank} and {evidence} still to be named; empty: none."""
    first = _first(incident)
    said = incident.cause.culprits[0].cause if incident.cause is not None and incident.cause.culprits else ""
    return ADVICE_BY_CLASS.get(said) or ADVICE.get(first.cause) or ADVICE.get(incident.kind) or ""


def advise(incident: AnyIncident) -> str:
    """One sentence on what to do; empty when there is nothing to do."""
    first, template = _first(incident), template_of(incident)
    evidence = _evidence(incident, first.rank)
    return template.format(node=first.node or "its node", rank=first.rank, evidence=evidence) if template else ""


def _first(incident: AnyIncident) -> Blame:
    return incident.culprits[0] if incident.culprits else Blame(-1, "", "")


def _evidence(incident: AnyIncident, rank: int) -> str:
    """The file to open first: the culprit's stacks for a hang or a slow worker, its log otherwise."""
    suffix = "stacks.txt" if incident.kind in ("hang", "slow") else "log.txt"
    return next(
        (f for f in incident.files if f.endswith(f"rank{rank}-{suffix}")),
        next((f for f in incident.files if f.endswith(suffix)), "its log"),
    )


def headline(summary: Summary) -> str:
    if summary.exit_code is None:
        return f"job {summary.job}: {summary.stage or 'not started'}"
    state = "finished" if summary.exit_code == 0 else f"ended with exit code {summary.exit_code}"
    return f"job {summary.job} {state}: {summary.why}"


def facts(summary: Summary) -> list[tuple[str, str]]:
    """Name and value of each fact about the job as a whole; what is not known is left out."""
    nodes = len(summary.epochs[-1].nodes) if summary.epochs else 0
    redone = f", {summary.redone_steps} of them redone" if summary.redone_steps else ""
    reached = f"; the job is at step {summary.total_step}" if summary.total_step >= 0 else ""
    which = "of late" if summary.recent else "median"
    step = f", {duration(summary.step_s)} each ({which})" if summary.step_s else ""
    rows = [
        ("script", summary.script),
        ("wall time", duration(summary.wall_s)),
        ("steps", f"{summary.steps} made{redone}{step}{reached}" if summary.steps else "none seen"),
        ("last save", f"at step {summary.last_save_step}" if summary.last_save_step >= 0 else _none_saved(summary)),
        ("workers", f"{summary.epochs[-1].world_size} on {nodes} node{'s' * (nodes != 1)}" if nodes else ""),
        ("epochs", f"{summary.restarts + 1} ({summary.restarts} restarts)" if summary.restarts else ""),
        ("controller", f"{summary.controller_lives} lives" if summary.controller_lives > 1 else ""),
        ("downtime", _downtime(summary)),
        ("ETTR", f"{summary.ettr:.1%} ({duration(summary.effective_s)} of new steps)" if summary.steps else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _none_saved(summary: Summary) -> str:
    return f"none seen; {summary.unsaved}" if summary.unsaved else "none seen"


def _downtime(summary: Summary) -> str:
    if not summary.num_incidents:
        return "none"
    if not summary.steps:
        return f"no step was made, {_count(summary)}"
    return f"{duration(summary.downtime_s)} in {_count(summary)}"


def _count(summary: Summary) -> str:
    count = summary.num_incidents
    return f"{count} incident{'s' if count > 1 else ''}"


def lines(summary: Summary) -> list[tuple[str, bool]]:
    """The lines of the summary, and whether each is one to catch the eye."""
    shown = [("-" * RULE_WIDTH, False), (headline(summary), True)]
    shown += [(f"  {name:<11} {value}", False) for name, value in facts(summary)]
    earlier = summary.num_incidents - len(summary.incidents)
    shown += (
        [(f"  {earlier} more incidents came before these: `everstep explain ID` tells them", False)] if earlier else []
    )
    for incident in summary.incidents:
        first, *rest = incident_lines(incident)
        shown += [(f"  {first}", True), *((f"        {line}", False) for line in rest)]
    shown += [(f"  note: {alert.kind}: {alert.text}", False) for alert in summary.alerts]
    return [*shown, ("-" * RULE_WIDTH, False)]


def render(summary: Summary) -> str:
    """The end-of-run summary, plain text; ends with a line feed."""
    return "".join(f"{line}\n" for line, _ in lines(summary))


def show(summary: Summary, stream: TextIO) -> None:
    """Print the summary: with emphasis on a terminal, plain anywhere else."""
    if not stream.isatty():
        stream.write(render(summary))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream)
    for line, important in lines(summary):
        console.print(Text(line, style="bold" if important else ""), soft_wrap=True)

"""What `everstep status` shows: a summary of the journal so far, and the workers' newest signs of life.

The live part is the controller's answer to a query, plain data. When nobody answers for a job that has not ended, the
text says what is known of it instead, and no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from everstep.core.types import EpochPlan, Phase, WorkerProgress
from everstep.observe.summary import Summary
from everstep.observe.text import duration, facts, headline, incident_lines

SHOWN_WORKERS = 64  # of more, those that lag are shown
HEADER = ("rank", "node", "phase", "step", "last step", "alive", "memory", "cpu", "")


class Live(msgspec.Struct, frozen=True):
    """The parts of the controller's answer that are shown here; others are ignored."""

    stage: str = ""
    epoch: int = 0
    term: int = 0
    restarts: int = 0
    nodes: dict[str, str] = {}
    plan: EpochPlan | None = None
    workers: dict[str, WorkerProgress] = {}
    waits_for: str = ""


class Quiet(msgspec.Struct, frozen=True):
    """Nobody answers for a job whose journal has no end. `lives`: its launcher does; None: nobody here can tell."""

    why: str  # there is no answer
    lives: bool | None
    machine: str = ""  # where the launcher runs, or ran
    last_event_s: float = -1.0  # ago; -1: there was none


def read_live(answer: Mapping[str, Any]) -> Live:
    """From the controller's plain data. Raises msgspec.ValidationError when it is not that."""
    return msgspec.convert(answer, Live)


def render_status(summary: Summary, live: Live | None, quiet: Quiet | None = None) -> str:
    """Text of `everstep status`, ends with a line feed."""
    lines = [headline(summary)]
    if live is not None:
        lines = [f"job {summary.job}: {live.stage}, epoch {live.epoch}"]
    elif quiet is not None:
        lines = _silence(summary, quiet)
    lines += [f"  {name:<11} {value}" for name, value in facts(summary)]
    if live is not None:
        nodes = ", ".join(f"{name} ({what})" for name, what in sorted(live.nodes.items()))
        lines.append(f"  {'nodes':<11} {nodes or 'none yet'}")
        lines += [f"  {'waits for':<11} {live.waits_for}"] if live.waits_for else []
        slow = {b.rank for i in summary.incidents if i.kind == "slow" and not i.outcome for b in i.culprits}
        lines += _workers(live, slow)
    shown = [i for i in summary.incidents if not i.outcome] or summary.incidents[-1:]
    for incident in shown:
        first, *rest = incident_lines(incident)
        lines += [f"  {first}", *(f"        {line}" for line in rest)]
    return "\n".join(lines) + "\n"


def _silence(summary: Summary, quiet: Quiet) -> list[str]:
    """Nobody answers: what that means, and since when nothing is known."""
    stage = summary.stage or "starting"
    where = f" on {quiet.machine}" if quiet.machine else ""
    seen = f"last event {duration(quiet.last_event_s)} ago" if quiet.last_event_s >= 0 else "no event yet"
    if quiet.lives is False:
        state = f"ended without a word (killed?), {seen}, while {stage}"
        known = f"its launcher{where} is gone, and with it the controller and the workers of its machine"
    elif quiet.lives:
        state = f"no controller answers, {seen}, while {stage}"
        known = f"its launcher{where} lives and starts a dead controller again: ask again in some seconds"
    else:
        state = f"nobody answers, {seen}, while {stage}"
        place = f"ask{where}, where it was started" if where else "ask on the machine where it was started"
        known = f"whether it still runs cannot be told from here: {place}"
    return [f"job {summary.job}: {state}", f"  {known}", f"  no answer: {quiet.why}"]


def _workers(live: Live, slow: set[int]) -> list[str]:
    workers = sorted(live.workers.values(), key=lambda w: w.rank)
    left_out = max(0, len(workers) - SHOWN_WORKERS)
    if left_out:
        workers = sorted(workers, key=lambda w: (w.step, -w.step_age_s))[:SHOWN_WORKERS]
    rows = [HEADER, *(_row(worker, live.plan, slow) for worker in workers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    text = ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    text += [f"  and {left_out} more, further ahead"] if left_out else []
    return text if workers else []


def _row(worker: WorkerProgress, plan: EpochPlan | None, slow: set[int]) -> tuple[str, ...]:
    member = next((m for m in plan.members if 0 <= worker.rank - m.first_rank < m.slots), None) if plan else None
    step = worker.total_step if worker.total_step >= 0 else worker.step
    return (
        str(worker.rank),
        member.node if member else "-",
        worker.phase.name.lower(),
        str(step),
        f"{duration(worker.step_age_s)} ago" if worker.step else "-",
        f"{duration(worker.life_age_s)} ago",
        f"{worker.rss_bytes / 2**20:.0f} MiB" if worker.rss_bytes else "-",
        duration(worker.cpu_s),
        _remark(worker, worker.rank in slow),
    )


def _remark(worker: WorkerProgress, slow: bool) -> str:
    if worker.phase is Phase.DONE:
        return ""
    return "STOPPED" if worker.stopped else "SLOW" if slow else ""

"""One short line for each event of a schedule, for people who look into a failing seed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everstep.control import node as n
from everstep.control.job import Command, Direct, Job
from everstep.core import events as e
from everstep.core.formation import Formation, SessionReport
from everstep.core.types import Directive, EpochPlan, NodeReport, WorkerReport


def directive(order: Directive) -> str:
    epoch = f" epoch {order.epoch}" if order.epoch else ""
    cut = " cut" if order.cut else ""
    if order.formation is not None:
        cut += f" lives {list(order.lives)} {formation(order.formation)}"
    if order.leave:
        cut += " leave"
    return f"{order.action.value.upper()}{epoch}{cut} ({order.term}.{order.seq})"


def formation(issued: Formation) -> str:
    kind = "after a fault" if issued.abort else "as planned"
    return f"formation {issued.epoch} {kind}, floor {issued.floor}: {' '.join(s.worker for s in issued.seats)}"


def plan(plan: EpochPlan) -> str:
    members = ", ".join(f"{m.incarnation}={m.first_rank}+{m.slots}" for m in plan.members)
    return f"epoch {plan.epoch}: {members}"


def _worker(worker: WorkerReport) -> str:
    state = worker.exit.cause.value if worker.exit else "runs" if worker.pid else "starts"
    if worker.exit and not worker.gone:
        state += ", dying"
    return state + (f" #{worker.life} {session(worker.session)}" if worker.session else "")


def session(said: SessionReport) -> str:
    resumed = "+" if said.resumed else ""
    raised = f" raised {said.failure}" if said.failure else ""
    return f"{said.stage.value} {said.committed}@{said.epoch}{resumed} prepared {said.prepared}{raised}"


def report(said: NodeReport) -> str:
    workers = ", ".join(_worker(w) for w in said.workers)
    leaving = " leaving" if said.leaving else ""
    return f"{said.incarnation} #{said.seq} epoch {said.epoch} {said.activity.value}{leaving} [{workers}]"


def heard(event: e.Input) -> str:
    """An input of the job's machine."""
    match event:
        case e.NodeReported(said):
            return f"report {report(said)}"
        case e.NodeGone(_, incarnation, how):
            return f"gone {incarnation}: {how.value}"
        case e.ControllerStarted(term):
            return f"life {term} begins"
        case e.HangJudged(epoch, verdict):
            return f"hang in epoch {epoch}: ranks {[c.rank for c in verdict.culprits]}"
        case _:
            return str(event)


def acted(job: Job, commands: Sequence[Command]) -> str:
    """What the job's machine made of it."""
    parts = []
    for command in commands:
        if isinstance(command, Direct):
            parts.append(f"{command.node}: {directive(command.directive)}")
        elif isinstance(command.record, e.EpochFormed):
            parts.append(plan(command.record.plan))
        elif isinstance(command.record, e.FormationMade):
            parts.append(formation(command.record.formation))
        elif isinstance(command.record, e.PlanAmended):
            parts.append(f"amended: {plan(command.record.plan)}")
        elif isinstance(command.record, e.StageChanged | e.NodeLost | e.IncidentOpened | e.JobEnded | e.Alert):
            fields = msgspec.structs.asdict(command.record)
            parts.append(f"{type(command.record).__name__} {' '.join(str(v) for v in fields.values() if v)}")
    return f"{job.stage.value}  {'; '.join(parts)}".rstrip()


def felt(event: n.NodeEvent) -> str:
    """An event of a node's machine."""
    match event:
        case n.Directed(order):
            return directive(order)
        case n.WorkerFailed(epoch, local_rank, exit) | n.WorkerGone(epoch, local_rank, exit):
            return f"{type(event).__name__} epoch {epoch} local rank {local_rank}: {exit.cause.value} {exit.message}"
        case n.SessionSpoke(_, local_rank, said):
            return f"session of local rank {local_rank}: {said.worker} {session(said)}"
        case _:
            return str(event)


def done(commands: Sequence[n.Command]) -> str:
    """Commands of a node's machine."""
    parts = []
    for command in commands:
        match command:
            case n.Report(said):
                parts.append(f"report {report(said)}")
            case n.Launch(dealt):
                parts.append(f"launch {plan(dealt)}")
            case n.SignalWorkers(local_ranks, signum):
                parts.append(f"signal {int(signum)} to {list(local_ranks)}")
            case n.Respawn(local_rank, life):
                parts.append(f"respawn local rank {local_rank} as life {life}")
            case n.Tell(issued):
                parts.append(f"tell {formation(issued)}")
            case _:
                parts.append(type(command).__name__)
    return "; ".join(parts)

"""Who may be drained: the target that a person named, and what forbids it. Pure functions over the job's state.

A target is a node, or the place of one worker, `node/local_rank`; a number is the rank of a worker. Refusals are
UsageErrors: their text goes to who asked.
"""

from __future__ import annotations

import msgspec

from everstep.control import seats
from everstep.control.job import ENDED, WAITING, Job, Stage
from everstep.core.errors import UsageError

SHOWN = 16  # names of nodes in an answer


def find(job: Job, wanted: str) -> str:
    """The node's name, or node/local_rank. Raises UsageError, which says what there is."""
    if wanted in job.nodes:
        return wanted
    node, _, number = wanted.rpartition("/")
    if wanted.isdecimal():
        for member in job.plan.members if job.plan else ():
            local_rank = int(wanted) - member.first_rank
            if 0 <= local_rank < member.slots and member.node in job.nodes:
                return f"{member.node}/{local_rank}"
    elif node in job.nodes and number.isdecimal() and int(number) < job.nodes[node].report.slots:
        return f"{node}/{int(number)}"
    raise UsageError(f"there is no node and no worker {wanted!r} in this job: {_there_is(job)}")


def _there_is(job: Job) -> str:
    if not job.nodes:
        return "no node is there yet"
    names = sorted(job.nodes)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    ranks = f"; its workers are 0 to {job.plan.world_size - 1}, or node/local_rank" if job.plan else ""
    return f"its nodes are {', '.join(names[:SHOWN])}{more}{ranks}"


def require(job: Job, target: str) -> None:
    """Raises UsageError when this target cannot leave, or must not."""
    if job.stage in ENDED or job.stage is Stage.STOPPING:
        raise UsageError("the job ends: all of it is leaving")
    if target not in job.nodes and job.formation is None:
        node = target.rpartition("/")[0]
        raise UsageError(
            f"{target} cannot leave alone: the script has no session, so its workers stop and start together. "
            f"`everstep drain {node}` takes its node out"
        )
    num_left, num_needed, what = _left(job, target)
    if num_left < num_needed:
        there = f"only {num_left}" if num_left else "nobody"
        need = f"; this job needs {num_needed} (--nnodes)" if num_needed > 1 else ""
        raise UsageError(f"without {target} {there} of the {what} would be left to go on{need}")


def _left(job: Job, target: str) -> tuple[int, int, str]:
    """How many would go on, how many the job needs, and of what. Sessions go on with fewer nodes than it started with.

    Once a job waits for nodes, the one that is to leave is not what keeps it from running.
    """
    formation = job.formation
    then = msgspec.structs.replace(job, drains=job.drains | {target})
    if formation is not None:
        seated = [seat.worker for seat in formation.seats if seats.alive(job, seat.worker)]
        waiting = [session.worker for session in seats.ready_ones(job, formation)]
        return sum(not _goes(then, worker) for worker in (*seated, *waiting)), 1, "workers"
    stay = [name for name, node in job.nodes.items() if not node.report.leaving and name not in then.drains]
    return len(stay), 1 if job.stage in WAITING else job.spec.min_nodes, "nodes"


def _goes(job: Job, worker: str) -> bool:
    return seats.leaving(job, worker) or seats.place(worker)[0] in job.drains


def require_undo(job: Job, target: str) -> None:
    """Raises UsageError when there is no empty place that could be filled again."""
    if target in job.nodes and target in job.drains:
        raise UsageError(f"{target} is on its way out; once it has left, `everstep run` on it brings it back")
    if target not in job.drains:
        raise UsageError(f"{target} was not drained")
    if job.formation is None:
        raise UsageError("the job forms just now: try again when it runs")
    for worker, report in seats.present(job).items():
        if seats.drained(job, worker) and worker.startswith(f"{target}#"):
            if not report.gone and job.formation.role_of(worker) is None:
                raise UsageError(f"{target} is just leaving: try again when it has left")

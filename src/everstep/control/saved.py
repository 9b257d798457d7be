"""What the job's sessions say of committed and saved steps: how many are known, rollbacks, saves to disk.

A session's numbers count only if its state went through every rollback that is known; the page of its process, from
which the last step of one that ended comes, only once it committed a step after the last rollback.
"""

from __future__ import annotations

from msgspec.structs import replace

from everstep.control import corrupted
from everstep.control.draft import Draft
from everstep.control.job import ENDED, Job, Stage
from everstep.core import events as e
from everstep.core.errors import UsageError
from everstep.core.formation import Rollback, SessionReport, went_back
from everstep.core.saves import Saves
from everstep.core.types import Exit, NodeReport


def heard(draft: Draft, report: NodeReport) -> None:
    """Of all workers of a node, in the running plan."""
    if report.epoch != draft.job.epoch:
        return
    sessions = [worker.session for worker in report.workers if worker.session is not None]
    for session in sessions:
        for rollback in session.rollbacks:
            if era(draft) < rollback.epoch <= draft.job.formed:
                _rolled_back(draft, rollback)
    current = [session for session in sessions if era_of(session) >= era(draft)]
    _reached(draft, max((session.committed for session in current), default=-1))
    for session in current:
        _saves(draft, session.saves)


def ended(draft: Draft, session: SessionReport | None, exit: Exit) -> None:
    """A process ended; its page had its last step."""
    if session is not None and page_counts(session, era(draft)):
        _reached(draft, exit.step)


def page_counts(session: SessionReport, last_rollback: int) -> bool:
    """Whether the number of steps on its page is one of after the rollback in this epoch."""
    return not last_rollback or (session.resumed and session.epoch >= last_rollback)


def era(draft: Draft) -> int:
    return draft.job.rollbacks[-1].epoch if draft.job.rollbacks else 0


def era_of(session: SessionReport) -> int:
    return session.rollbacks[-1].epoch if session.rollbacks else 0


def _reached(draft: Draft, committed: int) -> None:
    if committed > draft.job.floor:
        draft.set(floor=committed)


def _rolled_back(draft: Draft, rollback: Rollback) -> None:
    """A fact that its sessions agreed on; where it cost steps it is an incident, which is over as it is told."""
    job, step = draft.job, rollback.step
    lost = max(0, job.floor - step)
    draft.note(e.StateRestored(rollback.epoch, step, before=job.floor, lost=lost))
    saves = job.saves
    draft.set(
        rollbacks=went_back(job.rollbacks, rollback),
        floor=step,
        saves=Saves(min(saves.requested, step), min(saves.durable, step)),
    )
    if corrupted.went_back(draft, rollback, lost) or not lost:
        return
    if step:
        why = f"no live member held the whole state: all went back to step {step}, {lost} steps are done again"
        draft.tell("rolled-back", why, redone=lost)
    else:
        why = f"no state was kept anywhere: the job begins at step 0 again, {lost} steps are lost"
        draft.tell("step-fell-back", why, redone=lost)


def require(job: Job) -> None:
    """Raises UsageError when nobody can save this job's state because a person wants it."""
    if job.stage in ENDED or job.stage is Stage.STOPPING:
        raise UsageError("the job ends already, and saves what there is to save")
    if job.formation is None:
        why = "it saves what it wants when it wants" if job.plan is not None else "it has not begun"
        raise UsageError(f"the script has no session that runs: {why}")


def _saves(draft: Draft, told: Saves) -> None:
    """Each new fact once, whoever tells it first."""
    known = draft.job.saves
    if told.requested > known.requested:
        draft.note(e.SaveRequested(told.requested))
        known = replace(known, requested=told.requested)
        draft.set(saved_once=True)
    if told.durable > known.durable:
        draft.note(e.SaveDurable(told.durable))
        known = replace(known, durable=told.durable)
    if told.failed_step > max(known.failed_step, known.durable):
        draft.note(e.SaveFailed(told.failed_step, told.failed))
        draft.note(e.Alert("save-failed", f"step {told.failed_step} is not saved: {told.failed}"))
        known = replace(known, failed_step=told.failed_step, failed=told.failed)
    if known != draft.job.saves:
        draft.set(saves=known)

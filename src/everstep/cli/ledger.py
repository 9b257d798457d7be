"""`everstep ledger [RUN] [--step N]`: which samples the committed steps of a job consumed, from its journal.

Exit code: 0 when every committed step is in the account exactly once, INTERNAL when the journal contradicts that, USAGE
without a journal, or for a step that is not committed.
"""

from __future__ import annotations

from pathlib import Path

from everstep.cli.asking import LATEST
from everstep.cli.viewing import journal_of, readable
from everstep.control.journal import read
from everstep.core.dealing import Dealing
from everstep.core.errors import ExitCode, UsageError
from everstep.data.account import Account, account


def ledger(run: Path = LATEST, *, step: int | None = None) -> int:
    """Show which samples a job with sessions consumed, and check that each committed step is there once.

    Steps that were committed, lost with the state, and made again are listed too.

    Args:
        run: the job's run folder or its journal (default: the newest one below ./everstep_runs).
        step: show the samples of this step (from 0), a line for each member.
    """
    journal = journal_of(run)
    with readable(journal):
        told = account(read(journal))
    if step is not None:
        return _one(told, step)
    for span in told.spans():
        print(f"steps {span.dealing.first_step} to {span.end - 1}: {_dealing(span.dealing)}")
    for span in told.redone:
        print(f"redone: steps {span.dealing.first_step} to {span.end - 1}, dealt first in {_dealing(span.dealing)}")
    print(f"{told.count()} steps committed, each dealt once")
    return ExitCode.OK


def _one(told: Account, number: int) -> ExitCode:
    found = told.step(number)
    if found is None:
        raise UsageError(f"step {number} is not committed: the job has {told.committed}")
    for role, samples in enumerate(found.shares):
        print(f"role {role}: {' '.join(map(str, samples)) or '-'}")
    return ExitCode.OK


def _dealing(dealing: Dealing) -> str:
    streams = "; ".join(
        f"{s.global_batch} of {s.num_samples} samples, seed {s.seed}"
        f"{'' if s.shuffle else ', in order'}{', rest of a pass dropped' if s.drop_last else ''}"
        for s in dealing.streams
    )
    members = f"{dealing.num_members} member{'s' if dealing.num_members > 1 else ''}"
    return f"epoch {dealing.epoch}, {members}, {streams or 'data of the script'}"

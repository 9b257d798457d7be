"""How the steps of sessions were dealt, into the journal: each change once, whichever members tell of it."""

from __future__ import annotations

from everstep.control.draft import Draft
from everstep.core import events as e
from everstep.core.dealing import RECENT
from everstep.core.types import NodeReport

KEPT = 64  # no report is so late that it tells of a change this many changes ago


def heard(draft: Draft, report: NodeReport) -> None:
    """Note what is new. A session whose every change is new may have made more of them out of sight."""
    for worker in report.workers:
        told = worker.session.dealt if worker.session is not None else ()
        known = draft.job.dealt
        new = [dealing for dealing in told if dealing not in known]
        if not new:
            continue
        missed = bool(known) and len(new) == RECENT
        for number, dealing in enumerate(new):
            draft.note(e.StepsDealt(dealing, missed=missed and number == 0))
        draft.set(dealt=(*known, *new)[-KEPT:])

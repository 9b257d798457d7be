"""Silent corruption, as the sessions tell it: an incident that names who was wrong, and an epoch in which all go back.

Each is an incident of kind "corrupt" in the journal, with the node: how often a node was wrong can be counted. A bit
that flipped is gone once all went back; who computes wrongly, which an audit finds, would do so again: its place gets a
new process, and that counts against its node.
"""

from __future__ import annotations

import msgspec

from everstep.control import deciding, seating, seats
from everstep.control.draft import Draft
from everstep.control.job import Corrupted
from everstep.core import events as e
from everstep.core.corruption import Corruption
from everstep.core.decisions import Action
from everstep.core.formation import Rollback
from everstep.core.types import Blame

KIND = "corrupt"


def react(draft: Draft) -> bool:
    """Record what is new. True: the members wait for a formation in which all go back."""
    job = draft.job
    found = seats.corrupt(job)
    if found is None or job.formation is None:
        return False
    known = job.corrupt
    if known is None or found.epoch > known.epoch:
        _open(draft, found)
    elif found.sure and not known.sure and found.epoch == known.epoch:
        _name(draft, found, known)
    return found.epoch in (job.formation.epoch, job.before.epoch if job.before is not None else 0)


def _open(draft: Draft, found: Corruption) -> None:
    why = _why(draft, found)
    draft.open_incident(KIND, _blames(draft, found), why, counts=False)
    incident = draft.job.incident
    assert incident is not None
    draft.set(corrupt=Corrupted(found.epoch, incident.id, found.sure, why, audit=found.audit))
    if draft.job.formation is not None:
        lost_steps = found.step - found.verified if found.verified >= 0 else -1
        deciding.corrupt(draft, draft.job.formation, lost_steps, len(found.workers))
    if found.audit and found.sure:
        _replace(draft, found.workers)


def _replace(draft: Draft, workers: tuple[str, ...]) -> None:
    """Who died meanwhile has got a next life already."""
    job = draft.job
    assert job.plan is not None
    draft.blame([seats.place(worker)[0] for worker in workers])
    ranks = [seats.rank_of(job.plan, worker) for worker in workers if seats.alive(job, worker)]
    known = [rank for rank in ranks if rank is not None]
    if known:
        seating.next_life(draft, known)


def _name(draft: Draft, found: Corruption, known: Corrupted) -> None:
    """Once the steps were done again."""
    blames = _blames(draft, found)
    why = f"{known.why}. The steps done again show that {_who(blames)} was wrong"
    _tell(draft, known, blames, why, sure=True)


def _tell(draft: Draft, known: Corrupted, blames: tuple[Blame, ...], why: str, **more: bool) -> None:
    draft.set(corrupt=msgspec.structs.replace(known, why=why, **more))
    incident = draft.job.incident
    if incident is not None and incident.id == known.incident:
        draft.set(incident=msgspec.structs.replace(incident, culprits=blames or incident.culprits, why=why))
    draft.note(e.IncidentUpdated(known.incident, blames, why=why))


def went_back(draft: Draft, rollback: Rollback, lost: int) -> bool:
    """Whether that is why all went back; then it is told here."""
    known = draft.job.corrupt
    if known is None or known.healed or rollback.epoch <= known.epoch:
        return False
    since = "up to which all had computed rightly" if known.audit else "at which they were alike"
    text = f"all went back to step {rollback.step}, {since}: {lost} steps are done again"
    _tell(draft, known, (), f"{known.why}; {text}", healed=True)
    return True


def resumed(draft: Draft) -> None:
    """All go on. Without a kept state that is known to be good they do so from what they had."""
    known = draft.job.corrupt
    if known is not None and not known.healed:
        _without_kept(draft)
        text = "no state is kept of when they were alike: it was copied from a member, with what came of it since"
        if known.audit:
            text = "no state is kept of before: they go on from what they have, with what came of wrong gradients"
        _tell(draft, known, (), f"{known.why}; {text}", healed=True)


def _without_kept(draft: Draft) -> None:
    """It was decided otherwise when nobody knew that no node had kept a state of then."""
    incident, formation = draft.job.incident, draft.job.formation
    if incident is None or incident.decision is None or formation is None:
        return
    if incident.decision.action is Action.ROLL_BACK:
        deciding.corrupt(draft, formation, -1, len(incident.culprits))


def _blames(draft: Draft, found: Corruption) -> tuple[Blame, ...]:
    assert draft.job.plan is not None
    cause = KIND if found.sure else f"{KIND}?"
    places = [(seats.rank_of(draft.job.plan, worker), seats.place(worker)[0]) for worker in found.workers]
    detail = ", ".join(found.parts)
    return tuple(Blame(-1 if rank is None else rank, node, cause, detail) for rank, node in places)


def _why(draft: Draft, found: Corruption) -> str:
    blames = _blames(draft, found)
    if found.audit:
        return _why_audit(blames, found)
    since = f", at step {found.verified} they were alike" if found.verified >= 0 else ""
    parts = f" in {', '.join(found.parts)}" if found.parts else ""
    marks = " ".join(f"{mark:016x}" for mark in found.marks)
    if found.sure:
        what = f"{_who(blames)} has other bits than its replicas"
    else:
        what = f"{_who(blames)} have different bits, and should be replicas"
    return f"after step {found.step} {what}{parts}{since} (fingerprints by role: {marks})"


def _why_audit(blames: tuple[Blame, ...], found: Corruption) -> str:
    since = f"; up to step {found.verified} all computed rightly" if found.verified >= 0 else ""
    if found.sure:
        what = f"{_who(blames)} computes other gradients than all others do from the same state and samples"
    else:
        what = f"of {_who(blames)} somebody computes other gradients than the others do from the same state and samples"
    return f"after step {found.step} {what}{since}"


def _who(blames: tuple[Blame, ...]) -> str:
    return " and ".join(f"rank {blame.rank} on {blame.node}" for blame in blames)

"""The commit protocol: what one worker does with its steps, votes and changes of epoch. Pure: no torch, no clock.

`step(member, event) -> (member, commands)`. The main thread reports what its collectives and the optimizer did, a
control thread delivers formations at any moment; both under one lock. Events of the main thread carry the epoch they
belong to and are ignored when the worker left that epoch meanwhile: a round that completes late changes nothing,
because all that a worker may have done on completing it can be done in the next epoch from the stands (`resolve`).

    STANDBY -> FORMING -> RESOLVING -> (FETCHING | APPLYING) -> READY -> COMPUTING -> VOTING -> APPLYING -> READY ...
                          RESOLVING <-> RESTORING

An abort leads to FORMING from everywhere; out of APPLYING only once the optimizer is through. After a restore comes
another round in the same epoch, and the state is valid only once that is through. A planned change goes
from the end of a step straight to RESOLVING (or LEFT), after a vote in which all members said to be prepared for it. A
vote that shows replicas which differ leads all who see it to DOUBTING: they wait for the epoch in which all go back.
In a step that is audited the passes before the last one end with a vote too, after which the step is READY again; their
gradients are nobody's step, so an abort finds none in hand.
`core.formation` says what is expected of whoever issues formations.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from everstep.core.formation import Formation, Rollback
from everstep.core.saves import Tier, agreed
from everstep.detect import audit, corrupt
from everstep.train import resolve
from everstep.train.kept import Commit
from everstep.train.protocol import (
    Abort,
    Applied,
    Apply,
    Audited,
    Began,
    CastVote,
    Command,
    Compared,
    Doubt,
    DropGradients,
    Event,
    Fenced,
    Fetch,
    Fetched,
    FormationReceived,
    Leave,
    Prepare,
    Prepared,
    PublishStand,
    Ready,
    Reduced,
    Restore,
    Restored,
    Serve,
    StateLost,
    Stood,
    Switch,
    Vote,
    Voted,
)
from everstep.train.resolve import Known, Move, Resolved, Stand


class Phase(enum.Enum):
    """What the worker is in the middle of."""

    STANDBY = "standby"  # no role
    FORMING = "forming"  # in no epoch: opens the links of `entering`
    RESOLVING = "resolving"  # in a new epoch, stand published
    FETCHING = "fetching"  # copies the state of another member; its own is void
    RESTORING = "restoring"  # goes back to a kept state, as all do; its own is void
    READY = "ready"  # between steps
    COMPUTING = "computing"
    VOTING = "voting"  # gradients complete
    DOUBTING = "doubting"  # replicas differ: waits for the epoch in which all go back
    APPLYING = "applying"
    LEFT = "left"  # the last three are final
    FENCED = "fenced"
    LOST = "lost"


FINAL = frozenset({Phase.LEFT, Phase.FENCED, Phase.LOST})


class Member(msgspec.Struct, frozen=True):
    """One worker, as the protocol sees it."""

    worker: str
    stand: Stand = Stand(fresh=True)
    phase: Phase = Phase.STANDBY
    epoch: int = 0  # the one it acts in, or acted in last; formations up to here are history
    formation: Formation | None = None  # of `epoch`; None: never had a role
    entering: Formation | None = None  # `epoch` is over for this worker, this one comes next
    planned: Formation | None = None  # to switch to at the end of a step
    prepared: int = 0  # the newest epoch whose links are open
    goal: Stand | None = None  # `stand` once the apply or the fetch under way is through
    switching: bool = False  # the vote decided to change to `planned` after this step
    serves: tuple[int, ...] = ()  # roles waiting for this worker's state
    keep: Tier = Tier.NOTHING  # how far the last commit here is to be saved
    check: bool = False  # whether the state after it is to be compared with the next vote
    turn: int = 0  # the pass of an audited step which is under way, or comes next; 0: that which is committed
    passes: tuple[audit.Pass, ...] = ()  # of this step that are through
    failed: tuple[Commit, ...] = ()  # kept states that could not be restored in this epoch
    round: int = 0  # of stands, in this epoch
    shards: int = 1  # the state is split into so many: role r holds shard r % shards


Outcome = tuple[Member, tuple[Command, ...]]


def step(member: Member, event: Event) -> Outcome:
    """The member after the event, and what is to be done now, in this order."""
    if member.phase in FINAL:
        return member, ()
    match event:
        case FormationReceived(formation=formation):
            return _receive(member, formation)
        case Prepared(epoch=epoch):
            return _prepared(member, epoch)
        case Applied():
            assert member.phase is Phase.APPLYING, member
            return _boundary(_reached(member))
        case _:
            return _round(member, event) if acts_in(member, event.epoch) else (member, ())


def acts_in(member: Member, epoch: int) -> bool:
    """Whether what happens in this epoch still concerns the member."""
    return member.epoch == epoch and member.entering is None


def _round(member: Member, event: Began | Reduced | Voted | Compared | Stood | Fetched | Restored) -> Outcome:
    match event:
        case Began():
            assert member.phase is Phase.READY, member
            return replace(member, phase=Phase.COMPUTING), ()
        case Reduced(finite=finite, keep=keep, said=said):
            assert member.phase is Phase.COMPUTING, member
            mine = member.stand
            stand = replace(mine, voted_in=member.epoch, finite=finite) if not member.turn else mine
            vote = CastVote(member.epoch, Vote(finite, member.prepared, keep, said))
            return replace(member, phase=Phase.VOTING, stand=stand, keep=Tier.NOTHING), (vote,)
        case Voted(votes=votes):
            assert member.phase is Phase.VOTING, member
            return _decide(member, votes)
        case Compared(votes=votes):
            assert member.phase is Phase.READY, member
            return _compare(member, votes)
        case Stood(stands=stands):
            assert member.phase is Phase.RESOLVING, member
            return _resolve(member, stands)
        case Fetched():
            assert member.phase is Phase.FETCHING, member
            return _boundary(_reached(member))
        case Restored(good=good, fingerprint=fingerprint):
            assert member.phase is Phase.RESTORING, member
            return _tell_restored(member, good, fingerprint)


# Formations ----------------------------------------------------------------------------------------------


def _receive(member: Member, formation: Formation) -> Outcome:
    if formation.epoch <= (member.entering.epoch if member.entering else member.epoch):
        return member, ()
    newcomer = member.formation is None and (member.entering is None or not member.entering.abort)
    if formation.abort or newcomer:
        return _enter(member, formation)
    if member.planned is not None or member.entering is not None:  # one change at a time: the same one again
        return member, ()
    if formation.role_of(member.worker) is None:  # a leaver has no links to open
        return replace(member, planned=formation, prepared=formation.epoch), ()
    return replace(member, planned=formation), (Prepare(formation),)


def _enter(member: Member, formation: Formation) -> Outcome:
    """The epoch is over here, now; or, without a role, there is none to end."""
    had_role = member.formation is not None
    if formation.role_of(member.worker) is None:
        if had_role:
            return replace(member, phase=Phase.FENCED), (Abort(member.epoch), Fenced(formation.epoch))
        return replace(member, phase=Phase.STANDBY, epoch=formation.epoch, entering=None, planned=None), ()
    phase = Phase.APPLYING if member.phase is Phase.APPLYING else Phase.FORMING
    aborts: tuple[Command, ...] = (Abort(member.epoch),) if had_role and member.entering is None else ()
    member = replace(member, phase=phase, entering=formation, planned=None)
    return member, (*aborts, Prepare(formation))


def _prepared(member: Member, epoch: int) -> Outcome:
    if epoch not in (f.epoch for f in (member.entering, member.planned) if f):
        return member, ()  # superseded
    member = replace(member, prepared=epoch)
    return _boundary(member) if member.phase is Phase.FORMING else (member, ())


def _switch(member: Member, formation: Formation) -> Outcome:
    if formation.role_of(member.worker) is None:
        return replace(member, phase=Phase.LEFT), (Leave(),)
    published = replace(member.stand, acted_in=member.epoch)
    member = replace(
        member,
        phase=Phase.RESOLVING,
        epoch=formation.epoch,
        formation=formation,
        entering=None,
        planned=None,
        goal=None,
        switching=False,
        serves=(),
        failed=(),
        round=0,
    )
    return member, (Switch(formation), PublishStand(formation.epoch, published))


# Steps ---------------------------------------------------------------------------------------------------


def _decide(member: Member, votes: tuple[Vote, ...]) -> Outcome:
    """All members see the same votes, and do the same."""
    marks = [vote.said.mark for vote in votes]
    if corrupt.odd(marks, member.shards):
        return _doubt(member, votes)
    if audits(member):
        return _audit(member, votes)
    return _commit(member, votes)


def audits(member: Member) -> bool:
    """Whether the step under way is computed more than once."""
    return bool(member.turn or member.passes)


def _audit(member: Member, votes: tuple[Vote, ...]) -> Outcome:
    """Another pass, in which all act in the same epoch; or this one is committed, or nobody's state is good."""
    told = tuple(vote.said.whole for vote in votes), tuple(vote.said.kind for vote in votes)
    member = replace(member, passes=(*member.passes, audit.Pass(member.turn, *told)))
    if member.turn:
        return _once_more(member, member.turn - 1)
    found = audit.judge(member.passes, proven=member.stand.audited >= 0)
    if found.outcome is audit.Outcome.AGAIN:
        return _once_more(member, audit.turns(len(votes)))
    assert member.formation is not None
    news = Audited(member.stand.committed, member.formation.role_of(member.worker) or 0, found)
    if found.outcome is audit.Outcome.WRONG:
        unsure = member.stand.unsure + (not found.sure)
        stand = replace(member.stand, verified=member.stand.audited, unsure=unsure)
        member, commands = _doubt(replace(member, stand=stand), votes, found)
        return member, (news, *commands)
    if found.outcome is audit.Outcome.ALIKE:
        member = replace(member, stand=replace(member.stand, audited=member.stand.committed + 1, unsure=0))
    member, commands = _commit(replace(member, passes=()), votes)
    return member, (news, *commands)


def _once_more(member: Member, turn: int) -> Outcome:
    """The gradients in hand are nobody's step: nobody may roll forward with them."""
    stand = replace(member.stand, voted_in=0, finite=True)
    member = replace(member, phase=Phase.READY, stand=stand, turn=turn)
    return member, (Ready(member.epoch, stand.committed),)


def _commit(member: Member, votes: tuple[Vote, ...]) -> Outcome:
    marks = [vote.said.mark for vote in votes]
    skipped = not all(vote.finite for vote in votes)
    goal, keep = resolve.after(_compared(member.stand, marks), skipped), agreed([vote.keep for vote in votes])
    check = keep is not Tier.NOTHING or any(vote.said.check for vote in votes)
    turn = int(any(vote.said.audit for vote in votes))
    member = replace(member, goal=goal, keep=keep, check=check, turn=turn, switching=switches(member.epoch, votes))
    return _skip(member) if skipped else _apply(member)


def _compared(stand: Stand, marks: Sequence[int]) -> Stand:
    """Once all told the mark of this state, and no replicas differ."""
    return replace(stand, verified=stand.committed) if all(marks) else stand


def _compare(member: Member, votes: tuple[Vote, ...]) -> Outcome:
    """After the last step: no other vote comes that would show it."""
    marks = [vote.said.mark for vote in votes]
    if corrupt.odd(marks, member.shards):
        return _doubt(member, votes)
    return replace(member, stand=_compared(member.stand, marks), check=False), ()


def _doubt(member: Member, votes: tuple[Vote, ...], found: audit.Finding | None = None) -> Outcome:
    """Gradients of a wrong state may have changed all others by now: nobody's is good before it is known better."""
    formation = member.formation
    assert formation is not None
    mark = votes[formation.role_of(member.worker) or 0].said.mark
    stand = replace(member.stand, voted_in=0, finite=True, doubted=True, fingerprint=mark)
    member = replace(member, phase=Phase.DOUBTING, stand=stand, keep=Tier.NOTHING, check=False, turn=0, passes=())
    return member, (DropGradients(), Doubt(member.epoch, member.stand.committed, votes, found))


def switches(epoch: int, votes: tuple[Vote, ...]) -> bool:
    """Whether all members change to the planned formation at the end of this step: all are prepared for it."""
    return min(vote.prepared for vote in votes) > epoch


def _resolve(member: Member, stands: tuple[Stand, ...]) -> Outcome:
    assert member.formation is not None
    role = member.formation.role_of(member.worker)
    assert role is not None
    mine = resolve.resolve(stands, known(member))[role]
    if mine.move is Move.LOST:
        lost = StateLost(mine.goal.committed, member.formation.floor, mine.shard)
        return replace(member, phase=Phase.LOST), (lost,)
    member = replace(member, goal=mine.goal, serves=mine.serves, keep=Tier.NOTHING, check=False, turn=0, passes=())
    return _move(member, mine)


def known(member: Member) -> Known:
    """What all members of its formation know."""
    formation = member.formation
    assert formation is not None
    return Known(formation.floor, member.shards, formation.epoch, formation.rollbacks, formation.scratch)


def _move(member: Member, mine: Resolved) -> Outcome:
    match mine.move:
        case Move.APPLY:
            return _apply(member)
        case Move.FETCH:
            member = replace(member, phase=Phase.FETCHING, stand=_void(mine.goal.rollbacks, mine.trusted))
            return member, (DropGradients(), Fetch(member.epoch, mine.source, mine.goal))
        case Move.RESTORE:
            member = replace(member, phase=Phase.RESTORING, stand=_void(mine.former, mine.trusted))
            return member, (DropGradients(), Restore(member.epoch, mine.places, mine.goal))
        case _:
            return _skip(member)


def _void(rollbacks: tuple[Rollback, ...], trusted: int | None = None) -> Stand:
    """Overwritten in part. What its job went through is known still, and which kept states can be trusted."""
    if trusted is None:
        return Stand(rollbacks=rollbacks)
    return Stand(rollbacks=rollbacks, doubted=True, verified=trusted)


def _tell_restored(member: Member, good: bool, fingerprint: int) -> Outcome:
    """Another round. What was restored is this member's state only once all know of it."""
    goal = member.goal
    assert goal is not None
    failed = member.failed if good else (*member.failed, (goal.committed, goal.commit_epoch))
    member = replace(member, phase=Phase.RESOLVING, failed=failed, round=member.round + 1)
    stand = replace(goal, restored=True, fingerprint=fingerprint) if good else member.stand
    return member, (PublishStand(member.epoch, replace(stand, failed=failed), member.round),)


def _apply(member: Member) -> Outcome:
    return replace(member, phase=Phase.APPLYING), (Apply(member.stand.committed),)


def _skip(member: Member) -> Outcome:
    """The goal is reached without touching the parameters."""
    member, commands = _boundary(_reached(member))
    return member, (DropGradients(), *commands)


def _reached(member: Member) -> Member:
    assert member.goal is not None
    return replace(member, stand=member.goal, goal=None)


def _boundary(member: Member) -> Outcome:
    """Between two steps: a change of epoch that is due, else the next step."""
    if member.entering is not None:
        if member.prepared == member.entering.epoch:
            return _switch(member, member.entering)
        return replace(member, phase=Phase.FORMING), ()
    if member.switching:
        assert member.planned is not None
        return _switch(member, member.planned)
    serve: tuple[Command, ...] = (Serve(member.epoch, member.serves),) if member.serves else ()
    member = replace(member, phase=Phase.READY, serves=())
    return member, (*serve, Ready(member.epoch, member.stand.committed))

"""How the members of a new epoch agree on what is committed: a pure function over what each of them holds.

The first collective of every epoch gathers a `Stand` of each member; all compute the same answer from the same stands.
A commit is named by its step and by the epoch whose gradients made it. The goal is the newest commit anybody holds; or
the one after it, when everybody who could have committed that one still has its complete gradients: then it may have
been committed by someone who is gone, and it is a legitimate commit in any case, because a complete reduction holds
every sample of the step. Who is one step behind the goal and has the gradients of that very commit rolls forward; the
others copy. Why nothing committed is lost: who commits has seen everybody's vote, so every other member of that epoch
has the gradients, and drops them only if one does not have them. Who was not in that epoch (a leaver that an abort
seated again) has no say in this.

With `shards`, the state is split: role r holds shard r % shards, and only members of one shard hold the same. All are
at one commit nevertheless, for a complete reduction is complete in every shard.

Where live members cannot get to what is known to be committed, all go back to the newest kept state which is there in
whole (`train.kept`), and tell in another round how that went: who could not, or has other bits than most who restored
the same shard, copies from those. A shard which nobody could restore leads to the next older step, in yet another one.

Replicas that were found to differ (`doubted`) all go back too, though they live: to the newest kept state not after the
step at which they were alike. Where nothing of that is kept, who has other bits than most copies theirs.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from everstep.core.formation import Rollback, went_back
from everstep.train import kept as keeping
from everstep.train.kept import Commit, Image, Kept


class Stand(msgspec.Struct, frozen=True, tag=True):
    """What one member holds, and what its node keeps."""

    committed: int = -1  # steps committed, the index of the next one; -1: no valid state
    commit_epoch: int = 0  # whose gradients made the last commit; 0: the initial state, or that of another job
    skipped: bool = False  # the last commit left the parameters as they were (non-finite gradients)
    voted_in: int = 0  # epoch of the complete, reduced gradients in hand for step `committed`; 0: none
    finite: bool = True  # these gradients
    acted_in: int = 0  # the member's epoch before the one of this round
    fresh: bool = False  # without valid state, but its initial one is intact and could start a job
    rollbacks: tuple[Rollback, ...] = ()  # that this state went through, oldest first
    restored: bool = False  # in this epoch, from what was kept, and not compared with the others' yet
    fingerprint: int = 0  # of a state that was restored or is doubted
    failed: tuple[Commit, ...] = ()  # kept states which this member could not restore in this epoch
    kept: tuple[Kept, ...] = ()  # what its node can give back
    verified: int = -1  # the newest step whose states were compared, and replicas found alike
    doubted: bool = False  # replicas differ: this state may be wrong, and kept ones of steps after `verified`
    audited: int = -1  # the newest step up to which an audit found that all compute rightly
    unsure: int = 0  # audits since then that found wrong gradients and could not say whose

    @property
    def era(self) -> int:
        """Epoch of the last rollback: nothing of an earlier era counts beside it."""
        return self.rollbacks[-1].epoch if self.rollbacks else 0

    @property
    def commit(self) -> tuple[int, int, int]:
        return self.era, self.committed, self.commit_epoch


class Known(msgspec.Struct, frozen=True):
    """What holds for all in this epoch, apart from the stands."""

    floor: int = 0  # steps known to be committed
    shards: int = 1
    epoch: int = 0
    rollbacks: tuple[Rollback, ...] = ()  # `floor` is what is known after these
    scratch: bool = False  # a job in which nothing was ever kept may start over


class Move(enum.Enum):
    """What one member does to get to the goal."""

    KEEP = "keep"  # is there; gradients in hand are void
    APPLY = "apply"  # roll forward
    SKIP = "skip"  # roll forward a commit that left the parameters as they were
    FETCH = "fetch"  # copy the state of `source`
    RESTORE = "restore"  # go back to a kept state, as all do
    LOST = "lost"  # nobody can get to what is known to be committed, or a shard of it is gone, and nothing is kept


class Resolved(msgspec.Struct, frozen=True):
    """One member's part. `goal`: its stand afterwards, the same for all."""

    move: Move
    goal: Stand
    source: int = -1  # role to fetch from
    serves: tuple[int, ...] = ()  # roles that fetch from this one
    shard: int = -1  # that nobody holds, if that is why it is lost
    places: tuple[int, ...] = ()  # by saved shard: role whose node's vault has it; -1: disk
    former: tuple[Rollback, ...] = ()  # before this restore, which may not work out: also those that it makes needless
    trusted: int | None = None  # replicas differ: kept states of later steps may be wrong


def resolve(stands: Sequence[Stand], known: Known) -> tuple[Resolved, ...]:
    """The move of each role."""
    if any(stand.restored for stand in stands):
        goal, moves, sources = _compare(stands, [stand.restored for stand in stands], known.shards)
        reached = True
    elif _in_doubt(stands):
        return _back(stands, known)
    else:
        stands = [_forget(stand) if stand.doubted else stand for stand in stands]
        goal, moves = _moves(stands, known)
        sources = [_source(moves, shard, known.shards) for shard in range(known.shards)]
        reached = goal.committed >= 0 and (goal.committed >= known.floor or goal.era > _era(known.rollbacks))
    whole = None not in sources
    if reached and whole:
        return tuple(_resolved(role, moves, goal, sources, known.shards) for role in range(len(stands)))
    image = _newest(stands, known)
    if image is not None and not (whole and not reached and image.step <= goal.committed):
        return _restored(stands, image, known)
    shard = sources.index(None) if reached else -1
    return tuple(Resolved(Move.LOST, goal, shard=shard) for _ in stands)


# Live members --------------------------------------------------------------------------------------------


def _source(moves: Sequence[Move], shard: int, shards: int) -> int | None:
    """Who gives this shard away. Who is there already has the state sooner than who must still apply."""
    holders = [role for role in range(shard, len(moves), shards) if moves[role] is not Move.FETCH]
    return next((role for role in holders if moves[role] is Move.KEEP), holders[0] if holders else None)


def _resolved(role: int, moves: Sequence[Move], goal: Stand, sources: Sequence[int | None], shards: int) -> Resolved:
    source = sources[role % shards]
    assert source is not None
    if moves[role] is Move.FETCH:
        return Resolved(Move.FETCH, goal, source=source)
    alike = range(role % shards, len(moves), shards)
    copies = tuple(other for other in alike if moves[other] is Move.FETCH)
    return Resolved(moves[role], goal, serves=copies if role == source else ())


def _moves(stands: Sequence[Stand], known: Known) -> tuple[Stand, list[Move]]:
    holders = [stand for stand in stands if stand.committed >= 0]
    if holders:
        goal = next_commit(holders) or _clean(max(holders, key=lambda stand: stand.commit))
        return goal, [_move(stand, goal) for stand in stands]
    alike = [range(shard, len(stands), known.shards) for shard in range(known.shards)]
    founders = [next((role for role in roles if stands[role].fresh), None) for roles in alike]
    moves = [Move.KEEP if role in founders else Move.FETCH for role in range(len(stands))]
    if None in founders or _newest(stands, known) is not None:
        return Stand(), moves
    if known.floor and known.scratch:
        return Stand(0, rollbacks=went_back(known.rollbacks, Rollback(known.epoch, 0))), moves
    return Stand(0, rollbacks=known.rollbacks), moves


def next_commit(holders: Sequence[Stand]) -> Stand | None:
    """The commit after the newest one, if all who were in the epoch of its gradients have them."""
    top = max(stand.commit for stand in holders)
    newest = max(stand.voted_in for stand in holders if stand.commit == top)
    concerned = [stand for stand in holders if stand.commit == top and stand.acted_in >= newest]
    if not newest or any(stand.voted_in != newest for stand in concerned):
        return None
    return after(concerned[0], skipped=not all(stand.finite for stand in concerned))


def after(stand: Stand, skipped: bool) -> Stand:
    """`stand` once the gradients in hand are committed."""
    return Stand(
        stand.committed + 1,
        commit_epoch=stand.voted_in,
        skipped=skipped,
        rollbacks=stand.rollbacks,
        verified=stand.verified,
        audited=stand.audited,
        unsure=stand.unsure,
    )


def _clean(stand: Stand) -> Stand:
    return replace(stand, voted_in=0, finite=True, acted_in=0, kept=())


def _move(stand: Stand, goal: Stand) -> Move:
    if stand.commit == goal.commit:
        return Move.KEEP
    if stand.voted_in and (stand.era, stand.committed + 1, stand.voted_in) == goal.commit:
        return Move.SKIP if goal.skipped else Move.APPLY
    return Move.FETCH


# Replicas that differ --------------------------------------------------------------------------------------


def _in_doubt(stands: Sequence[Stand]) -> bool:
    """Not any more once somebody holds what all went back to."""
    doubted = [stand.era for stand in stands if stand.doubted]
    return bool(doubted) and all(s.era <= max(doubted) for s in stands if s.committed >= 0 and not s.doubted)


def _forget(stand: Stand) -> Stand:
    """Its state is nobody's any more."""
    return Stand(rollbacks=stand.rollbacks, failed=stand.failed, kept=stand.kept)


def _back(stands: Sequence[Stand], known: Known) -> tuple[Resolved, ...]:
    trusted = max(stand.verified for stand in stands if stand.doubted)
    image = _newest(stands, known, trusted)
    holds = [_counts(stands, role, known.shards) for role in range(len(stands))]
    if image is None and any(holds):
        goal, moves, sources = _compare(stands, holds, known.shards)
        if None not in sources:
            found = tuple(_resolved(role, moves, goal, sources, known.shards) for role in range(len(stands)))
            return tuple(replace(each, trusted=trusted) for each in found)
    image = image or _newest(stands, known)
    if image is None:
        return tuple(Resolved(Move.LOST, Stand()) for _ in stands)
    return tuple(replace(each, trusted=trusted) for each in _restored(stands, image, known))


def _counts(stands: Sequence[Stand], role: int, shards: int) -> bool:
    """It holds a state and told its fingerprint; or holds one where nobody of its shard told any."""
    alike = [stand for stand in stands[role % shards :: shards] if stand.committed >= 0]
    told = any(stand.fingerprint for stand in alike)
    return stands[role].committed >= 0 and (stands[role].fingerprint != 0 or not told)


# What is kept --------------------------------------------------------------------------------------------


def _newest(stands: Sequence[Stand], known: Known, trusted: int | None = None) -> Image | None:
    """The image to go back to, if there is one. `trusted`: none of a later step."""
    failed = {commit for stand in stands for commit in stand.failed}
    mine = [[each for each in stand.kept if trusted is None or each.step <= trusted] for stand in stands]
    return keeping.newest(mine, _rollbacks(stands, known), failed)


def _restored(stands: Sequence[Stand], image: Image, known: Known) -> tuple[Resolved, ...]:
    """All restore, who holds that step too: nothing proves that it is the same commit."""
    former = _rollbacks(stands, known)
    rollbacks = went_back(former, Rollback(known.epoch, image.step))
    audited = min(image.step, max(stand.audited for stand in stands))
    unsure = max(stand.unsure for stand in stands)
    goal = Stand(
        image.step,
        commit_epoch=image.epoch,
        rollbacks=rollbacks,
        verified=image.step,
        audited=audited,
        unsure=unsure,
    )
    places = keeping.places([stand.kept for stand in stands], image)
    return tuple(Resolved(Move.RESTORE, goal, places=places[role], former=former) for role in range(len(stands)))


def _compare(stands: Sequence[Stand], holds: Sequence[bool], shards: int) -> tuple[Stand, list[Move], list[int | None]]:
    """Of who `holds` a state: for each shard the bits that most have count, among as many those of the lowest role."""
    goal = next(stand for stand, has in zip(stands, holds, strict=True) if has)
    moves = [Move.FETCH] * len(stands)
    sources: list[int | None] = []
    for shard in range(shards):
        holders = [role for role in range(shard, len(stands), shards) if holds[role]]
        marks = Counter(stands[role].fingerprint for role in holders)
        right = max(marks, key=marks.__getitem__, default=0)
        alike = [role for role in holders if stands[role].fingerprint == right]
        sources.append(alike[0] if alike else None)
        for role in alike:
            moves[role] = Move.KEEP
    return _settled(replace(goal, unsure=max(stand.unsure for stand in stands))), moves, sources


def _settled(stand: Stand) -> Stand:
    """Without what belongs to this epoch only."""
    return Stand(
        stand.committed,
        commit_epoch=stand.commit_epoch,
        rollbacks=stand.rollbacks,
        verified=stand.verified,
        audited=stand.audited,
        unsure=stand.unsure,
    )


def _rollbacks(stands: Iterable[Stand], known: Known) -> tuple[Rollback, ...]:
    """The longest history that somebody knows, without what was restored in this epoch and did not work out."""
    histories = [known.rollbacks, *(stand.rollbacks for stand in stands)]
    return max((tuple(r for r in history if r.epoch != known.epoch) for history in histories), key=_era)


def _era(rollbacks: Sequence[Rollback]) -> int:
    return rollbacks[-1].epoch if rollbacks else 0

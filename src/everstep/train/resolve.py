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
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace


class Stand(msgspec.Struct, frozen=True, tag=True):
    """What one member holds."""

    committed: int = -1  # steps committed, the index of the next one; -1: no valid state
    commit_epoch: int = 0  # whose gradients made the last commit; 0: the initial or a loaded state
    skipped: bool = False  # the last commit left the parameters as they were (non-finite gradients)
    voted_in: int = 0  # epoch of the complete, reduced gradients in hand for step `committed`; 0: none
    finite: bool = True  # these gradients
    acted_in: int = 0  # the member's epoch before the one of this round
    fresh: bool = False  # without valid state, but its initial one is intact and could start a job

    @property
    def commit(self) -> tuple[int, int]:
        return self.committed, self.commit_epoch


class Move(enum.Enum):
    """What one member does to get to the goal."""

    KEEP = "keep"  # is there; gradients in hand are void
    APPLY = "apply"  # roll forward
    SKIP = "skip"  # roll forward a commit that left the parameters as they were
    FETCH = "fetch"  # copy the state of `source`
    LOST = "lost"  # nobody can get to what is known to be committed, or a shard of it is gone


class Resolved(msgspec.Struct, frozen=True):
    """One member's part. `goal`: its stand afterwards, the same for all."""

    move: Move
    goal: Stand
    source: int = -1  # role to fetch from
    serves: tuple[int, ...] = ()  # roles that fetch from this one
    shard: int = -1  # that nobody holds, if that is why it is lost


def resolve(stands: Sequence[Stand], floor: int, shards: int = 1) -> tuple[Resolved, ...]:
    """The move of each role. `floor`: steps known to be committed."""
    goal, moves = _moves(stands, shards)
    if goal.committed < floor or goal.committed < 0:
        return tuple(Resolved(Move.LOST, goal) for _ in stands)
    sources = [_source(moves, shard, shards) for shard in range(shards)]
    if None in sources:
        return tuple(Resolved(Move.LOST, goal, shard=sources.index(None)) for _ in stands)
    return tuple(_resolved(role, moves, goal, sources[role % shards], shards) for role in range(len(stands)))


def _source(moves: Sequence[Move], shard: int, shards: int) -> int | None:
    """Who gives this shard away. Who is there already has the state sooner than who must still apply."""
    holders = [role for role in range(shard, len(moves), shards) if moves[role] is not Move.FETCH]
    return next((role for role in holders if moves[role] is Move.KEEP), holders[0] if holders else None)


def _resolved(role: int, moves: Sequence[Move], goal: Stand, source: int | None, shards: int) -> Resolved:
    assert source is not None
    if moves[role] is Move.FETCH:
        return Resolved(Move.FETCH, goal, source=source)
    alike = range(role % shards, len(moves), shards)
    copies = tuple(other for other in alike if moves[other] is Move.FETCH)
    return Resolved(moves[role], goal, serves=copies if role == source else ())


def _moves(stands: Sequence[Stand], shards: int) -> tuple[Stand, list[Move]]:
    holders = [stand for stand in stands if stand.committed >= 0]
    if holders:
        goal = next_commit(holders) or _clean(max(holders, key=lambda stand: stand.commit))
        return goal, [_move(stand, goal) for stand in stands]
    alike = [range(shard, len(stands), shards) for shard in range(shards)]
    founders = [next((role for role in roles if stands[role].fresh), None) for roles in alike]
    goal = Stand() if None in founders else Stand(committed=0)
    return goal, [Move.KEEP if role in founders else Move.FETCH for role in range(len(stands))]


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
    return Stand(stand.committed + 1, commit_epoch=stand.voted_in, skipped=skipped)


def _clean(stand: Stand) -> Stand:
    return replace(stand, voted_in=0, finite=True, acted_in=0)


def _move(stand: Stand, goal: Stand) -> Move:
    if stand.commit == goal.commit:
        return Move.KEEP
    if stand.voted_in and (stand.committed + 1, stand.voted_in) == goal.commit:
        return Move.SKIP if goal.skipped else Move.APPLY
    return Move.FETCH

"""How members agree on what is committed, case by case."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep.core.formation import Rollback
from everstep.train.kept import DISK, Kept
from everstep.train.resolve import Known, Move, Resolved, Stand, resolve

FRESH = Stand(fresh=True)
APPLY, FETCH, KEEP, LOST, SKIP = Move.APPLY, Move.FETCH, Move.KEEP, Move.LOST, Move.SKIP


def at(committed: int, voted_in: int = 0, by: int = 1, **changes: Any) -> Stand:
    return Stand(committed, commit_epoch=by, voted_in=voted_in, **{"acted_in": 2, **changes})


CASES = {
    "fresh start": ((FRESH, FRESH), (KEEP, FETCH), 0),
    "the first one spoiled its initial state": ((Stand(), FRESH, FRESH), (FETCH, KEEP, FETCH), 0),
    "nobody has any state": ((Stand(), Stand()), (LOST, LOST), -1),
    "all alike": ((at(5), at(5)), (KEEP, KEEP), 5),
    "joiner": ((FRESH, at(5), at(5)), (FETCH, KEEP, KEEP), 5),
    "some committed": ((at(5, voted_in=2), at(6, by=2)), (APPLY, KEEP), 6),
    "some skipped": ((at(5, voted_in=2), at(6, by=2, skipped=True)), (SKIP, KEEP), 6),
    "all have gradients": ((at(5, voted_in=2), at(5, voted_in=2)), (APPLY, APPLY), 6),
    "one flag is not finite": ((at(5, voted_in=2), at(5, voted_in=2, finite=False)), (SKIP, SKIP), 6),
    "all have gradients but the joiner": ((FRESH, at(5, voted_in=2)), (FETCH, APPLY), 6),
    "one has none": ((at(5, voted_in=2), at(5)), (KEEP, KEEP), 5),
    "gradients of two epochs": ((at(5, voted_in=2), at(5, voted_in=1)), (KEEP, KEEP), 5),
    "gradients of another commit": ((at(5, voted_in=1), at(6, by=2)), (FETCH, KEEP), 6),
    "the same step by another epoch": ((at(6, by=1), at(6, by=2)), (FETCH, KEEP), 6),
    "behind": ((at(3), at(6)), (FETCH, KEEP), 6),
    "a leaver who is behind": ((at(4, voted_in=1, by=1, acted_in=1), at(5, voted_in=2, by=1)), (FETCH, APPLY), 6),
    "a leaver who was not in that epoch": ((at(5, acted_in=1), at(5, voted_in=2)), (FETCH, APPLY), 6),
}


@pytest.mark.parametrize("case", CASES)
def test_moves(case: str) -> None:
    stands, moves, committed = CASES[case]
    resolved = resolve(stands, Known(0))
    assert tuple(r.move for r in resolved) == moves
    assert {r.goal.committed for r in resolved} == {committed}


def test_less_than_what_is_known_is_lost() -> None:
    assert {r.move for r in resolve((at(5), at(5)), Known(6))} == {LOST}
    assert {r.move for r in resolve((at(5, voted_in=2), at(5, voted_in=2)), Known(6))} == {APPLY}
    assert {r.move for r in resolve((FRESH, FRESH), Known(1))} == {LOST}


def test_state_comes_from_who_has_it_first() -> None:
    resolved = resolve((at(5, voted_in=2), FRESH, at(6, by=2), FRESH, at(6, by=2)), Known(0))
    assert [r.source for r in resolved] == [-1, 2, -1, 2, -1]
    assert [r.serves for r in resolved] == [(), (), (1, 3), (), ()]


def test_a_shard_comes_from_who_holds_it() -> None:
    resolved = resolve((at(6, by=2), FRESH, FRESH, at(5, voted_in=2), at(5, voted_in=2), FRESH), Known(0, shards=2))
    assert [r.move for r in resolved] == [KEEP, FETCH, FETCH, APPLY, APPLY, FETCH]
    assert [r.source for r in resolved] == [-1, 3, 0, -1, -1, 3]
    assert [r.serves for r in resolved] == [(2,), (), (), (1, 5), (), ()]


def test_each_shard_has_a_founder() -> None:
    resolved = resolve((FRESH, Stand(), FRESH, FRESH), Known(0, shards=2))
    assert [r.move for r in resolved] == [KEEP, FETCH, FETCH, KEEP]
    assert {r.move for r in resolve((FRESH, Stand(), FRESH, Stand()), Known(0, shards=2))} == {LOST}


def test_a_shard_that_nobody_holds_is_lost() -> None:
    resolved = resolve((at(5), FRESH, at(5), FRESH), Known(0, shards=2))
    assert {(r.move, r.shard) for r in resolved} == {(LOST, 1)}


@st.composite
def possible_stands(draw: st.DrawFn) -> Stand:
    """What a member can hold; each is drawn without regard to the others'."""
    if draw(st.booleans()) and draw(st.booleans()):
        return Stand(fresh=draw(st.booleans()))
    commit_epoch, more, since = (draw(st.integers(0, 2)) for _ in range(3))
    voted_in = commit_epoch + more if more else 0
    return Stand(
        draw(st.integers(0, 3)),
        commit_epoch=commit_epoch,
        skipped=draw(st.booleans()),
        voted_in=voted_in,
        finite=draw(st.booleans()),
        acted_in=max(commit_epoch, voted_in) + since,
    )


def reached(stand: Stand, resolved: Resolved) -> tuple[int, int, int]:
    """The commit a member is at after its move."""
    if resolved.move in (APPLY, SKIP):
        return stand.era, stand.committed + 1, stand.voted_in
    return resolved.goal.commit if resolved.move is FETCH else stand.commit


@given(stands=st.lists(possible_stands(), min_size=1, max_size=6), floor=st.integers(0, 3))
def test_whatever_they_hold_all_get_to_one_commit(stands: list[Stand], floor: int) -> None:
    resolved = resolve(stands, Known(floor))
    (goal,) = {r.goal for r in resolved}
    if LOST in {r.move for r in resolved}:
        assert goal.committed < max(floor, 0) or goal.committed < 0
        return
    assert goal.committed >= max(floor, *(s.committed for s in stands))
    fetching = tuple(role for role, r in enumerate(resolved) if r.move is FETCH)
    for role, (stand, part) in enumerate(zip(stands, resolved, strict=True)):
        if stand.committed >= 0:
            assert reached(stand, part) == goal.commit
        if part.move is FETCH:
            source = resolved[part.source]
            assert source.move is not FETCH and role in source.serves == fetching
        assert part.serves in ((), fetching)


# What is kept --------------------------------------------------------------------------------------------

RESTORE = Move.RESTORE
IN_TWO = (Kept(6, 0, 2, epoch=3), Kept(6, 1, 2, epoch=3))


def keeping(stand: Stand, *kept: Kept) -> Stand:
    return replace(stand, kept=kept)


def test_live_state_comes_before_anything_kept() -> None:
    resolved = resolve((at(5), keeping(FRESH, Kept(5, DISK, 1), Kept(9, 0, 1))), Known(floor=5))
    assert [r.move for r in resolved] == [KEEP, FETCH]


def test_the_newest_whole_state_is_restored_by_all() -> None:
    stands = (
        keeping(at(8), IN_TWO[0], Kept(8, 0, 2, epoch=3), Kept(4, DISK, 2, epoch=1)),
        keeping(FRESH, IN_TWO[1], Kept(7, 1, 2, epoch=3)),
    )
    resolved = resolve(stands, Known(floor=8, shards=2, epoch=9))
    assert {(r.move, r.goal) for r in resolved} == {(RESTORE, Stand(6, 3, rollbacks=(Rollback(9, 6),), verified=6))}
    assert [r.places for r in resolved] == [(0, 1), (0, 1)]


def test_shards_of_two_commits_are_not_mixed() -> None:
    stands = (keeping(FRESH, Kept(6, 0, 2, epoch=3)), keeping(FRESH, Kept(6, 1, 2, epoch=4), Kept(2, DISK, 5)))
    resolved = resolve(stands, Known(floor=8, shards=2, epoch=9))
    assert {(r.goal.committed, r.places) for r in resolved} == {(2, (DISK,) * 5)}


def test_memory_before_disk_and_the_own_node_before_others() -> None:
    stands = [keeping(FRESH, *mine) for mine in (IN_TWO, (), IN_TWO[1:], (Kept(6, DISK, 2, epoch=3),))]
    resolved = resolve(stands, Known(floor=1, epoch=9))
    assert [r.places for r in resolved] == [(0, 0), (0, 2), (0, 2), (0, 2)]


def test_what_was_rolled_back_stays_so() -> None:
    stands = (keeping(FRESH, Kept(6, 0, 1, epoch=3), Kept(8, 0, 1, epoch=3), Kept(7, 0, 1, epoch=5)),)
    (resolved,) = resolve(stands, Known(floor=7, epoch=9, rollbacks=(Rollback(4, 6),)))
    assert (resolved.goal.committed, resolved.goal.rollbacks) == (7, (Rollback(4, 6), Rollback(9, 7)))


def test_a_floor_of_before_a_rollback_does_not_count() -> None:
    knows = at(6, rollbacks=(Rollback(4, 5),))
    assert {r.move for r in resolve((knows, knows), Known(floor=9))} == {KEEP}
    assert {r.move for r in resolve((knows, knows), Known(floor=9, rollbacks=(Rollback(4, 5),)))} == {LOST}


def test_a_job_in_which_nothing_was_ever_kept_starts_over() -> None:
    resolved = resolve((FRESH, FRESH), Known(floor=7, epoch=9, scratch=True))
    assert {r.goal for r in resolved} == {Stand(0, rollbacks=(Rollback(9, 0),))}
    assert [r.move for r in resolved] == [KEEP, FETCH]
    assert {r.move for r in resolve((Stand(), FRESH), Known(floor=7, epoch=9, shards=2, scratch=True))} == {LOST}


def restored(fingerprint: int) -> Stand:
    return Stand(6, 3, rollbacks=(Rollback(9, 6),), restored=True, fingerprint=fingerprint)


def test_after_a_restore_most_are_right() -> None:
    known = Known(floor=8, epoch=9)
    resolved = resolve([restored(mark) for mark in (1, 2, 2, 3)], known)
    assert [(r.move, r.source) for r in resolved] == [(FETCH, 1), (KEEP, -1), (KEEP, -1), (FETCH, 1)]
    assert {r.goal for r in resolved} == {Stand(6, 3, rollbacks=(Rollback(9, 6),))}
    assert [r.move for r in resolve((restored(2), restored(1)), known)] == [KEEP, FETCH]
    assert [r.move for r in resolve((Stand(failed=((6, 3),)), restored(1)), known)] == [FETCH, KEEP]


def test_what_nobody_could_restore_is_left_out() -> None:
    failed = keeping(Stand(failed=((6, 3),)), *IN_TWO, Kept(4, DISK, 2, epoch=1))
    resolved = resolve((replace(restored(1), kept=IN_TWO), failed), Known(floor=8, shards=2, epoch=9))
    assert {(r.move, r.goal) for r in resolved} == {(RESTORE, Stand(4, 1, rollbacks=(Rollback(9, 4),), verified=4))}
    assert {r.move for r in resolve((failed, Stand(failed=((4, 1),))), Known(floor=8, shards=2, epoch=9))} == {LOST}


def test_what_was_thrown_away_stays_so_when_a_restore_does_not_work_out() -> None:
    """Going back to step 2 makes it needless to know that steps after 2 were thrown away once; until it fails."""
    known = Known(floor=3, epoch=5, rollbacks=(Rollback(4, 2),))
    images = Kept(3, 0, 1, epoch=3), Kept(2, DISK, 1, epoch=3)  # step 3 of epoch 3 was thrown away in epoch 4
    (first,) = resolve((keeping(FRESH, *images),), known)
    assert (first.move, first.goal.rollbacks, first.former) == (RESTORE, (Rollback(5, 2),), (Rollback(4, 2),))
    for heard in (known, replace(known, rollbacks=())):
        failed = Stand(rollbacks=first.former, failed=((2, 3),), kept=images)
        assert {r.move for r in resolve((failed,), heard)} == {LOST}
    worked = Stand(2, 3, rollbacks=first.goal.rollbacks, restored=True, kept=images)  # of one shard; not of the other
    assert {r.move for r in resolve((worked, failed), replace(known, shards=2))} == {LOST}


# Replicas that differ ------------------------------------------------------------------------------------


def doubted(fingerprint: int, *kept: Kept, verified: int = 6) -> Stand:
    return Stand(9, 3, doubted=True, fingerprint=fingerprint, verified=verified, kept=kept)


def test_replicas_that_differ_go_back_to_when_they_were_alike() -> None:
    images = Kept(4, 0, 1, epoch=3), Kept(6, 0, 1, epoch=3), Kept(8, 0, 1, epoch=3), Kept(9, DISK, 1, epoch=3)
    unaware = at(9, by=3, voted_in=3, verified=6)  # left the epoch before it saw the vote
    resolved = resolve((doubted(1, *images), doubted(2), unaware, FRESH), Known(floor=9, epoch=9))
    assert {(r.move, r.goal.committed, r.goal.verified, r.trusted) for r in resolved} == {(RESTORE, 6, 6, 6)}
    void = Stand(doubted=True, verified=6, failed=((6, 3),))
    resolved = resolve((replace(void, kept=images), void), Known(floor=9, epoch=9))
    assert {(r.move, r.goal.committed) for r in resolved} == {(RESTORE, 4)}


def test_without_a_trusted_state_who_differs_copies() -> None:
    late = Kept(8, 0, 1, epoch=3)
    stands = (doubted(1, late), doubted(2), doubted(2), doubted(0), at(9, by=3))
    resolved = resolve(stands, Known(floor=9, epoch=9))
    assert [(r.move, r.source) for r in resolved] == [(FETCH, 1), (KEEP, -1), (KEEP, -1), (FETCH, 1), (FETCH, 1)]
    assert {(r.goal.committed, r.goal.doubted, r.trusted) for r in resolved} == {(9, False, 6)}
    void = Stand(doubted=True, verified=6, kept=(late,))
    assert {(r.move, r.goal.committed) for r in resolve((void, void), Known(floor=9, epoch=9))} == {(RESTORE, 8)}
    assert {r.move for r in resolve((replace(void, kept=()),) * 2, Known(floor=9, epoch=9))} == {LOST}


def test_who_has_gone_back_already_is_right() -> None:
    back = at(6, by=3, rollbacks=(Rollback(8, 6),))
    resolved = resolve((doubted(1, Kept(4, 0, 1, epoch=3)), back), Known(floor=9, epoch=9))
    assert [(r.move, r.goal.committed) for r in resolved] == [(FETCH, 6), (KEEP, 6)]

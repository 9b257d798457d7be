"""How members agree on what is committed, case by case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.train.resolve import Known, Move, Resolved, Stand, resolve

FRESH = Stand(fresh=True)
APPLY, FETCH, KEEP, LOST, SKIP = Move.APPLY, Move.FETCH, Move.KEEP, Move.LOST, Move.SKIP


def at(committed: int, voted_in: int = 0, by: int = 1, **changes: bool | int) -> Stand:
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

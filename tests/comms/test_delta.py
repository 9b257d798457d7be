"""Which links a change of members needs: only those of the members that changed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.comms.delta import dials, leaving, missing
from everstep.core.formation import Formation, Seat

WORKERS = st.lists(
    st.sampled_from([f"n{i}/{j}#{k}" for i in range(3) for j in range(3) for k in range(2)]), unique=True
)


def formation(epoch: int, workers: list[str]) -> Formation:
    return Formation(epoch, tuple(Seat(w, "n", "h", "h:1") for w in workers), abort=False, floor=0)


@given(WORKERS, WORKERS)
def test_after_a_change_there_are_exactly_the_links_of_the_new_formation(before: list[str], after: list[str]) -> None:
    for me in after:
        have = dict.fromkeys({*before} - {me}, 1) if me in before else {}
        opened = {seat.worker for seat in missing(me, have, formation(2, after))}
        ended = leaving(have, formation(2, after))
        assert ({*have} | opened) - ended == {*after} - {me}
        assert not opened & {*have} and ended <= {*have}
        if me in before:
            assert opened == {*after} - {*before}, "a link between stayers was opened"


@given(WORKERS)
def test_each_link_is_dialed_by_one_side(workers: list[str]) -> None:
    for one in workers:
        for other in workers:
            assert dials(one, other) + dials(other, one) == (one != other)


def test_links_for_a_later_epoch_are_kept() -> None:
    have = {"left": 4, "joins": 6, "stays": 4}
    assert leaving(have, formation(5, ["me", "stays"])) == {"left"}
    assert leaving(have, formation(6, ["me", "stays"])) == {"left", "joins"}


def test_the_order_of_seats_is_kept_and_nobody_is_missing_himself() -> None:
    seats = missing("b", {"c"}, formation(1, ["d", "c", "b", "a"]))
    assert [seat.worker for seat in seats] == ["d", "a"]

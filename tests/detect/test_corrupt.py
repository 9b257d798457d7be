"""Who is wrong when replicas differ: with a flipped bit in any member, at any step between two comparisons."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.detect.corrupt import NAMED, Judged, Odd, Replay, judge, odd, parts

GOOD = 7


@given(st.integers(1, 3), st.integers(2, 4), st.data())
def test_who_differs_from_replicas_that_agree_is_wrong(shards: int, replicas: int, data: st.DataObject) -> None:
    marks = [GOOD + role % shards for role in range(shards * replicas)]
    assert odd(marks, shards) is None
    wrong = data.draw(st.integers(0, len(marks) - 1))
    marks[wrong] = data.draw(st.integers(1, 2**64 - 1).filter(lambda mark: mark != marks[wrong]))
    alike = tuple(range(wrong % shards, len(marks), shards))
    assert odd(marks, shards) == (Odd((wrong,), sure=True) if replicas > 2 else Odd(alike, sure=False))


def test_who_told_nothing_is_not_compared() -> None:
    assert odd([3, 0, 3]) is None and odd([0, 5]) is None
    assert odd([3, 4, 0]) == Odd((0, 1), sure=False)
    assert odd([3, 3, 4, 5]) == Odd((2, 3), sure=True)
    assert odd([3, 3, 4, 4]) == Odd((0, 1, 2, 3), sure=False)


def test_parts_that_differ_have_names() -> None:
    assert parts(["a", "b", "c"], [[1, 2, 3], [1, 2, 4], [1, 5, 3]]) == ("b", "c")
    assert parts(["a", "b"], [[1, 2], [3, 4], [1, 9], [3, 4]], shards=2) == ("b",)
    assert len(parts([str(i) for i in range(50)], [[0] * 50, [1] * 50])) == NAMED
    assert parts(["a"], [[1], []]) == ()  # a member whose optimizer has no state yet


@given(st.integers(2, 5), st.integers(0, 8), st.data())
def test_the_steps_done_again_show_who_was_wrong(members: int, steps: int, data: st.DataObject) -> None:
    """The wrong one's gradients differ from the step after the flip on, those of the others a step later."""
    wrong, flip = data.draw(st.integers(0, members - 1)), data.draw(st.integers(0, steps))
    right = {step: tuple(100 * step + role + 1 for role in range(members)) for step in range(steps + 1)}

    def told(step: int) -> tuple[int, ...]:
        from_now_on = {wrong} if step == flip else set(range(members)) if step > flip else set()
        return tuple(trace + 10**6 * (role in from_now_on) for role, trace in enumerate(right[step]))

    late = data.draw(st.booleans())  # after the last gradients
    marks = tuple(GOOD + (role == wrong if late else 1 + (role == wrong)) for role in range(members))
    traces = right if late else {step: told(step) for step in right}
    replay = Replay(steps, marks, traces, tuple(range(members)))
    answers = [judge(replay, step, right[step], [GOOD] * members) for step in right]
    first = next(answer for answer in answers if answer.over)
    assert first.roles == (wrong,)
    assert all(not answer.roles for answer in answers[: answers.index(first)])


def test_what_cannot_be_told_is_not() -> None:
    replay = Replay(4, (1, 2), {4: (8, 9)}, (0, 1))
    assert judge(replay, 4, (5, 6), (3, 3)) == Judged(over=True)  # both differ
    assert judge(replay, 4, (8, 9, 9), (1, 1, 1)) == Judged(over=True)  # the shares are others'
    assert judge(replay, 5, (8, 9), (1, 1)) == Judged(over=True)
    assert judge(replay, 3, (8, 9), (1, 1)) == Judged(over=False)  # was not told
    assert judge(replay, 4, (0, 9), (2, 2)) == Judged(over=True, roles=(0,))


def test_of_a_replica_in_shards_the_suspect_is_wrong() -> None:
    """Two replicas of two shards, roles 0 and 1, 2 and 3. The second computes with a wrong shard 1."""
    marks = (3, 5, 3, 6)
    suspects = odd(marks, shards=2)
    assert suspects == Odd((1, 3), sure=False)
    replay = Replay(7, marks, {6: (1, 2, 30, 40), 7: (10, 20, 31, 41)}, suspects.roles)
    assert judge(replay, 6, (1, 2, 3, 4), (0,) * 4) == Judged(over=True, roles=(3,))

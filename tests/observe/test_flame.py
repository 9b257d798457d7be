"""The flame graph's layout and its table, of a few stacks."""

from __future__ import annotations

import pytest

from everstep.core.sampled import Function, Sampled, Stack
from everstep.observe import flame

MAIN, LOOP, DEEP, ODD = (
    Function("main", "train.py", 1, "script"),
    Function("loop", "train.py", 9, "script"),
    Function("Linear.forward", "torch/nn/linear.py", 100, "torch"),
    Function("<lambda>&co", "a<b>.py", 5, "library"),
)


def sampled(*stacks: Stack, longest_s: float = 0.01) -> Sampled:
    return Sampled((MAIN, LOOP, DEEP, ODD), stacks, len(stacks), 2.0, longest_s, 0.01)


def test_boxes_are_as_wide_as_their_share() -> None:
    of = sampled(Stack("m", (0, 1, 2), 104, 600), Stack("m", (0, 1), 10, 150), Stack("m", (0, 3), 5, 250))
    found = {(box.name, box.depth): (box.left, box.share) for box in flame.boxes(of)}
    assert found == {
        ("main", 0): (0.0, pytest.approx(1.0)),
        ("loop", 1): (0.0, pytest.approx(0.75)),
        ("Linear.forward", 2): (0.0, pytest.approx(0.6)),
        ("<lambda>&co", 1): (pytest.approx(0.75), pytest.approx(0.25)),
    }


def test_several_threads_stand_side_by_side() -> None:
    of = sampled(Stack("MainThread", (0,), 2, 700), Stack("loader", (0, 1), 9, 300))
    assert [(box.name, box.depth) for box in flame.boxes(of)] == [
        ("MainThread", 0), ("main", 1), ("loader", 0), ("main", 1), ("loop", 2),
    ]  # fmt: skip


def test_the_table_counts_recursion_once_and_names_the_line() -> None:
    of = sampled(Stack("m", (0, 1, 1, 1), 12, 500), Stack("m", (0, 1), 11, 300), Stack("m", (0,), 3, 200))
    assert [(own.name, own.where, own.own, own.total) for own in flame.top(of)] == [
        ("loop", "train.py:12", pytest.approx(0.8), pytest.approx(0.8)),
        ("main", "train.py:3", pytest.approx(0.2), pytest.approx(1.0)),
    ]
    assert flame.summary(of) == "80% loop, 20% main"


def test_what_is_too_narrow_to_see_is_left_out_and_nothing_is_no_error() -> None:
    of = sampled(Stack("m", (0, 1), 9, 1_000_000), Stack("m", (0, 3), 5, 900))
    assert [box.name for box in flame.boxes(of)] == ["main", "loop"]
    nothing = sampled()
    assert flame.boxes(nothing) == [] and flame.summary(nothing) == "no sample"
    assert "<svg" in flame.document(nothing, "rank 0")


def test_the_page_needs_nothing_and_escapes_names() -> None:
    page = flame.document(sampled(Stack("m", (0, 3), 5, 900), longest_s=1.5), "rank <3>")
    assert "<script" not in page and "http" not in page and "rank <3>" not in page
    assert "<title>&lt;lambda&gt;&amp;co (a&lt;b&gt;.py:5): 100.0%</title>" in page
    assert "For 1.5 s at a time no sample could be taken" in page

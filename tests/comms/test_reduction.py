"""Sums in a fixed order and a stated precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from everstep.comms.reduction import Op, Reducer, validate


def fold(op: Op, xs: list[Tensor], groups: list[list[int]] | None = None, into: int | None = None) -> Tensor:
    out = torch.empty_like(xs[0]) if into is None else xs[into]
    Reducer(op, xs[0].dtype, groups or [list(range(len(xs)))]).fold(xs, out)
    return out


def halves(*values: float) -> list[Tensor]:
    return [torch.tensor([value], dtype=torch.float16) for value in values]


def test_sums_of_halves_are_rounded_once() -> None:
    assert fold(Op.SUM, halves(2048, 1, 1)).item() == 2050.0  # rounded each time it would stay 2048


def test_with_groups_halves_are_rounded_once_a_level() -> None:
    assert fold(Op.SUM, halves(2048, 1, 1), [[0], [1, 2]]).item() == 2050.0
    assert fold(Op.SUM, halves(2048, 1, 1), [[0, 1], [2]]).item() == 2048.0


def test_an_average_of_halves_does_not_overflow_on_the_way() -> None:
    assert fold(Op.AVG, halves(60_000, 60_000)).item() == 60_000.0


def test_the_order_is_that_of_the_ranks() -> None:
    xs = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    assert fold(Op.SUM, xs).item() == 0.0
    assert fold(Op.SUM, xs, [[0, 2], [1]]).item() == 1.0


def test_integers_wrap_and_bools_are_joined() -> None:
    assert fold(Op.SUM, [torch.tensor([200], dtype=torch.uint8)] * 2).item() == 144
    assert fold(Op.SUM, [torch.tensor([True]), torch.tensor([True])]).item() is True
    assert fold(Op.PRODUCT, [torch.tensor([True]), torch.tensor([False])]).item() is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("groups", [None, [[0, 2], [1, 3]]])
@pytest.mark.parametrize("into", range(4))
def test_the_result_may_go_into_any_of_the_sources(dtype: torch.dtype, groups: list[list[int]], into: int) -> None:
    make = lambda: [torch.arange(5).to(dtype) * (i + 1) for i in range(4)]  # noqa: E731
    expected = fold(Op.SUM, make(), groups)
    assert torch.equal(fold(Op.SUM, make(), groups, into), expected)


def test_nan_stays() -> None:
    for op in (Op.MIN, Op.MAX, Op.SUM):
        assert fold(op, [torch.tensor([1.0]), torch.tensor([float("nan")]), torch.tensor([2.0])]).isnan().all()


@pytest.mark.parametrize(
    ("op", "dtype", "why"),
    [
        (Op.AVG, torch.int64, "no average of torch.int64"),
        (Op.BAND, torch.float32, "no BAND of torch.float32"),
        (Op.SUM, torch.complex64, "no reduction of torch.complex64"),
    ],
)
def test_there_is_no_such_reduction(op: Op, dtype: torch.dtype, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        validate(op, dtype)

"""Every collective against what one process makes of the same inputs, in real processes: one host, TCP, mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from everstep.comms.board import SLOT_BYTES
from everstep.comms.reduction import DTYPES, Op

HALVES = (torch.float16, torch.bfloat16)
INTEGERS = tuple(d for d in DTYPES if not d.is_floating_point)
PAIRS = [
    (op, dtype)
    for op in Op
    for dtype in DTYPES
    if not (op is Op.AVG and dtype in INTEGERS) and not (op.name.startswith("B") and dtype not in INTEGERS)
]
# Hosts of the ranks, and their groups.
LAYOUTS: list[tuple[tuple[str, ...], tuple[int, ...]]] = [
    (("a",), ()),
    (("a",) * 2, ()),
    (("a",) * 3, ()),
    (("a",) * 5, ()),
    (("a",) * 4, (0, 1, 0, 1)),
    (("a", "a", "b"), ()),
    (("a", "a", "b", "b", "b"), (0, 0, 1, 1, 1)),
    (("a", "b", "c"), (2, 1, 0)),
]
layouts = st.sampled_from(LAYOUTS)
# Below and above the sizes at which the algorithms change; prime, so that no part is like another.
lengths = st.sampled_from([0, 1, 2, 17, 1009, 70_001, 150_001])
short = st.sampled_from([0, 1, 17, 1009, 40_009])
slow = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(dtype: torch.dtype, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(length, generator=generator) * 3).to(dtype)
    low, high = (0, 2) if dtype is torch.bool else (torch.iinfo(dtype).min // 2, torch.iinfo(dtype).max // 2)
    return torch.randint(low, high, (length,), generator=generator).to(dtype)


def combined(op: Op, xs: list[Tensor]) -> Tensor:
    """One by one in order, in the precision that is documented; no average yet."""
    dtype = xs[0].dtype
    if dtype is torch.bool:
        xs = [x.to(torch.uint8) for x in xs]
    if dtype in HALVES and op in (Op.SUM, Op.AVG, Op.PRODUCT):
        xs = [x.float() for x in xs]
    total = xs[0]
    for x in xs[1:]:
        match op:
            case Op.SUM | Op.AVG:
                total = total | x if dtype is torch.bool else total + x
            case Op.PRODUCT:
                total = total * x
            case Op.MIN:
                total = torch.where(x < total, x, total)
            case Op.MAX:
                total = torch.where(x > total, x, total)
            case Op.BAND:
                total = total & x
            case Op.BOR:
                total = total | x
            case Op.BXOR:
                total = total ^ x
    return total


def reference(op: Op, xs: list[Tensor], groups: tuple[int, ...]) -> Tensor:
    dtype = xs[0].dtype
    if groups:
        members = [[x for x, group in zip(xs, groups, strict=True) if group == g] for g in sorted(set(groups))]
        total = combined(op, [combined(op, group).to(dtype) for group in members])
    else:
        total = combined(op, xs)
    return (total / len(xs) if op is Op.AVG else total).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def inputs(dtype: torch.dtype, length: int, count: int, seed: int) -> list[Tensor]:
    return [make(dtype, length, seed * 100 + i) for i in range(count)]


@slow
@given(layouts, st.sampled_from(PAIRS), lengths, st.integers(0, 999))
def test_all_reduce(ranks: Any, layout: Any, pair: tuple[Op, torch.dtype], length: int, seed: int) -> None:
    (hosts, groups), (op, dtype) = layout, pair
    ranks.enter(hosts, groups)
    xs = inputs(dtype, length, len(hosts), seed)
    for out, *_ in ranks.do("all_reduce", [(x, op) for x in xs]):
        assert same(out, reference(op, xs, groups))


@slow
@given(layouts, st.sampled_from(PAIRS), lengths, st.integers(0, 999))
def test_all_reduce_in_the_arena(ranks: Any, layout: Any, pair: tuple[Op, torch.dtype], length: int, seed: int) -> None:
    (hosts, groups), (op, dtype) = layout, pair
    ranks.enter(hosts, groups)
    xs = inputs(dtype, length, len(hosts), seed)
    for out in ranks.each("shared", [(x, op) for x in xs]):
        assert same(out, reference(op, xs, groups))


@slow
@given(layouts, st.sampled_from(PAIRS), lengths, st.integers(0, 999), st.booleans())
def test_reduce_scatter(ranks: Any, layout: Any, pair: Any, length: int, seed: int, single: bool) -> None:
    (hosts, groups), (op, dtype) = layout, pair
    ranks.enter(hosts, groups)
    n = len(hosts)
    xs = [inputs(dtype, length, n, seed + i) for i in range(n)]
    outs = torch.empty(length, dtype=dtype)
    if single:
        answers = ranks.do("reduce_scatter_single", [(outs, torch.cat(x), op) for x in xs])
    else:
        answers = ranks.do("reduce_scatter", [(outs, x, op) for x in xs])
    for q, (out, *_) in enumerate(answers):
        assert same(out, reference(op, [x[q] for x in xs], groups))


@slow
@given(layouts, st.sampled_from(PAIRS), lengths, st.integers(0, 999))
def test_reduce(ranks: Any, layout: Any, pair: Any, length: int, seed: int) -> None:
    (hosts, groups), (op, dtype) = layout, pair
    ranks.enter(hosts, groups)
    root = seed % len(hosts)
    xs = inputs(dtype, length, len(hosts), seed)
    for rank, (out, *_) in enumerate(ranks.do("reduce", [(x, root, op) for x in xs])):
        assert same(out, reference(op, xs, groups) if rank == root else xs[rank])


@slow
@given(layouts, st.sampled_from([*DTYPES, torch.complex64]), lengths, st.integers(0, 999))
def test_what_only_moves(ranks: Any, layout: Any, dtype: torch.dtype, length: int, seed: int) -> None:
    hosts = layout[0]
    ranks.enter(*layout)
    n, root = len(hosts), seed % len(hosts)
    xs = [x.to(dtype) for x in inputs(torch.float32, length, n, seed)]
    empty = torch.zeros(length, dtype=dtype)
    for outs, *_ in ranks.do("all_gather", [([empty.clone() for _ in xs], x) for x in xs]):
        assert all(map(same, outs, xs))
    for out, *_ in ranks.do("all_gather_single", [(torch.zeros(n * length, dtype=dtype), x) for x in xs]):
        assert same(out, torch.cat(xs))
    for out, *_ in ranks.do("broadcast", [(x, root) for x in xs]):
        assert same(out, xs[root])
    answers = ranks.do("gather", [([empty.clone() for _ in xs] if r == root else None, xs[r], root) for r in range(n)])
    assert all(map(same, answers[root][0], xs))
    answers = ranks.do("scatter", [(empty.clone(), xs if r == root else None, root) for r in range(n)])
    assert all(map(same, [out for out, *_ in answers], xs))


@slow
@given(layouts, st.sampled_from(DTYPES), st.data())
def test_all_to_all(ranks: Any, layout: Any, dtype: torch.dtype, data: st.DataObject) -> None:
    ranks.enter(*layout)
    n = len(layout[0])
    splits = [[data.draw(short) for _ in range(n)] for _ in range(n)]
    xs = [[make(dtype, splits[p][q], 10 * p + q) for q in range(n)] for p in range(n)]
    outs = [[torch.empty(splits[p][q], dtype=dtype) for p in range(n)] for q in range(n)]
    for q, (got, *_) in enumerate(ranks.do("all_to_all", list(zip(outs, xs, strict=True)))):
        assert all(map(same, got, [x[q] for x in xs]))
    taken = [[splits[p][q] for p in range(n)] for q in range(n)]
    calls = [(torch.cat(outs[r]), torch.cat(xs[r]), taken[r], splits[r]) for r in range(n)]
    for q, (got, *_) in enumerate(ranks.do("all_to_all_single", calls)):
        assert same(got, torch.cat([x[q] for x in xs]))


def test_all_to_all_of_more_than_a_slot(ranks: Any) -> None:
    ranks.enter(("a", "a", "b"))
    xs = [[make(torch.uint8, 5_000_000 * (p == 0), q) for q in range(3)] for p in range(3)]
    outs = [[torch.zeros_like(xs[p][q]) for p in range(3)] for q in range(3)]
    for q, (got, *_) in enumerate(ranks.do("all_to_all", list(zip(outs, xs, strict=True)))):
        assert all(map(same, got, [x[q] for x in xs]))


@slow
@given(layouts, st.lists(st.binary(max_size=3000), min_size=5, max_size=5))
def test_bytes(ranks: Any, layout: Any, payloads: list[bytes]) -> None:
    ranks.enter(*layout)
    mine = payloads[: len(layout[0])]
    for _, result in ranks.do("all_gather_bytes", [(payload,) for payload in mine]):
        assert result == mine


@pytest.mark.parametrize("hosts", [("a",) * 3, ("a", "b", "b")])
def test_tensors_that_are_not_contiguous(ranks: Any, hosts: tuple[str, ...]) -> None:
    ranks.enter(hosts)
    xs = [make(torch.float32, 30_000, i).view(100, 300) for i in range(3)]
    for out in ranks.each("transposed", [("all_reduce", x, (Op.SUM,)) for x in xs]):
        assert torch.equal(out, reference(Op.SUM, xs, ()))
    for out in ranks.each("transposed", [("broadcast", x, (1,)) for x in xs]):
        assert torch.equal(out, xs[1])


@pytest.mark.parametrize("size", [3, 5])
def test_longer_than_several_slots(ranks: Any, size: int) -> None:
    ranks.enter(("a",) * size)
    xs = [make(torch.float32, SLOT_BYTES // 4 + 300_007, i) for i in range(size)]
    for out, *_ in ranks.do("all_reduce", [(x, Op.AVG) for x in xs]):
        assert same(out, reference(Op.AVG, xs, ()))
    for out, *_ in ranks.do("all_gather_single", [(torch.empty(size * len(xs[0])), x) for x in xs]):
        assert same(out, torch.cat(xs))


def test_the_same_bits_by_every_way(ranks: Any) -> None:
    """Neither placement, nor transport, nor arena changes a sum that depends on its order."""
    xs = [make(torch.float32, 400_009, i) * 10.0 ** (i * 2) for i in range(4)]
    for groups in ((), (0, 0, 1, 1)):
        sums = []
        for hosts in ("aaaa", "aabb", "abab", "abcd"):
            ranks.enter(tuple(hosts), groups)
            sums += [out for out, *_ in ranks.do("all_reduce", [(x, Op.SUM) for x in xs])]
            sums += ranks.each("shared", [(x, Op.SUM) for x in xs])
        assert all(same(total, reference(Op.SUM, xs, groups)) for total in sums)


@pytest.mark.parametrize("hosts", [("a",) * 3, ("a", "a", "b"), ("a", "b", "c")])
@pytest.mark.parametrize(
    ("call", "other"),
    [
        ((torch.ones(10), Op.SUM), (torch.ones(11), Op.SUM)),
        ((torch.ones(10), Op.SUM), (torch.ones(10, dtype=torch.float64), Op.SUM)),
        ((torch.ones(10), Op.SUM), (torch.ones(10), Op.MAX)),
        ((torch.ones(1_000_000), Op.SUM), (torch.ones(2_000_000), Op.SUM)),
        ((torch.ones(0), Op.SUM), (torch.ones(3), Op.SUM)),
    ],
)
def test_all_hear_that_calls_differ(ranks: Any, hosts: tuple[str, ...], call: Any, other: Any) -> None:
    ranks.enter(hosts)
    ranks.ask("do", [("all_reduce", 0, None, other if rank == 1 else call) for rank in range(3)])
    for done, error in ranks.answers(3):
        assert not done and "members called different collectives" in str(error)
    for out, *_ in ranks.do("all_reduce", [(torch.ones(5), Op.SUM)] * 3):  # and they can go on
        assert out.tolist() == [3.0] * 5


def test_all_hear_of_different_collectives(ranks: Any) -> None:
    ranks.enter(("a",) * 3)
    calls = [
        ("broadcast", 0, None, (torch.ones(4), 0)),
        ("broadcast", 0, None, (torch.ones(4), 1)),
        ("barrier", 0, None, ()),
    ]
    ranks.ask("do", calls)
    for done, error in ranks.answers(3):
        assert not done and "members called different collectives" in str(error)
    sizes = [[torch.ones(2)] * 3, [torch.ones(2)] * 3, [torch.ones(2), torch.ones(3), torch.ones(2)]]
    ranks.ask("do", [("all_to_all", 0, None, ([torch.empty(2)] * 3, x)) for x in sizes])
    for done, error in ranks.answers(3):
        assert not done and "rank 2 sends 12 bytes to rank 1, which expects 8" in str(error)


def test_what_cannot_be_reduced_is_refused(ranks: Any) -> None:
    ranks.enter(("a",) * 2)
    for tensor, op in (
        (torch.ones(3, dtype=torch.int32), Op.AVG),
        (torch.ones(3), Op.BXOR),
        (torch.ones(1) * 1j, Op.SUM),
    ):
        with pytest.raises(ValueError, match="no "):
            ranks.do("all_reduce", [(tensor, op)] * 2)


def test_communicators_that_share_members_at_once(ranks: Any) -> None:
    """From several threads, while messages go round, over one host and over several."""
    for hosts in ("aaaa", "aabb"):
        ranks.enter(tuple(hosts))
        sums = ranks.each("storm", [(7, 20)] * 4)
        expected = {i: sum(sum(r + k + 7 for r in range(4) if r != i) for k in range(20)) for i in range(4)}
        assert sums == [sorted(float(expected[i]) for i in range(4) if i != me) for me in range(4)]

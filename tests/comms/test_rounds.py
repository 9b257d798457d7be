"""What happens to collectives when an epoch ends under them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from everstep.comms.collectives import Communicator
from everstep.comms.reduction import Op
from everstep.comms.rounds import Rounds, first, nothing
from everstep.comms.signature import Kind, Signature
from everstep.core.errors import EpochBroken


def test_a_peer_in_a_later_epoch_never_feeds_an_earlier_one(crew: Any) -> None:
    """Both have published, so there is nothing to wait for; but what is read now may be of the next epoch."""
    fabrics = [crew.make(f"a/{i}#0") for i in range(2)]
    tables = crew.enter(1, fabrics)
    rounds = [Rounds(table, 0, (0, 1)) for table in tables]
    for each in rounds:
        each.begin(torch.uint8)[:4] = each.rank + 1
        each.publish(first(4))
    slots = rounds[0].meet(torch.uint8)
    assert slots[1][:4].tolist() == [2] * 4
    rounds[0].check()
    later = Rounds(fabrics[1].switch(crew.formation(2, fabrics)), 0, (0, 1))
    later.begin(torch.uint8)[:4] = 9
    with pytest.raises(EpochBroken, match="role 1 is in a later epoch"):
        rounds[0].check()
    with pytest.raises(EpochBroken, match="role 1 is in a later epoch"):
        rounds[0].begin(torch.uint8)


def test_a_slot_is_not_written_before_all_have_read_it(crew: Any) -> None:
    fabrics = [crew.make(f"a/{i}#0") for i in range(3)]
    rounds = [Rounds(table, 0, (0, 1, 2)) for table in crew.enter(1, fabrics)]

    def publish(each: Rounds) -> None:
        each.begin(torch.uint8)
        each.publish(nothing)

    for _ in range(2):
        for each in rounds:
            publish(each)
    publish(rounds[0])
    publish(rounds[1])
    early = crew.pool.submit(rounds[0].begin, torch.uint8)  # role 2 may still read round 2, but round 4 has its slot
    time.sleep(0.05)
    assert not early.done()
    publish(rounds[2])
    early.result(5)


def test_a_sum_in_the_arena_ends_when_all_have_read_it(crew: Any) -> None:
    """Its owner may change the buffer at once, and nothing says when it does."""
    fabrics = [crew.make(f"a/{i}#0") for i in range(2)]
    tables = crew.enter(1, fabrics)
    buffers = [fabric.allocate(400).view(torch.float32).fill_(i + 1.0) for i, fabric in enumerate(fabrics)]
    early = crew.pool.submit(Communicator(fabrics[0]).all_reduce_shared, buffers[0])
    slow = Rounds(tables[1], 0, (0, 1))
    slow.sign(Signature(Kind.ALL_REDUCE_SHARED, torch.float32, 100, Op.SUM.value), slow.offset_of(buffers[1]))
    for _ in range(2):  # the announcement, and the round in which the sums can be read
        slow.step()
    time.sleep(0.05)
    assert not early.done() and buffers[0][0] == 3.0
    slow.step()
    early.result(5)


def test_an_output_may_lie_in_an_input(crew: Any) -> None:
    fabrics = [crew.make(f"a/{i}#0") for i in range(4)]
    crew.enter(1, fabrics)
    communicators = [Communicator(fabric) for fabric in fabrics]
    xs = [torch.arange(8.0) + 10 * i for i in range(4)]
    expected = sum(xs[1:], xs[0]).view(4, 2)
    list(crew.pool.map(lambda c, x: c.reduce_scatter_single(x[2 * c.rank : 2 * c.rank + 2], x), communicators, xs))
    assert all(torch.equal(x[2 * i : 2 * i + 2], expected[i]) for i, x in enumerate(xs))
    xs = [torch.arange(4.0) + 10 * i for i in range(4)]
    list(crew.pool.map(lambda c, x: c.all_to_all_single(x, x), communicators, xs))
    assert [x.tolist() for x in xs] == [[i, 10 + i, 20 + i, 30 + i] for i in range(4)]
    list(crew.pool.map(lambda c, x: c.all_gather_single(x, x[c.rank : c.rank + 1]), communicators, xs))
    assert all(x.tolist() == [0, 11, 22, 33] for x in xs)
    pairs = [[torch.full((3,), 10.0 * i + q) for q in range(4)] for i in range(4)]
    list(crew.pool.map(lambda c, pair: c.all_to_all(pair[::-1], pair), communicators, pairs))
    assert [[float(x[0]) for x in pair[::-1]] for pair in pairs] == [[10.0 * p + i for p in range(4)] for i in range(4)]


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_an_abort_ends_waits_and_stays(crew: Any, hosts: tuple[str, ...]) -> None:
    fabrics = [crew.make(f"{host}/{i}#0", host) for i, host in enumerate(hosts)]
    crew.enter(1, fabrics)
    c = Communicator(fabrics[0])
    waits: list[Callable[[], Any]] = [
        c.barrier,  # the first waits for the others, the second for the first
        lambda: c.all_reduce(torch.ones(1_000_000)),
        lambda: Communicator(fabrics[0], 1).all_gather_bytes(b"x"),
        lambda: Communicator(fabrics[0], 2).broadcast(torch.ones(3), 1),
    ]
    futures = [crew.pool.submit(wait) for wait in waits]
    time.sleep(0.1)  # they should be in the middle of it; a test of one who is not would pass too
    fabrics[0].abort(1, "a death")
    for future in futures:
        with pytest.raises(EpochBroken, match="epoch 1 is broken: a death"):
            future.result(5)
    with pytest.raises(EpochBroken):
        c.barrier()
    for fabric in fabrics:
        fabric.abort(1, "a death")
    crew.enter(2, fabrics)
    both = [crew.pool.submit(Communicator(fabric).all_gather_bytes, b"y") for fabric in fabrics]
    assert [future.result(5) for future in both] == [[b"y", b"y"]] * 2


def test_identity_survives_a_change_of_members(crew: Any) -> None:
    fabrics = [crew.make(f"a/{i}#0") for i in range(3)]
    crew.enter(1, fabrics)
    communicators = [Communicator(fabric) for fabric in fabrics]

    def total(members: int) -> list[float]:
        xs = [torch.tensor([float(i + 1)]) for i in range(members)]
        list(crew.pool.map(lambda c, x: c.all_reduce(x, Op.SUM), communicators[:members], xs))
        return [float(x) for x in xs]

    assert total(3) == [6.0] * 3
    crew.enter(2, fabrics[:2])
    assert total(2) == [3.0] * 2 and communicators[0].size == 2
    crew.enter(3, fabrics)
    assert total(3) == [6.0] * 3


def test_an_interrupt_in_a_collective_breaks_the_epoch(crew: Any) -> None:
    """A round is missing then: better the next call says so than that it hears what was meant for this one."""
    fabrics = [crew.make(f"a/{i}#0") for i in range(2)]
    crew.enter(1, fabrics)
    c = Communicator(fabrics[0])

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            c.barrier()
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(EpochBroken, match="KeyboardInterrupt"):
        c.barrier()


def test_who_is_no_member_is_told(crew: Any) -> None:
    fabrics = [crew.make(f"a/{i}#0") for i in range(3)]
    crew.enter(1, fabrics)
    with pytest.raises(ValueError, match=r"role 2 is not in communicator 4, which has \(0, 1\)"):
        Communicator(fabrics[2], 4, (0, 1)).barrier()


@pytest.mark.parametrize(("index", "roles"), [(-1, None), (256, None), (0, ()), (0, (1, 1))])
def test_wrong_communicators(crew: Any, index: int, roles: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match="index|roles"):
        Communicator(crew.make("a/0#0"), index, roles)


def test_lists_of_the_wrong_shape(crew: Any) -> None:
    fabrics = [crew.make(f"a/{i}#0") for i in range(2)]
    crew.enter(1, fabrics)
    c, x = Communicator(fabrics[0]), torch.ones(4)
    for call in (
        lambda: c.all_gather([x], x),
        lambda: c.all_gather([x, torch.ones(5)], x),
        lambda: c.all_gather_single(torch.ones(9), x),
        lambda: c.reduce_scatter_single(torch.ones(3), x),
        lambda: c.gather(None, x, 0),
        lambda: c.gather([x, x], x, 1),
        lambda: c.broadcast(x, 2),
        lambda: c.all_to_all_single(torch.ones(3), x),
        lambda: c.all_to_all_single(x, x, [1, 2], None),
        lambda: c.all_reduce_shared(x),
    ):
        with pytest.raises(ValueError):
            call()

"""Messages between two: their order, their size, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from everstep.comms.board import RING_BYTES
from everstep.comms.collectives import Communicator
from everstep.comms.p2p import Outbox
from everstep.core.errors import EpochBroken

HOSTS = [("a", "a", "a"), ("a", "b", "c")]


@pytest.fixture(params=HOSTS, ids=["one host", "three hosts"])
def three(crew: Any, request: pytest.FixtureRequest) -> list[Communicator]:
    fabrics = [crew.make(f"{host}/{i}#0", host) for i, host in enumerate(request.param)]
    crew.enter(1, fabrics)
    return [Communicator(fabric) for fabric in fabrics]


def all_of(crew: Any, *calls: Callable[[], Any]) -> list[Any]:
    """At the same time; their results."""
    return [future.result(20) for future in [crew.pool.submit(call) for call in calls]]


def receive(c: Communicator, src: int, length: int, tag: int = 0) -> torch.Tensor:
    out = torch.empty(length)
    c.recv(out, src, tag)
    return out


def test_one_tag_keeps_its_order_and_tags_do_not_wait_for_each_other(crew: Any, three: Any) -> None:
    def send() -> None:
        for i in range(5):
            three[0].send(torch.full((3,), float(i)), 1, tag=7)
        three[0].send(torch.full((2,), 99.0), 1, tag=8)

    def take() -> list[float]:
        first = float(receive(three[1], 0, 2, tag=8)[0])
        return [first, *(float(receive(three[1], 0, 3, tag=7)[0]) for _ in range(5))]

    assert all_of(crew, send, take)[1] == [99.0, 0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, RING_BYTES // 4, RING_BYTES + 3, RING_BYTES * 3 + 1])
def test_any_length(crew: Any, three: Any, length: int) -> None:
    """Twice, so that the ring is entered in the middle; both ways at once."""
    x = torch.arange(length, dtype=torch.float32)
    for _ in range(2):
        sends = [lambda: three[0].send(x, 1), lambda: three[1].send(x, 0)]
        takes = [lambda: receive(three[1], 0, length), lambda: receive(three[0], 1, length)]
        assert all(torch.equal(y, x) for y in all_of(crew, *sends, *takes)[2:])


def test_other_dtypes_and_layouts(crew: Any, three: Any) -> None:
    x = torch.arange(12).view(3, 4).to(torch.bfloat16).T
    y = torch.zeros(4, 3, dtype=torch.bfloat16).T.contiguous().T
    all_of(crew, lambda: three[2].send(x, 0), lambda: three[0].recv(y, 2))
    assert torch.equal(x, y)


def test_what_does_not_fit_is_said_and_passed_over(crew: Any, three: Any) -> None:
    def send() -> None:
        three[0].send(torch.ones(4), 1)
        three[0].send(torch.ones(4, dtype=torch.int32), 1)
        three[0].send(torch.full((4,), 5.0), 1)

    def take() -> torch.Tensor:
        with pytest.raises(ValueError, match="sent 16 bytes of torch.float32 with tag 0, but 20 bytes"):
            receive(three[1], 0, 5)
        with pytest.raises(ValueError, match="16 bytes of torch.int32 with tag 0, but 16 bytes of torch.float32"):
            receive(three[1], 0, 4)
        return receive(three[1], 0, 4)

    assert all_of(crew, send, take)[1].tolist() == [5.0] * 4


def test_communicators_do_not_get_each_others(crew: Any, three: Any) -> None:
    other = [Communicator(c._fabric, 1, (1, 0)) for c in three[:2]]

    def send() -> None:
        other[0].send(torch.ones(1), 0)
        three[0].send(torch.zeros(1), 1)

    _, a, b = all_of(crew, send, lambda: receive(three[1], 0, 1), lambda: receive(other[1], 1, 1))
    assert (float(a), float(b)) == (0.0, 1.0)


def test_several_threads_at_once(crew: Any, three: Any) -> None:
    """Each of the three sends to both others, with two tags, long and short."""

    def send(me: int, to: int, tag: int) -> None:
        for i in range(10):
            three[me].send(torch.full((100_000 if tag else 10,), float(100 * me + i)), to, tag)

    def take(me: int, of: int, tag: int) -> bool:
        got = [receive(three[me], of, 100_000 if tag else 10, tag) for _ in range(10)]
        return all(bool((x == 100 * of + i).all()) for i, x in enumerate(got))

    pairs = [(me, to, tag) for me in range(3) for to in range(3) for tag in (0, 1) if me != to]
    calls = [lambda p=p: send(*p) for p in pairs] + [lambda p=p: take(*p) for p in pairs]
    assert all(all_of(crew, *calls)[len(pairs) :])


def test_an_abort_ends_every_kind_of_wait(crew: Any, three: Any) -> None:
    long = torch.zeros(RING_BYTES * 8)  # too long for the ring and for the buffers of a socket

    def ended(call: Callable[[], Any]) -> None:
        with pytest.raises(EpochBroken) as caught:
            call()
        assert caught.value.epoch == 1 and caught.value.why == "a death"

    waits = [
        lambda: three[0].send(long, 1),
        lambda: three[0].send(long, 1, tag=2),  # behind the first
        lambda: receive(three[0], 2, 5),
        lambda: receive(three[0], 2, 5, tag=2),  # while the first takes what comes
    ]
    futures = [crew.pool.submit(ended, wait) for wait in waits]
    time.sleep(0.1)  # they should be in the middle of it; a test of one who is not would pass too
    crew.fabrics[0].abort(1, "a death")
    for future in futures:
        future.result(5)
    ended(lambda: three[0].send(torch.zeros(1), 1))


def test_a_new_epoch_begins_with_nothing_on_the_way(crew: Any, three: Any) -> None:
    three[0].send(torch.ones(3), 1)
    crew.enter(2, crew.fabrics[:2])
    sent = lambda: three[0].send(torch.zeros(3), 1)  # noqa: E731
    assert all_of(crew, sent, lambda: receive(three[1], 0, 3))[1].tolist() == [0.0] * 3


def test_a_sender_in_a_later_epoch_never_feeds_an_earlier_one(crew: Any) -> None:
    """The message is there, but from the moment its ring is another epoch's it may be written over."""
    fabrics = [crew.make(f"a/{i}#0", "a") for i in range(2)]
    crew.enter(1, fabrics)
    Communicator(fabrics[0]).send(torch.ones(3), 1)
    Outbox(fabrics[0].switch(crew.formation(2, fabrics)), 1)
    with pytest.raises(EpochBroken, match="role 0 is in a later epoch"):
        receive(Communicator(fabrics[1]), 0, 3)


@pytest.mark.parametrize(("dst", "tag", "why"), [(0, 0, "to itself"), (3, 0, "ranks are 0 to 2"), (1, -1, "tag -1")])
def test_wrong_arguments(three: Any, dst: int, tag: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        three[0].send(torch.ones(1), dst, tag)

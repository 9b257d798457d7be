"""Groups of a library, one for each epoch: made beside the one in use, ended from outside. gloo, real processes."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator, Sequence

import inner_member
import msgspec
import pytest
import torch
import warm

from everstep.core.errors import EpochBroken, UsageError
from everstep.core.formation import Formation, Seat
from everstep.train.inner import Inner


class Member:
    """A process, and the socket over which it is told what to do."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._rest = b""
        self.seat: Seat | None = None

    @property
    def pid(self) -> int:
        assert self.seat is not None
        return int(self.seat.worker)

    def tell(self, text: str) -> None:
        self.sock.sendall(text.encode() + b"\n")

    def says(self) -> str:
        while b"\n" not in self._rest:
            said = self.sock.recv(1 << 16)
            assert said, "it is gone"
            self._rest += said
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


@pytest.fixture
def members() -> Iterator[list[Member]]:
    ours, theirs = zip(*(socket.socketpair() for _ in range(4)), strict=True)
    processes = [warm.context().Process(target=inner_member.run, args=(end,)) for end in theirs]
    for process, end in zip(processes, theirs, strict=True):
        process.start()
        end.close()
    made = [Member(sock) for sock in ours]
    try:
        for member in made:
            member.seat = msgspec.json.decode(member.says(), type=Seat)
            member.sock.settimeout(25)
        yield made
    finally:
        for member in made:
            member.sock.close()
        for process in processes:
            process.kill()
            process.join()
            process.close()


def formation(epoch: int, members: Sequence[Member]) -> str:
    seats = tuple(member.seat for member in members if member.seat is not None)
    return msgspec.json.encode(Formation(epoch, seats, abort=False, floor=0)).decode()


def each(members: Sequence[Member], command: str) -> list[str]:
    for member in members:
        member.tell(command)
    return [member.says() for member in members]


def enter(epoch: int, members: Sequence[Member]) -> None:
    told = formation(epoch, members)
    assert each(members, f"prepare {told}") == ["prepared"] * len(members)
    assert each(members, f"switch {told}") == ["switched"] * len(members)


def test_a_group_is_made_beside_the_one_in_use(members: list[Member]) -> None:
    first, second = members[:3], [members[1], members[3], members[2]]
    enter(1, first)
    assert each(first, "sum 1") == ["sum 3"] * 3
    told = formation(2, second)
    assert each(second, f"prepare {told}") == ["prepared"] * 3
    assert each(first, "sum 2") == ["sum 6"] * 3
    assert each(second, f"switch {told}") == ["switched"] * 3
    assert each(second, "sum 5") == ["sum 15"] * 3


def test_an_abort_wakes_who_waits_for_a_stopped_member(members: list[Member]) -> None:
    group = members[:3]
    enter(1, group)
    os.kill(members[2].pid, signal.SIGSTOP)
    for member in group[:2]:
        member.tell("sum 1")
    assert not select.select([member.sock for member in group[:2]], [], [], 0.3)[0], "nobody waited"
    assert [(member.tell("abort 1"), member.says())[1] for member in group[:2]] == ["broken 1"] * 2
    following = [members[0], members[1], members[3]]
    enter(2, following)
    assert each(following, "sum 1") == ["sum 3"] * 3


def test_an_abort_wakes_who_waits_where_shut_sockets_do_not(members: list[Member]) -> None:
    pair = members[:2]
    enter(1, pair)
    pair[0].tell("deafen")
    pair[0].tell("sum 1")
    pair[0].tell("abort 1")
    assert pair[0].says() == "broken 1"
    enter(2, pair)
    assert each(pair, "sum 1") == ["sum 2"] * 2


def test_a_death_breaks_the_epoch_and_the_next_one_works(members: list[Member]) -> None:
    group = members[:3]
    enter(1, group)
    os.kill(members[0].pid, signal.SIGKILL)  # it served the meeting, too
    for member in group[1:]:
        member.tell("sum 1")
    assert group[1].says() == "broken 1"  # and shuts its own sockets, so the last one hears of it
    assert group[2].says() == "broken 1"
    enter(2, members[1:])
    assert each(members[1:], "sum 1") == ["sum 3"] * 3


def test_what_was_prepared_for_an_epoch_that_is_over_is_ended(members: list[Member]) -> None:
    enter(1, members[:2])
    assert each(members[:2], f"prepare {formation(2, members[:2])}") == ["prepared"] * 2
    for member in members[:2]:
        member.tell("abort 2")
    assert each(members[:2], "sum 1") == ["broken 1"] * 2


def test_what_is_prepared_too_late_is_not_used(members: list[Member]) -> None:
    pair = members[:2]
    enter(1, pair)
    for member in pair:
        member.tell("abort 2")
    told = formation(2, pair)
    # Who is first ends its group at once, perhaps while the other one still connects.
    assert set(each(pair, f"prepare {told}")) <= {"prepared", "no group"}
    assert each(pair, f"switch {told}") == ["switched"] * 2
    assert each(pair, "sum 1") == ["broken 2"] * 2


def test_a_switch_ends_what_waits_in_the_epoch_before(members: list[Member]) -> None:
    pair = members[:2]
    enter(1, pair)
    pair[0].tell("sum 1")  # the other one takes no part
    told = formation(2, pair)
    assert each(pair, f"prepare {told}") == ["prepared"] * 2
    for member in pair:
        member.tell(f"switch {told}")
    assert {pair[0].says(), pair[0].says()} == {"switched", "broken 1"}
    assert pair[1].says() == "switched"


def test_an_unknown_library_is_refused() -> None:

    with pytest.raises(UsageError, match="gloo, nccl"):
        Inner("mpi", "a", "127.0.0.1", torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nccl_on_a_device() -> None:
    """A world of one: NCCL wants a device for each member."""
    device = torch.device("cuda", 0)
    inner = Inner("nccl", "a", "127.0.0.1", device)
    try:
        for epoch in (1, 2):
            told = Formation(epoch, (Seat("a", "a", "host", "127.0.0.1:9", inner.store),), abort=False, floor=0)
            inner.prepare(told)
            inner.switch(told)
            tensor = torch.full((5,), 3.0, device=device)
            inner.all_reduce(tensor)
            assert tensor.tolist() == [3.0] * 5
        inner.abort(2)
        with pytest.raises(EpochBroken):
            inner.all_reduce(tensor)
    finally:
        inner.close()

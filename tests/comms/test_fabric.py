"""Change of members: only missing links are opened, none between stayers, and an abort reaches whatever waits."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from everstep.comms.fabric import Fabric, Superseded
from everstep.comms.link import LinkError
from everstep.comms.table import Table
from everstep.core.errors import EpochBroken
from everstep.core.formation import Formation, Seat

if TYPE_CHECKING:
    from tests.comms.conftest import Crew

MARK = b"m" * 16
NOBODY = memoryview(b"")


def opened(fabrics: Sequence[Fabric]) -> list[tuple[int, int]]:
    return [(fabric.counts.dialed, fabric.counts.accepted) for fabric in fabrics]


def ring(crew: Crew, tables: Sequence[Table], channel: int = 0, number: int = 1) -> None:
    """Everybody sends its role to the next and gets that of the one before."""
    size = len(tables)
    into = [bytearray(1) for _ in tables]

    def turn(role: int) -> None:
        sends = {(role + 1) % size: memoryview(bytes([role]))}
        tables[role].exchange(channel, number, MARK, sends, {(role - 1) % size: memoryview(into[role])})

    list(crew.pool.map(turn, range(size)))
    assert [data[0] for data in into] == [(role - 1) % size for role in range(size)]


def silent() -> socket.socket:
    """Takes connections and says nothing, as a worker that was stopped."""
    return socket.create_server(("127.0.0.1", 0))


def seat_at(worker: str, sock: socket.socket) -> Seat:
    return Seat(worker, "node", "elsewhere", f"127.0.0.1:{sock.getsockname()[1]}")


def sockets() -> int:
    gc.collect()  # those of other tests
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except FileNotFoundError:  # the listing's own
            continue
    return found


def abstract_names() -> set[str]:
    return {word for word in Path("/proc/net/unix").read_text().split() if word.startswith("@")}


# Links ---------------------------------------------------------------------------------------------------


def test_only_the_links_of_a_joiner_are_opened(crew: Crew) -> None:
    fabrics = [crew.make(f"n/{i}#0", host=f"h{i}") for i in range(8)]
    tables = crew.enter(1, fabrics[:7])
    assert sum(dialed for dialed, _ in opened(fabrics)) == sum(accepted for _, accepted in opened(fabrics)) == 21
    ring(crew, tables)
    before = opened(fabrics)
    streams = [table.peer(1 - role % 2).streams for role, table in enumerate(tables)]
    tables = crew.enter(2, [fabrics[7], *fabrics[:7]])  # other roles for everybody
    now = opened(fabrics)
    assert now[7] == (0, 7)
    assert [(b[0] + 1, b[1]) for b in before[:7]] == now[:7]
    ring(crew, tables)
    ring(crew, crew.enter(3, fabrics[:7]))
    assert opened(fabrics) == now, "a link was opened although nobody joined"
    assert [table.peer(1 - role % 2).streams for role, table in enumerate(crew.enter(4, fabrics[:7]))] == streams


def test_workers_of_one_host_see_each_others_boards_and_keep_no_connection(crew: Crew) -> None:
    fabrics = [crew.make(f"n/{i}#0") for i in range(4)]
    before = sockets()
    tables = crew.enter(1, fabrics)
    assert sockets() == before
    for role, fabric in enumerate(fabrics):
        fabric.board.words[0] = 100 + role
        fabric.allocate(10)[:] = role
    for table in tables:
        boards = [table.peer(role).board for role in range(4)]
        assert [board and board.words[0] for board in boards] == [100, 101, 102, 103]
        assert [board and int(board.arena[9]) for board in boards] == [0, 1, 2, 3]


@pytest.mark.parametrize("sides", [("h0", "h1", True, True), ("h", "h", False, True), ("h", "h", True, False)])
def test_workers_that_cannot_share_memory_use_tcp(
    crew: Crew, sides: tuple[str, str, bool, bool], capfd: pytest.CaptureFixture[str]
) -> None:
    fabrics = [crew.make("a", sides[0], sides[2]), crew.make("b", sides[1], sides[3])]
    tables = crew.enter(1, fabrics)
    assert tables[0].peer(1).board is None and tables[1].peer(0).board is None
    ring(crew, tables)
    assert capfd.readouterr().err == ""  # nothing strange: it was asked for


def test_mixed_hosts(crew: Crew) -> None:
    fabrics = [crew.make(f"n/{i}#0", host=f"h{i // 2}") for i in range(4)]
    tables = crew.enter(1, fabrics)
    local = [[table.peer(role).board is not None for role in range(4)] for table in tables]
    assert local == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2


def test_further_channels_are_opened_when_used_by_either_side_alone(crew: Crew) -> None:
    fabrics = [crew.make("a", "h0"), crew.make("b", "h1")]
    tables = crew.enter(1, fabrics)
    for role in (0, 1):  # the one that dials, and the one that calls
        tables[role].exchange(5 + role, 1, MARK, {1 - role: memoryview(b"x")}, {})
    for role in (0, 1):
        into = bytearray(1)
        tables[1 - role].exchange(5 + role, 1, MARK, {}, {role: memoryview(into)})
        assert into == b"x"
    assert fabrics[0].counts.dialed == fabrics[1].counts.accepted == 3
    ring(crew, crew.enter(2, fabrics), channel=6)
    assert fabrics[0].counts.dialed == fabrics[1].counts.accepted == 3


def test_both_sides_use_a_new_channel_at_once(crew: Crew) -> None:
    fabrics = [crew.make(f"n/{i}#0", host=f"h{i}") for i in range(4)]
    tables = crew.enter(1, fabrics)
    for channel in range(1, 20):
        ring(crew, tables, channel)
    assert sum(fabric.counts.dialed for fabric in fabrics) == 6 + 19 * 4
    assert sum(fabric.counts.accepted for fabric in fabrics) == 6 + 19 * 4


def test_leavers_are_let_go(crew: Crew) -> None:
    fabrics = [crew.make(f"n/{i}#0", host=f"h{i}") for i in range(3)]
    tables = crew.enter(1, fabrics)
    waiting = crew.pool.submit(tables[2].exchange, 0, 1, MARK, {}, {0: memoryview(bytearray(1))})
    tables = crew.enter(2, fabrics[:2])
    with pytest.raises(EpochBroken, match="lost the link to n/0#0"):
        waiting.result(4)
    ring(crew, tables)


def test_a_link_that_broke_is_opened_again(crew: Crew) -> None:
    fabrics = [crew.make("a", "h0"), crew.make("b", "h1")]
    tables = crew.enter(1, fabrics)
    for role in (0, 1):
        tables[role].peer(1 - role).streams[0].end()
        tables = crew.enter(2 + role, fabrics)
        ring(crew, tables)
    assert opened(fabrics) == [(3, 0), (0, 3)]


# Two phases ----------------------------------------------------------------------------------------------


def test_prepare_twice_opens_nothing(crew: Crew) -> None:
    fabrics = [crew.make("a"), crew.make("b", "other")]
    tables = crew.enter(1, fabrics)
    now = opened(fabrics)
    formation = crew.formation(1, fabrics)
    for fabric in fabrics:
        fabric.prepare(formation)
    assert opened(fabrics) == now and fabrics[0].table is tables[0]


def test_switch_opens_nothing(crew: Crew) -> None:
    fabrics = [crew.make("a"), crew.make("b")]
    with pytest.raises(RuntimeError, match="in no epoch"):
        _ = fabrics[0].table
    with pytest.raises(LinkError, match="no link to worker b: formation 1 was not prepared"):
        fabrics[0].switch(crew.formation(1, fabrics))
    with pytest.raises(ValueError, match="worker b has no seat in formation 1"):
        fabrics[1].switch(crew.formation(1, fabrics[:1]))
    crew.enter(3, fabrics)
    for epoch in (2, 3):
        with pytest.raises(ValueError, match="epochs only grow"):
            fabrics[0].switch(crew.formation(epoch, fabrics))


def test_a_newer_formation_ends_the_preparation_of_an_older_one(crew: Crew) -> None:
    fabrics = [crew.make("a"), crew.make("b")]
    crew.enter(1, fabrics)
    with silent() as stopped:
        seats = (*map(crew.seat, fabrics), seat_at("c", stopped))
        waiting = crew.pool.submit(fabrics[0].prepare, Formation(2, seats, abort=False, floor=0))
        assert select.select([stopped], [], [], 5)[0]
        ring_of = crew.enter(3, fabrics)
        with pytest.raises(Superseded):
            waiting.result(4)
        with pytest.raises(Superseded):
            fabrics[0].prepare(Formation(2, seats, abort=False, floor=0))
    assert ring_of[0].epoch == fabrics[0].table.epoch == 3


def test_cancel(crew: Crew) -> None:
    fabric = crew.make("z")
    for epoch, argument in ((1, None), (2, 2)):
        with silent() as stopped:  # it would have to dial us
            seats = (crew.seat(fabric), seat_at("a", stopped))
            waiting = crew.pool.submit(fabric.prepare, Formation(epoch, seats, abort=False, floor=0))
            assert select.select([stopped], [], [], 5)[0]  # it is called
            fabric.cancel(argument)
            with pytest.raises(Superseded):
                waiting.result(4)
    fabric.cancel(7)
    with pytest.raises(Superseded):
        fabric.prepare(Formation(7, seats, abort=False, floor=0))
    fabric.prepare(crew.formation(8, [fabric]))


def test_who_never_dials_is_named(crew: Crew) -> None:
    fabric = crew.make("z")
    with silent() as stopped:
        formation = Formation(1, (crew.seat(fabric), seat_at("a", stopped)), abort=False, floor=0)
        with pytest.raises(LinkError, match="no link to worker a: it did not connect within 0.2 s"):
            fabric.prepare(formation, timeout_s=0.2)


def test_one_dead_member_does_not_undo_the_other_links(crew: Crew) -> None:
    fabrics = [crew.make("a", "h0"), crew.make("b", "h1")]
    with silent() as gone:
        dead = seat_at("c", gone)
    formation = Formation(1, (*map(crew.seat, fabrics), dead), abort=False, floor=0)
    for result in [crew.pool.submit(fabric.prepare, formation) for fabric in fabrics]:
        with pytest.raises(LinkError, match="no link to worker c"):
            result.result(5)
    ring(crew, crew.enter(2, fabrics))
    assert fabrics[0].counts.dialed == fabrics[1].counts.accepted == 1


# Abort ---------------------------------------------------------------------------------------------------


def waiting_for_each_other(crew: Crew, tables: Sequence[Table]) -> list[Future[dict[int, bytes]]]:
    return [
        crew.pool.submit(table.exchange, 0, 1, MARK, {}, {1 - role: memoryview(bytearray(1))})
        for role, table in enumerate(tables)
    ]


def test_abort_wakes_whatever_waits_and_leaves_the_links(crew: Crew) -> None:
    fabrics = [crew.make("a", "h0"), crew.make("b", "h1")]
    tables = crew.enter(1, fabrics)
    waiting = waiting_for_each_other(crew, tables)
    for fabric in fabrics:
        fabric.abort(7, "another epoch")
    assert not any(work.done() for work in waiting)
    for fabric in fabrics:
        fabric.abort(1, "a member died")
        fabric.abort(1, "and again")
    for work in waiting:
        with pytest.raises(EpochBroken, match="epoch 1 is broken: a member died") as caught:
            work.result(0.5)
        assert (caught.value.epoch, caught.value.why) == (1, "a member died")
    ring(crew, crew.enter(2, fabrics))
    assert opened(fabrics) == [(1, 0), (0, 1)]


def test_abort_before_the_switch(crew: Crew) -> None:
    fabrics = [crew.make("a", "h0"), crew.make("b", "h1")]
    crew.enter(1, fabrics)
    fabrics[0].abort(2, "died early")
    tables = crew.enter(2, fabrics)
    with pytest.raises(EpochBroken, match="died early"):
        tables[0].exchange(0, 1, MARK, {1: NOBODY}, {})
    with pytest.raises(EpochBroken, match="died early"):
        tables[0].check()
    ring(crew, crew.enter(3, fabrics))


def test_the_table_of_an_epoch_that_is_over_raises(crew: Crew) -> None:
    fabrics = [crew.make("a", "h0"), crew.make("b", "h1")]
    old = crew.enter(1, fabrics)
    waiting = waiting_for_each_other(crew, old)
    crew.enter(2, fabrics)
    for work in waiting:
        with pytest.raises(EpochBroken, match="epoch 2 began"):
            work.result(0.5)


def test_abort_from_a_signal_handler(crew: Crew) -> None:
    fabrics = [crew.make("a", "h0"), crew.make("b", "h1")]
    tables = crew.enter(1, fabrics)
    before = signal.signal(signal.SIGUSR1, lambda *_: fabrics[0].abort(1, "by a signal"))
    try:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        with pytest.raises(EpochBroken, match="by a signal"):
            tables[0].exchange(0, 1, MARK, {}, {1: memoryview(bytearray(1))})
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_abort_while_a_channel_is_opened(crew: Crew) -> None:
    fabric = crew.make("a", "h0")
    other = crew.make("b", "h1")
    table = crew.enter(1, [fabric, other])[0]
    other.close()
    with silent() as stopped:
        table.seats = (table.seats[0], seat_at("b", stopped))
        waiting = crew.pool.submit(table.exchange, 9, 1, MARK, {1: NOBODY}, {})
        assert select.select([stopped], [], [], 5)[0]
        fabric.abort(1, "a member died")
        with pytest.raises(EpochBroken, match="a member died"):
            waiting.result(0.5)


def test_close_wakes_whatever_waits_and_the_other_side_notices(crew: Crew) -> None:
    fabrics = [crew.make("a", "h0"), crew.make("b", "h1")]
    waiting = waiting_for_each_other(crew, crew.enter(1, fabrics))
    fabrics[0].close()
    fabrics[0].close()
    for work, why in zip(waiting, ("this worker has left", "lost the link to a"), strict=True):
        with pytest.raises(EpochBroken, match=why):
            work.result(0.5)


def test_the_arena_ends(crew: Crew) -> None:
    fabric = crew.make("a")
    one, two = fabric.allocate(5000), fabric.allocate(1)
    one[:], two[:] = 1, 2
    assert one.data_ptr() % 64 == two.data_ptr() % 64 == 0 and int(one.sum()) == 5000
    with pytest.raises(ValueError, match="do not fit"):
        fabric.allocate(1 << 50)


def test_nothing_is_left_behind(crew: Crew) -> None:
    names = abstract_names()
    shm = set(os.listdir("/dev/shm"))
    crew.enter(1, [crew.make(f"n/{i}#0") for i in range(3)])
    assert set(os.listdir("/dev/shm")) <= shm
    assert abstract_names() <= names

"""A worker that ends as it should: what it had sent arrives, and who hangs holds it up for a while at most."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from everstep.comms import stream
from everstep.comms.table import Table
from everstep.core.errors import EpochBroken

if TYPE_CHECKING:
    from tests.comms.conftest import Crew

MARK = b"m" * 16
SIZE = 2 << 20  # more than the kernel hands over before somebody reads, less than it takes from the sender


@pytest.fixture
def tables(crew: Crew) -> list[Table]:
    return crew.enter(1, [crew.make("a", "h0"), crew.make("b", "h1")])


def send(table: Table, data: bytes, number: int = 1) -> None:
    table.exchange(0, number, MARK, {1 - table.role: memoryview(data)}, {})


def leave(crew: Crew, tables: list[Table]) -> None:
    """Close as a session does, and then as the kernel does at the end of the process."""
    connection = tables[0].peer(1).streams[0]._sock
    crew.fabrics[0].close()
    connection.close()


@pytest.mark.parametrize("unread", [False, True], ids=["plainly", "with something unread"])
def test_the_last_message_arrives_after_the_end(crew: Crew, tables: list[Table], unread: bool) -> None:
    """Unread data makes the kernel reset a connection that is closed, and forget what it had not yet handed over."""
    last, into = os.urandom(SIZE), bytearray(SIZE)
    if unread:
        send(tables[1], b"nobody wants this any more")
    send(tables[0], last)
    leaving = crew.pool.submit(leave, crew, tables)
    time.sleep(0.1)  # for a close that does not wait
    tables[1].exchange(0, 1, MARK, {}, {0: memoryview(into)})
    assert into == last
    leaving.result(4)


def test_what_comes_after_the_end_resets_nothing(crew: Crew, tables: list[Table]) -> None:
    """The other side still sends when we are through: for it the epoch is broken, but what we sent is there."""
    last, into = os.urandom(SIZE), bytearray(SIZE)
    send(tables[0], last)
    leaving = crew.pool.submit(leave, crew, tables)
    time.sleep(0.1)
    for number in range(3):
        send(tables[1], bytes(SIZE), number)  # received and thrown away
    tables[1].exchange(0, 1, MARK, {}, {0: memoryview(into)})
    assert into == last
    leaving.result(4)
    with pytest.raises(EpochBroken, match="lost the link to a"):
        tables[1].exchange(0, 2, MARK, {}, {0: memoryview(bytearray(1))})


def test_an_end_waits_for_nobody_who_has_it_all_or_is_dead(crew: Crew, tables: list[Table]) -> None:
    send(tables[0], b"small")  # in the other kernel's hands, read or not
    began = time.monotonic()
    crew.fabrics[0].close()
    assert time.monotonic() - began < stream.FAREWELL_S / 2
    fresh = crew.make("c", "h2")
    tables = crew.enter(2, [fresh, crew.fabrics[1]])
    send(tables[0], bytes(SIZE))
    tables[1].peer(0).streams[0]._sock.close()  # as the kernel does for a process that is killed
    began = time.monotonic()
    fresh.close()
    assert time.monotonic() - began < stream.FAREWELL_S / 2


def test_who_never_reads_holds_nobody_up_for_ever(
    crew: Crew, tables: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "FAREWELL_S", 0.3)
    send(tables[0], bytes(SIZE))
    began = time.monotonic()
    crew.fabrics[0].close()
    assert 0.3 <= time.monotonic() - began < 4.0

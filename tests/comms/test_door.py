"""The door between two workers of a host: only who has the ticket gets a board, and only the right one's is taken."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from everstep.comms import door
from everstep.comms.board import Board

TICKET = b"t" * door.TICKET_BYTES


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    made = [Board.create(name) for name in ("a", "b")]
    for number, board in enumerate(made):
        board.words[0] = 100 + number
    yield made
    for board in made:
        board.close()


def plain(make: Callable[[], socket.socket]) -> socket.socket:
    return make()


def test_who_has_no_ticket_or_no_board_is_sent_away(boards: list[Board]) -> None:
    async def meet() -> tuple[Board, Board]:
        listener, name = door.open_door(plain)
        with listener:
            answer = asyncio.ensure_future(door.answer(listener, TICKET, boards[0], plain))
            with pytest.raises(door.NoDoor):
                await door.enter(name, b"x" * door.TICKET_BYTES, boards[1], plain)
            for says, fds in ((b"", []), (TICKET, []), (b"x" * 100, [boards[1].fd]), (TICKET, [0])):
                await asyncio.to_thread(intrude, name, says, fds)
            entered = await door.enter(name, TICKET, boards[1], plain)
            return entered, await answer

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    theirs, ours = asyncio.run(meet())
    assert (theirs.words[0], ours.words[0]) == (100, 101)
    del theirs, ours  # a mapping keeps a descriptor of its own
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def intrude(name: str, says: bytes, fds: list[int]) -> None:
    """Gets no board, whatever it says."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(bytes.fromhex(name))
        if says:
            socket.send_fds(sock, [says], fds)
        sock.shutdown(socket.SHUT_WR)
        try:
            assert socket.recv_fds(sock, 100, 1)[:2] == (b"", [])
        except ConnectionResetError:
            return  # it did not read what we said


def test_another_board_behind_the_door_is_not_taken(boards: list[Board]) -> None:
    async def meet() -> None:
        listener, name = door.open_door(plain)
        with listener:
            answer = asyncio.to_thread(impostor, listener, boards[0].fd)
            with pytest.raises(door.NoDoor, match="no ticket"):
                await asyncio.gather(door.enter(name, TICKET, boards[1], plain), answer)

    asyncio.run(meet())


def impostor(listener: socket.socket, fd: int) -> None:
    listener.setblocking(True)
    sock, _ = listener.accept()
    with sock:
        sock.recv(100)
        socket.send_fds(sock, [b"x" * door.TICKET_BYTES], [fd])


def test_nobody_behind_the_door(boards: list[Board]) -> None:
    with pytest.raises(door.NoDoor, match="refused"):
        asyncio.run(door.enter(b"\0no-such-door".hex(), TICKET, boards[1], plain))
    with pytest.raises(door.NoDoor):
        asyncio.run(door.enter("no hex", TICKET, boards[1], plain))

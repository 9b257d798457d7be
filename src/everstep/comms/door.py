"""Where two workers of one host give each other their boards: a Unix socket which exists for one handshake.

Its name is abstract, given by the kernel: no file, nothing left behind whoever dies. The ticket, told over the proven
link, lets exactly its dialer in. What cannot work here (another network namespace, another user, no memory to map)
fails on the dialer's side at the latest, and the two use TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import struct
from collections.abc import Callable

from everstep.comms.board import Board

TICKET_BYTES = 32
DOOR_S = 2.0  # the dialer's patience; the listener's ends with its handshake
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

NewSocket = Callable[[Callable[[], socket.socket]], socket.socket]


class NoDoor(Exception):
    """The boards cannot be exchanged; the text says why."""


def open_door(new_socket: NewSocket) -> tuple[socket.socket, str]:
    """A listening socket, and its name."""
    sock = new_socket(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    sock.setblocking(False)
    sock.bind("")  # the kernel chooses a free abstract name
    sock.listen(8)
    return sock, sock.getsockname().hex()


async def answer(door: socket.socket, ticket: bytes, own: Board, new_socket: NewSocket) -> Board:
    """Wait for who has the ticket; the board it brought. Others are sent away. For ever: to be cancelled."""
    while True:
        await readable(door)
        try:
            sock = new_socket(lambda: door.accept()[0])
        except OSError:
            continue  # it is gone again
        with sock:
            sock.setblocking(False)
            try:
                board = await _take(sock, ticket)
                socket.send_fds(sock, [ticket], [own.fd])
                return board
            except (OSError, ValueError, NoDoor):  # no dialer of ours, or one that died
                continue


async def enter(name: str, ticket: bytes, own: Board, new_socket: NewSocket) -> Board:
    """The board of the worker behind a door, against ours. Raises NoDoor."""
    with new_socket(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
        sock.setblocking(False)
        try:
            sock.connect(bytes.fromhex(name))
            socket.send_fds(sock, [ticket], [own.fd])
            return await _take(sock, ticket)
        except (OSError, ValueError) as error:
            raise NoDoor(str(error) or "it took too long") from error


async def _take(sock: socket.socket, ticket: bytes) -> Board:
    """The board that comes with the ticket. Raises NoDoor, OSError."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
        raise NoDoor("it runs as another user")
    async with asyncio.timeout(DOOR_S):
        await readable(sock)
    said, fds, _, _ = socket.recv_fds(sock, len(ticket), 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if not fds or not hmac.compare_digest(said, ticket):
            raise NoDoor("it has no ticket, or no board")
        board = Board.attach(fds[0])
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    board.close()  # this descriptor only: the mapping has one of its own
    return board


async def readable(sock: socket.socket) -> None:
    """Until there is something to read or to accept."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        with contextlib.suppress(ValueError):  # closed meanwhile
            loop.remove_reader(sock)

"""Bandwidth between nodes: a ring in which every member sends to the next and receives from the one before.

The pattern of a ring all-reduce: a member sends its next chunk only when the one from before has come, so the whole
ring goes at the pace of its slowest link. A ring of one is the loop back of a machine to itself, a ring of two a pair.
Over sockets of its own: who connects and who is connected to prove that they hold the token (core.proof). Every
chunk is compared with what was sent.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

from everstep.core.checkup import Place, RingDone
from everstep.core.proof import NONCE_BYTES, new_nonce, prove, proves

CHUNK = 1 << 20  # bytes
SETUP_S = 10.0  # for the two connections of a ring
STALL_S = 10.0  # without a byte
CALLER, CALLED = b"everstep ring caller", b"everstep ring called"
MAC_BYTES = 32
_NUMBER = struct.Struct("!q")


class Broken(Exception):
    """A ring that could not be made, or broke; says why."""


class Rings:
    """One node's part in all rings of an examination: its listening socket, and who connected to it."""

    def __init__(self, host: str, token: bytes, port: int = 0) -> None:
        self._listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._token = token
        self._came: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._accept_all, name="everstep-rings", daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        with self._changed:
            self._closed = True
            came = list(self._came.values())
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for sock in came:
            sock.close()

    def run(self, number: int, members: Sequence[Place], node: str, seconds: float) -> RingDone:
        """Take part in ring `number`. Blocks for about `seconds`, and never fails otherwise than by its result."""
        place = next(k for k, member in enumerate(members) if member.node == node)
        following = members[(place + 1) % len(members)]
        try:
            with self._call(following, number) as out, self._awaited(number) as into:
                rate, wrong = _Lane(out, into, number).run(seconds if place == 0 else float("inf"), place == 0)
        except (OSError, Broken) as error:
            return RingDone(number, 0.0, why=f"to {following.node}: {error}")
        return RingDone(number, rate, wrong)

    # Connections ----------------------------------------------------------------------------------------

    def _call(self, to: Place, number: int) -> socket.socket:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.create_connection((to.host, to.port), SETUP_S))
            mine = new_nonce()
            sock.sendall(_NUMBER.pack(number) + mine)
            theirs, mac = _exactly(sock, NONCE_BYTES), _exactly(sock, MAC_BYTES)
            parts = (_NUMBER.pack(number), mine, theirs)
            if not proves(mac, self._token, CALLED, parts):
                raise Broken(f"who listens at {to.host}:{to.port} does not hold the token")
            sock.sendall(prove(self._token, CALLER, parts))
            undo.pop_all()
            return sock

    def _accept_all(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            # A thread each: who connects and says nothing holds nobody up.
            threading.Thread(target=self._greet, args=(sock,), name="everstep-ring", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        sock.settimeout(SETUP_S)
        try:
            number, theirs = _exactly(sock, _NUMBER.size), _exactly(sock, NONCE_BYTES)
            mine = new_nonce()
            parts = (number, theirs, mine)
            sock.sendall(mine + prove(self._token, CALLED, parts))
            good = proves(_exactly(sock, MAC_BYTES), self._token, CALLER, parts)
        except (OSError, Broken):
            good = False  # its caller knows more, and says it
        with self._changed:
            if good and not self._closed:
                self._came[_NUMBER.unpack(number)[0]] = sock
                self._changed.notify_all()
            else:
                sock.close()

    def _awaited(self, number: int) -> socket.socket:
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._came, SETUP_S):
                raise Broken("nobody connected from the other side")
            return self._came.pop(number)


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = sock.recv(num_bytes - len(data))
        if not more:
            raise Broken("the connection was closed")
        data += more
    return data


class _Lane:
    """The steps of one member. The first one ends them: its last chunk is marked, and the mark goes around."""

    def __init__(self, out: socket.socket, into: socket.socket, number: int) -> None:
        self.out, self.into = out, into
        self.chunk = bytearray(b"\0" + random.Random(number).randbytes(CHUNK))
        self.received = bytearray(len(self.chunk))
        for sock in (out, into):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, seconds: float, first: bool) -> tuple[float, int]:
        """Bytes per second that came, and chunks among them that were changed."""
        began, steps, wrong = 0.0, 0, 0
        sending, marked = True, False
        while True:
            if first and steps > 1 and time.monotonic() - began >= seconds:
                marked = True
            self.chunk[0] = marked
            self._exchange(sending)
            began = began or time.monotonic()  # the first chunk also waits for the others to be ready
            steps += 1
            wrong += self.received[1:] != self.chunk[1:]
            sending = sending and not marked
            if self.received[0]:
                marked = True
                if sending:  # pass the mark on
                    self.chunk[0] = True
                    self._exchange(sending=True, receiving=False)
                return (steps - 1) * len(self.chunk) / (time.monotonic() - began), wrong

    def _exchange(self, sending: bool, receiving: bool = True) -> None:
        """Send one chunk and receive one, at the same time."""
        rest, room = memoryview(self.chunk)[: None if sending else 0], memoryview(self.received)
        room = room[: None if receiving else 0]
        poll = select.poll()
        if rest:
            poll.register(self.out, select.POLLOUT)
        if room:
            poll.register(self.into, select.POLLIN)
        while rest or room:
            ready = dict(poll.poll(STALL_S * 1000))
            if not ready:
                raise Broken(f"no byte for {STALL_S:g} s")
            if self.out.fileno() in ready and rest:
                rest = rest[self.out.send(rest) :]
                if not rest:
                    poll.unregister(self.out)
            if self.into.fileno() in ready and room:
                count = self.into.recv_into(room)
                if not count:
                    raise Broken("the connection was closed")
                room = room[count:]
                if not room:
                    poll.unregister(self.into)

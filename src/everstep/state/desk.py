"""A vault's side of the connection of one worker of its node: requests in, answers, descriptors and news out."""

from __future__ import annotations

import array
import contextlib
import os
import queue
import select
import socket
import struct
import threading
from typing import NamedTuple

from everstep.state import talk
from everstep.state.image import Damaged, decode, encode
from everstep.state.keeper import Keeper, NoRoom, NotKept
from everstep.state.replicate import Peers
from everstep.state.slots import News, Shard
from everstep.state.talk import TalkError

CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
MOST_NEWS = 1000  # for a worker that does not read them; it can ask for the states


class Outgoing(NamedTuple):
    data: bytes
    fd: int = -1  # to send along, and to close
    close: bool = False


class Desk:
    """One worker. `run` returns when its connection is closed or its process is gone, whichever is seen first.

    The process is watched too: its children may hold copies of the connection, but they map none of our memory.
    """

    def __init__(self, sock: socket.socket, pid: int, keeper: Keeper, peers: Peers, endpoint: str) -> None:
        self._sock, self._keeper, self._peers, self._endpoint = sock, keeper, peers, endpoint
        self._pidfd = os.pidfd_open(pid)
        self._name = keeper.name()
        self._has: set[int] = set()  # memories it has descriptors of
        self._out: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._gone = False
        self._sending = threading.Thread(target=self._send, name="answers", daemon=True)
        self._sending.start()

    def run(self) -> None:
        frames = talk.Frames()
        frames.most = talk.MAX_FRAME
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        try:
            while all(fd == self._sock.fileno() for fd, _ in poll.poll()):
                data = self._sock.recv(1 << 16)
                if not data:
                    break
                frames.push(data)
                while (body := frames.pop()) is not None:
                    self._handle(talk.decode(talk.requests, body))
        except OSError:  # it died in the middle
            pass
        finally:
            self._gone = True
            self._keeper.close(self._name)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._out.put(None)
            self._sending.join()
            os.close(self._pidfd)

    def tell(self, news: News | talk.Unmap) -> None:
        if isinstance(news, talk.Unmap):
            if news.memory not in self._has:
                return
            self._has.discard(news.memory)
        elif self._out.qsize() > MOST_NEWS:
            return
        self._out.put(Outgoing(talk.frame(news)))

    # Requests -------------------------------------------------------------------------------------------

    def _handle(self, request: talk.Request) -> None:
        """Slow ones in threads of their own: a seal must not wait for a pull."""
        if isinstance(request, talk.Open | talk.Verify | talk.Pull):
            threading.Thread(target=self._answer, args=(request,), name="request", daemon=True).start()
        else:
            self._answer(request)

    def _answer(self, request: talk.Request) -> None:
        try:
            out = self._do(request)
        except NoRoom as error:
            sizes = (error.needed_bytes, error.free_bytes, error.budget_bytes, error.busy_bytes)
            out = Outgoing(talk.frame(talk.Refused(request.number, str(error), *sizes)))
        except Damaged as error:
            out = Outgoing(talk.frame(talk.Spoilt(request.number, str(error))))
        except (NotKept, ValueError, OSError, TalkError) as error:
            out = Outgoing(talk.frame(talk.Refused(request.number, str(error) or type(error).__name__)))
        self._out.put(out)

    def _do(self, request: talk.Request) -> Outgoing:
        number, keeper = request.number, self._keeper
        answer: talk.Answer = talk.Ok(number)
        match request:
            case talk.Endpoint():
                answer = talk.Told(number, self._endpoint)
            case talk.Slot(num_bytes=num_bytes):
                return self._slot(number, num_bytes)
            case talk.Seal(image=image, index=index, peers=peers, persist=persist):
                keeper.seal(image, decode(index), peers, persist)
            case talk.GiveUp(image=image):
                keeper.give_up(image)
            case talk.List():
                answer = talk.Listed(number, keeper.kept())
            case talk.Open(shard=shard, step=step):
                return self._open(number, shard, step)
            case talk.Close(image=image):
                keeper.end(self._name, image)
            case talk.Verify(shard=shard, step=step):
                answer = talk.Sums(number, keeper.verify(shard, step))
            case talk.Pull(endpoint=endpoint, shard=shard, step=step):
                self._peers.pull(keeper, endpoint, shard, step)
        return Outgoing(talk.frame(answer))

    def _slot(self, number: int, num_bytes: int) -> Outgoing:
        image, memory, region = self._keeper.ask(self._name, num_bytes)
        fd = -1 if memory in self._has else region.fd
        self._has.add(memory)
        return Outgoing(talk.frame(talk.Given(number, image, memory, region.num_bytes, fd >= 0)), fd)

    def _open(self, number: int, shard: Shard, step: int) -> Outgoing:
        image, region = self._keeper.begin(self._name, shard, step)
        if self._gone:  # after `run` had ended all its readings
            self._keeper.end(self._name, image)
            raise NotKept("the worker is gone")
        index = self._keeper.summed(image)
        return Outgoing(talk.frame(talk.Opened(number, image, encode(index))), region.read_only(), close=True)

    # Answers --------------------------------------------------------------------------------------------

    def _send(self) -> None:
        while (out := self._out.get()) is not None:
            with contextlib.suppress(OSError):  # it is gone: `run` sees that too
                self._send_one(out)
            if out.close:
                os.close(out.fd)

    def _send_one(self, out: Outgoing) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [out.fd]))] if out.fd >= 0 else []
        sent = self._sock.sendmsg([out.data], ancillary)
        self._sock.sendall(out.data[sent:])


def peer_of(sock: socket.socket) -> int:
    """The process on the other side of a Unix socket. Raises TalkError for one of another user."""
    pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if uid != os.getuid():
        raise TalkError(f"process {pid} runs as another user ({uid})")
    return int(pid)

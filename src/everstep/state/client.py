"""A worker's way to the vault of its node. Blocking calls, from any thread; one connection.

    vault = Vault(address, secret)            # or Vault.alone(): a vault of this process's own
    slot = vault.slot(num_bytes)
    slot.view[:] = ...                        # at leisure, in any thread
    vault.seal(slot, index, peers=["10.0.0.2:4711"], persist=Persist("/checkpoints"))

A vault that dies takes its images with it, and nothing else: calls raise VaultLost, and the next one finds the new
vault. What a worker had not sealed when it died is gone; what it had sealed stays.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from everstep.state import memory, talk
from everstep.state.image import Damaged, Index, decode, encode
from everstep.state.slots import News, Shard
from everstep.state.talk import Kept, Persist, TalkError
from everstep.state.vault_options import Options, endpoint_of, tcp_listener, unix_listener

__all__ = ["Kept", "KeptImage", "News", "NoRoom", "NotKept", "Persist", "Slot", "Vault", "VaultError", "VaultLost"]

GREETING_S = 20.0  # a vault that is just being started
DYING_S = 1.0
ANSWER_S = 60.0  # for what the vault answers at once, but for the pages of new memory

T = TypeVar("T")


class VaultError(Exception):
    """The vault cannot do what was asked; training goes on without."""


class VaultLost(VaultError):
    """The vault is gone, or cannot be reached: what it kept is lost. One call says so; the next one tries again."""


class NotKept(VaultError):
    """There is no such image, or the other vault cannot be reached."""


class NoRoom(VaultError):
    """No memory for an image. In bytes: what it needs, what is free, what the vault may use, what is busy."""

    def __init__(self, refused: talk.Refused) -> None:
        super().__init__(refused.why)
        self.needed_bytes, self.free_bytes = refused.needed_bytes, refused.free_bytes
        self.budget_bytes, self.busy_bytes = refused.budget_bytes, refused.busy_bytes


class Slot:
    """Memory for one image. `view`: all of it, writable until it is sealed or given up."""

    def __init__(self, link: _Link, image: int, view: memoryview) -> None:
        self._link, self._image, self._view = link, image, view
        self._open = True

    @property
    def view(self) -> memoryview:
        assert self._open, "a slot which is sealed or given up is not the writer's any more"
        return self._view


class KeptImage:
    """An image in the vault's memory, as a Source. It stays there until `close`."""

    def __init__(self, link: _Link, image: int, index: Index, fd: int) -> None:
        self._link, self._image = link, image
        self.index = index
        try:
            self._map = memory.map_read_only(fd, index.num_bytes)
        finally:
            os.close(fd)

    def read(self, chunk: int, into: memoryview) -> None:
        """Raises Damaged; the vault is told, and does not offer the image any more."""
        with memoryview(self._map) as whole, memory.chunk_of(self.index, whole, chunk) as data:
            num_bytes = len(data)
            into[:num_bytes] = data
        try:
            memory.check(self.index, chunk, into[:num_bytes], "the vault's memory")
        except Damaged:
            shard = Shard(self.index.shard, self.index.num_shards)
            with contextlib.suppress(VaultError, Damaged):  # this is how it is told
                self._link.ask(talk.Verify(0, shard, self.index.step), talk.Sums, None)
            raise

    def close(self) -> None:
        self._map.close()
        with contextlib.suppress(VaultLost):
            self._link.ask(talk.Close(0, self._image), talk.Ok)

    def __enter__(self) -> KeptImage:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class Vault:
    """`address`: name of the vault's Unix socket, in hex. `on_news` is called in a thread: keep it short."""

    def __init__(self, address: str, secret: bytes, on_news: Callable[[News], None] = lambda news: None) -> None:
        self._address, self._secret, self._on_news = address, secret, on_news
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._own: _Own | None = None

    @classmethod
    def alone(
        cls,
        budget_bytes: int = 0,
        on_news: Callable[[News], None] = lambda news: None,
        secret: bytes = b"",
        **options: Any,
    ) -> Vault:
        """A vault of this process's own, which ends with it. `secret`: of the vaults it may exchange images with."""
        secret = secret or secrets.token_bytes(32)
        own = _Own(Options("alone", secret, -1, -1, "", os.getpid(), budget_bytes, **options))
        vault = cls(own.address, secret, on_news)
        vault._own = own
        return vault

    @property
    def endpoint(self) -> str:
        """Where other vaults reach this one: for `peers`, and for `pull` elsewhere."""
        return self._connected().ask(talk.Endpoint(0), talk.Told).endpoint

    def slot(self, num_bytes: int) -> Slot:
        """Memory for an image of at most so many bytes. Raises NoRoom, VaultLost."""
        link = self._connected()
        given = link.ask(talk.Slot(0, num_bytes), talk.Given)
        view = link.maps.get(given.memory)
        if view is None:
            link.gone()
        return Slot(link, given.image, view[:num_bytes])

    def seal(self, slot: Slot, index: Index, peers: Sequence[str] = (), persist: Persist | None = None) -> None:
        """The image is whole. The vault copies it to those peers' vaults and to disk on its own. Raises VaultLost."""
        slot._open = False
        slot._link.ask(talk.Seal(0, slot._image, encode(index), tuple(peers), persist), talk.Ok)

    def give_up(self, slot: Slot) -> None:
        """The slot will not be sealed, and nobody writes to it any more."""
        slot._open = False
        with contextlib.suppress(VaultLost):
            slot._link.ask(talk.GiveUp(0, slot._image), talk.Ok)

    def kept(self) -> tuple[Kept, ...]:
        """The images there are, oldest first; obsolete ones too, as long as their memory is not needed."""
        return self._connected().ask(talk.List(0), talk.Listed).kept

    def open(self, step: int, shard: int, num_shards: int = 1) -> KeptImage:
        """Raises NotKept, VaultLost."""
        link = self._connected()
        opened = link.ask(talk.Open(0, Shard(shard, num_shards), step), talk.Opened, None)
        return KeptImage(link, opened.image, decode(opened.index), link.taken(opened.number))

    def pull(self, endpoint: str, step: int, shard: int, num_shards: int = 1) -> None:
        """Have this vault fetch an image from that one. Raises NotKept, NoRoom, Damaged, VaultLost."""
        self._connected().ask(talk.Pull(0, endpoint, Shard(shard, num_shards), step), talk.Ok, None)

    def verify(self, step: int, shard: int, num_shards: int = 1) -> tuple[int, ...]:
        """The sums of an image, computed again. Raises Damaged, NotKept, VaultLost."""
        return self._connected().ask(talk.Verify(0, Shard(shard, num_shards), step), talk.Sums, None).sums

    def close(self) -> None:
        """A vault of our own ends; another keeps what is sealed."""
        with self._lock:
            if self._link is not None:
                self._link.close("it was closed")
            if self._own is not None:
                self._own.close()

    def _connected(self) -> _Link:
        with self._lock:
            link = self._link
            if link is not None and link.lost and not link.said:
                link.gone()  # between two calls: whoever relies on what was kept must hear of it
            if link is None or link.lost:
                if self._own is not None:
                    self._own.start()
                link = self._link = _Link(self._address, self._secret, self._on_news)
            return link


class _Link:
    """One connection. A thread reads what comes. `maps`: the vault's memory which we may write."""

    def __init__(self, address: str, secret: bytes, on_news: Callable[[News], None]) -> None:
        self.lost = ""
        self.said = False  # that it is lost
        self.maps: dict[int, memoryview] = {}
        self.fds: dict[int, int] = {}  # that came with an answer which nobody took yet
        self._on_news = on_news
        self._changed = threading.Condition()
        self._answers: dict[int, talk.Answer | None] = {}  # None: still waited for
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(GREETING_S)
            self._sock.connect(bytes.fromhex(address))
            talk.greet(self._sock, secret)
            self._sock.settimeout(None)
        except (OSError, TalkError) as error:
            self._sock.close()
            raise VaultLost(f"the vault of this node cannot be reached: {error or 'no answer'}") from error
        threading.Thread(target=self._read, name="everstep-vault", daemon=True).start()

    def ask(self, request: talk.Request, kind: type[T], timeout_s: float | None = ANSWER_S) -> T:
        number = next(self._numbers)
        with self._changed:
            self._answers[number] = None
        try:
            with self._sending:
                self._sock.sendall(talk.frame(msgspec.structs.replace(request, number=number)))
        except OSError as error:
            self.close(str(error))
        with self._changed:
            self._changed.wait_for(lambda: self.lost or self._answers[number] is not None, timeout_s)
            answer = self._answers.pop(number)
        if answer is None:
            self.close(f"no answer within {timeout_s} s")
            self.gone()
        return _result(answer, kind)

    def gone(self) -> NoReturn:
        self.said = True
        raise VaultLost(f"the vault of this node is gone, with what it kept: {self.lost}")

    def taken(self, number: int) -> int:
        """The descriptor that came with this answer. Raises VaultLost."""
        with self._changed:
            if number not in self.fds:
                self.gone()
            return self.fds.pop(number)

    def _read(self) -> None:
        frames = talk.Frames()
        frames.most = talk.MAX_FRAME
        descriptors: list[int] = []
        why = "it closed the connection"
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, 16, socket.MSG_CMSG_CLOEXEC)
                descriptors += fds
                if not data:
                    break
                frames.push(data)
                while (body := frames.pop()) is not None:
                    self._received(talk.decode(talk.answers, body), descriptors)
        except (OSError, TalkError) as error:
            why = str(error)
        self.close(why)
        with self._sending:
            self._sock.close()
        with self._changed:
            descriptors += self.fds.values()
            self.fds.clear()
        for fd in descriptors:
            os.close(fd)

    def _received(self, answer: talk.Answer, descriptors: list[int]) -> None:
        match answer:
            case News():
                self._on_news(answer)
                return
            case talk.Unmap(memory=number):
                self.maps.pop(number, None)
                return
            case talk.Given(memory=number, capacity_bytes=num_bytes, has_descriptor=True):
                fd = descriptors.pop(0)
                self.maps[number] = memoryview(_mapped(fd, num_bytes))
            case talk.Opened():
                with self._changed:
                    self.fds[answer.number] = descriptors.pop(0)
        with self._changed:
            if answer.number in self._answers:
                self._answers[answer.number] = answer
                self._changed.notify_all()

    def close(self, why: str) -> None:
        with self._changed:
            self.lost = self.lost or why
            self._changed.notify_all()
        self.maps.clear()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def _mapped(fd: int, num_bytes: int) -> mmap.mmap:
    try:
        return memory.map_writable(fd, num_bytes)
    finally:
        os.close(fd)


def _result(answer: talk.Answer, kind: type[T]) -> T:
    match answer:
        case talk.Refused(needed_bytes=needed) if needed:
            raise NoRoom(answer)
        case talk.Refused(why=why):
            raise NotKept(why)
        case talk.Spoilt(why=why):
            raise Damaged(why)
    assert isinstance(answer, kind), answer
    return answer


class _Own:
    """A vault which this process starts: on a listening socket of ours, so that one which died is started again."""

    def __init__(self, options: Options) -> None:
        self._local, self._remote = unix_listener(), tcp_listener("127.0.0.1")
        self.address: str = self._local.getsockname().hex()
        fds = {"listen_fd": self._local.fileno(), "remote_fd": self._remote.fileno()}
        self.options = msgspec.structs.replace(options, endpoint=endpoint_of(self._remote), **fds)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Its end closes connections a moment before it can be waited for: one that hung up is given that moment."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(DYING_S)
            if self._process.poll() is None:
                return
        with open(os.memfd_create("everstep-vault"), "wb") as file:
            file.write(msgspec.json.encode(self.options))
            file.flush()
            command = [sys.executable, "-m", "everstep.state.vault", f"/proc/self/fd/{file.fileno()}"]
            fds = (file.fileno(), self.options.listen_fd, self.options.remote_fd)
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        self._local.close()
        self._remote.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

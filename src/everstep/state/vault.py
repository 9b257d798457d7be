"""The vault of one node: a process which keeps images of the job's state, so that they outlive workers and agents.

    python -m everstep.state.vault OPTIONS.json        (`everstep run` and `client.Vault.alone` start it)

Workers come through a Unix socket which it is given, vaults of other nodes through TCP; each connection has a thread,
for what goes through them is bulk. It ends with the process that started it, or, on SIGUSR2, once all is on disk.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.state import talk
from everstep.state.available import available_bytes
from everstep.state.desk import Desk, peer_of
from everstep.state.keeper import Keeper
from everstep.state.replicate import Peers
from everstep.state.slots import News
from everstep.state.vault_options import FINISH_SIGNAL, Options

MOST_STRANGERS = 64  # connections which have not proved the secret yet
GREETING_S = 5.0


class Vault:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.peers = Peers(options.secret, options.rate_bytes_per_s)
        budget = options.budget_bytes or available_bytes() // 2
        self.keeper = Keeper(budget, self.peers.send, self._tell, self._unmap, options.persister)
        self.local = socket.socket(fileno=os.dup(options.listen_fd))
        self.remote = socket.socket(fileno=os.dup(options.remote_fd))
        self.desks: dict[Desk, None] = {}
        self.strangers = threading.BoundedSemaphore(MOST_STRANGERS)

    def run(self) -> int:
        """Until the parent is gone, or asks for the end: how many images could not be written to disk."""
        woken, waker = socket.socketpair()
        signal.signal(FINISH_SIGNAL, lambda *_: waker.send(b"x"))
        parent = os.pidfd_open(self.options.parent)
        if os.getppid() != self.options.parent:
            return 0
        poll = select.poll()
        for fd in (self.local.fileno(), self.remote.fileno(), woken.fileno(), parent):
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if parent in ready:
                return 0
            if woken.fileno() in ready:
                return self.keeper.unwritten(self.options.finish_s)
            if self.local.fileno() in ready:
                self._accept(self.local, self._worker)
            if self.remote.fileno() in ready:
                self._accept(self.remote, self._peer)

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # it is gone again, or there are no more descriptors: the next one may have luck
            return
        if not self.strangers.acquire(blocking=False):
            sock.close()
            return
        threading.Thread(target=self._serve, args=(sock, serve), name="connection", daemon=True).start()

    def _serve(self, sock: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        with sock:
            try:
                known = self._admitted(sock)
            finally:
                self.strangers.release()
            if known:
                serve(sock)

    def _admitted(self, sock: socket.socket) -> bool:
        sock.settimeout(GREETING_S)
        try:
            if sock.family == socket.AF_UNIX:
                peer_of(sock)
            talk.admit(sock, self.options.secret)
        except talk.TalkError as error:
            with contextlib.suppress(OSError):
                sock.sendall(talk.frame(talk.Refused(0, str(error)[:200])))
            return False
        except OSError:
            return False
        return True

    def _worker(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        try:
            desk = Desk(sock, peer_of(sock), self.keeper, self.peers, self.options.endpoint)
        except ProcessLookupError:
            return
        self.desks[desk] = None
        try:
            desk.run()
        finally:
            del self.desks[desk]

    def _peer(self, sock: socket.socket) -> None:
        self.peers.prepare(sock)
        self.peers.serve(sock, self.keeper)

    def _tell(self, news: News) -> None:
        for desk in list(self.desks):
            desk.tell(news)

    def _unmap(self, memory: int) -> None:
        for desk in list(self.desks):
            desk.tell(talk.Unmap(memory))


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    options = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Options)
    for name in options.ignored:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    vault = Vault(options)
    unwritten = vault.run()
    if unwritten:
        print(f"everstep: the vault of {options.node} ends with {unwritten} images not on disk", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1 if unwritten else 0)  # threads may be anywhere; the kernel takes the memory back


if __name__ == "__main__":
    main()

"""A member of groups of gloo, in a process of its own, which does what the lines from its socket say."""

from __future__ import annotations

import os
import socket
import threading

import msgspec
import torch

from everstep.comms.link import LinkError
from everstep.comms.reduction import Op
from everstep.core.errors import EpochBroken
from everstep.core.formation import Formation, Seat
from everstep.train import inner
from everstep.train.inner import Gloo, Inner

inside = threading.Event()


class Watched(Gloo):
    """Says when a sum is in its group, so that a command which follows meets it there."""

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        inside.set()
        super().all_reduce(tensor, op)


class Member:
    """One of them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        name = str(os.getpid())
        self._inner = Inner("gloo", name, "127.0.0.1", torch.device("cpu"))
        self._say(msgspec.json.encode(Seat(name, name, "host", "127.0.0.1:9", self._inner.store)).decode())

    def serve(self) -> None:
        """Until the other end is closed."""
        for line in self._sock.makefile():
            command, _, rest = line.strip().partition(" ")
            if command == "prepare":
                self._prepare(msgspec.json.decode(rest, type=Formation))
            elif command == "switch":
                self._inner.switch(msgspec.json.decode(rest, type=Formation))
                self._say("switched")
            elif command == "sum":
                self._begin_sum(float(rest))
            elif command == "abort":
                self._inner.abort(int(rest))
            elif command == "deafen":  # as a gloo is that read half a message: shut sockets do not wake it
                inner.sockets.cut_own = lambda *_, **__: 0  # type: ignore[attr-defined]

    def _prepare(self, formation: Formation) -> None:
        try:
            self._inner.prepare(formation)
        except LinkError:
            self._say("no group")
        else:
            self._say("prepared")

    def _begin_sum(self, value: float) -> None:
        inside.clear()
        thread = threading.Thread(target=self._add_up, args=(value,))
        thread.start()
        while thread.is_alive() and not inside.wait(0.01):
            pass

    def _add_up(self, value: float) -> None:
        tensor = torch.full((5,), value)
        try:
            self._inner.all_reduce(tensor)
        except EpochBroken as broken:
            self._say(f"broken {broken.epoch}")
        else:
            self._say(f"sum {tensor[0].item():g}")

    def _say(self, text: str) -> None:
        self._sock.sendall(text.encode() + b"\n")


def run(sock: socket.socket) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    inner.LIBRARIES["gloo"] = Watched
    Member(sock).serve()
    os._exit(0)

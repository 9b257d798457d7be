"""Fabrics of several workers in one process: their links are real connections all the same. And of real processes."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from everstep.comms.fabric import Fabric
from everstep.comms.table import Table
from everstep.core.formation import Formation, Seat

TOKEN = b"0123456789abcdef" * 4


class Crew:
    """Makes fabrics, and changes their members as a controller would."""

    def __init__(self) -> None:
        self.fabrics: list[Fabric] = []
        self.hosts: dict[str, str] = {}
        self.pool = ThreadPoolExecutor(32)

    def make(self, worker: str, host: str = "this host", shared_memory: bool = True, token: bytes = TOKEN) -> Fabric:
        fabric = Fabric(worker, host, token, shared_memory=shared_memory)
        self.fabrics.append(fabric)
        self.hosts[worker] = host
        return fabric

    def seat(self, fabric: Fabric) -> Seat:
        return Seat(fabric.worker, "node", self.hosts[fabric.worker], fabric.endpoint)

    def formation(self, epoch: int, fabrics: Sequence[Fabric], abort: bool = False) -> Formation:
        return Formation(epoch, tuple(map(self.seat, fabrics)), abort=abort, floor=0)

    def enter(self, epoch: int, fabrics: Sequence[Fabric]) -> list[Table]:
        """All prepare, then all switch; their tables by role."""
        formation = self.formation(epoch, fabrics)
        list(self.pool.map(lambda fabric: fabric.prepare(formation), fabrics))
        return [fabric.switch(formation) for fabric in fabrics]


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    list(made.pool.map(Fabric.close, made.fabrics))  # at once: each waits until the others have what it sent
    made.pool.shutdown()


class Ranks:
    """Real processes in the same formations; see ranks.py."""

    def __init__(self, count: int) -> None:
        ours, theirs = zip(*(socket.socketpair() for _ in range(count)), strict=True)
        fds = [end.fileno() for end in theirs]
        program = Path(__file__).with_name("ranks.py")
        self.process = subprocess.Popen([sys.executable, program, *map(str, fds)], pass_fds=fds)
        for end in theirs:
            end.close()
        self.pipes = [Connection(end.detach()) for end in ours]
        self.epoch = 0
        self.layout: tuple[object, ...] = ()

    def enter(self, hosts: Sequence[str], groups: tuple[int, ...] = (), shared_memory: bool = True) -> None:
        """A new epoch of as many ranks as hosts, unless they are in such a one."""
        layout = (tuple(hosts), groups, shared_memory)
        if layout == self.layout:
            return
        self.epoch += 1
        seats = tuple(self.each("found", [(host, shared_memory) for host in hosts]))
        formation = Formation(self.epoch, seats, abort=False, floor=0, groups=groups)
        self.each("enter", [(formation,)] * len(hosts))
        self.layout = layout

    def ask(self, name: str, args: Sequence[tuple[Any, ...]]) -> None:
        for pipe, arguments in zip(self.pipes, args, strict=False):
            pipe.send_bytes(pickle.dumps((name, arguments)))  # plainly: `send` would share tensors

    def answers(self, count: int) -> list[tuple[bool, Any]]:
        """Whether each did it, and the result or the exception."""
        for pipe in self.pipes[:count]:
            if not pipe.poll(20):
                raise TimeoutError("a rank does not answer")
        return [pickle.loads(pipe.recv_bytes()) for pipe in self.pipes[:count]]

    def each(self, name: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The command on as many ranks as there are arguments; what they return."""
        self.ask(name, args)
        answers = self.answers(len(args))
        for done, result in answers:
            if not done:
                raise result
        return [result for _, result in answers]

    def do(self, call: str, args: Sequence[tuple[Any, ...]], index: int = 0, roles: Any = None) -> list[Any]:
        return self.each("do", [(call, index, roles, arguments) for arguments in args])

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        self.process.wait(10)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    made = Ranks(8)
    yield made
    made.close()

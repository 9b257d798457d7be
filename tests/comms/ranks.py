"""Forked workers which do what they are told over a pipe: `python ranks.py FD...`, one process for each descriptor.

They live as long as the tests, so that an example costs a few milliseconds. A command is the name of a function below,
its arguments, and the answer is what it returns or raises.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch

from everstep.comms.collectives import Communicator
from everstep.comms.fabric import Fabric
from everstep.comms.reduction import Op
from everstep.core.formation import Formation, Seat

TOKEN = b"0123456789abcdef" * 4


class Rank:
    """One worker."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.fabric: Fabric | None = None
        self.communicators: dict[tuple[int, tuple[int, ...] | None], Communicator] = {}

    def found(self, host: str, shared_memory: bool) -> Seat:
        """A new fabric."""
        if self.fabric is not None:
            self.fabric.close()
        self.communicators.clear()
        self.fabric = Fabric(f"{host}/{self.number}#0", host, TOKEN, shared_memory=shared_memory)
        return Seat(self.fabric.worker, host, host, self.fabric.endpoint)

    def enter(self, formation: Formation) -> None:
        assert self.fabric is not None
        self.fabric.prepare(formation)
        self.fabric.switch(formation)

    def on(self, index: int, roles: tuple[int, ...] | None) -> Communicator:
        assert self.fabric is not None
        if (index, roles) not in self.communicators:
            self.communicators[index, roles] = Communicator(self.fabric, index, roles)
        return self.communicators[index, roles]

    def do(self, call: str, index: int, roles: tuple[int, ...] | None, args: tuple[Any, ...]) -> Any:
        """One collective. Returns its arguments as they are afterwards, and its result last."""
        result = getattr(self.on(index, roles), call)(*args)
        return [*args, result]

    def shared(self, tensor: torch.Tensor, op: Op) -> torch.Tensor:
        assert self.fabric is not None
        buffer = self.fabric.allocate(max(1, tensor.numel() * tensor.element_size()))
        view = buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        self.on(0, None).all_reduce_shared(view, op)
        return view.clone()

    def transposed(self, call: str, tensor: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        """A collective on a tensor that is not contiguous."""
        view = tensor.T.contiguous().T
        assert tensor.numel() < 2 or not view.is_contiguous()
        getattr(self.on(0, None), call)(view, *args)
        return view

    def storm(self, seed: int, rounds: int) -> list[float]:
        """Several communicators and messages at once, from threads; what each came to."""
        assert self.fabric is not None
        table, sums = self.fabric.table, []
        me, size = table.role, table.size

        def reduce(index: int, roles: tuple[int, ...]) -> None:
            total = 0.0
            for i in range(rounds):
                x = torch.full((1000 + 40_000 * (i % 2),), float(me + i + seed))
                self.on(index, roles).all_reduce(x, Op.SUM)
                assert bool((x == x[0]).all())
                total += float(x[0])
            sums.append(total)

        def talk(offset: int) -> None:
            to, of = (me + offset) % size, (me - offset) % size
            for i in range(rounds):
                x, y = torch.full((3000,), float(me)), torch.empty(3000)
                self.on(0, None).send(x, to, offset)
                self.on(0, None).recv(y, of, offset)
                assert bool((y == of).all()), i

        groups = [(i + 1, tuple(r for r in range(size) if r != i)) for i in range(size)]
        threads = [threading.Thread(target=reduce, args=group) for group in groups if me in group[1]]
        threads += [threading.Thread(target=talk, args=(offset,)) for offset in range(1, size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(sums)


def serve(rank: Rank, pipe: Connection) -> None:
    """Until the other end is closed."""
    while True:
        try:
            name, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, getattr(rank, name)(*args))
        except Exception as error:  # noqa: BLE001 the caller raises or checks it
            answer = (False, error if isinstance(error, ValueError) else RuntimeError(repr(error)))
        pipe.send_bytes(pickle.dumps(answer))


def main() -> None:
    torch.set_num_threads(1)
    for number, fd in enumerate(map(int, sys.argv[1:])):
        if os.fork() == 0:
            for other in map(int, sys.argv[1:]):
                if other != fd:
                    os.close(other)
            serve(Rank(number), Connection(socket.socket(fileno=fd).detach()))
            os._exit(0)
    for fd in map(int, sys.argv[1:]):
        os.close(fd)
    for _ in sys.argv[1:]:
        os.wait()


if __name__ == "__main__":
    main()

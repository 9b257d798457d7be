"""Members of a fabric as real processes, forked from this one, and a controller: `members.py SCENARIO TCP|SHM`.

Each member takes commands from a pipe: its main thread runs them one after the other, as a training loop would; aborts
are carried out by the thread that reads the pipe. What a scenario measured is printed as JSON. Times are monotonic: one
clock for all processes of a machine.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from everstep.comms.collectives import Communicator
from everstep.comms.fabric import Fabric
from everstep.core.errors import EpochBroken
from everstep.core.formation import Formation, Seat

TOKEN = b"0123456789abcdef" * 4
LARGE = 8 << 20  # elements: more than any buffer between two members


class Member:
    """One worker. Methods that begin with `do_` are its commands."""

    def __init__(self, worker: str, pipe: Connection, shared_memory: bool) -> None:
        self.fabric = Fabric(worker, "this host", TOKEN, shared_memory=shared_memory)
        self.groups = [Communicator(self.fabric, index) for index in range(3)]
        self.pipe = pipe
        self.commands: queue.Queue[tuple[Any, ...]] = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()
        pipe.send(self.fabric.endpoint)

    def listen(self) -> None:
        while True:
            name, *args = self.pipe.recv()
            if name == "abort":
                self.fabric.abort(*args)
            else:
                self.commands.put((name, *args))

    def run(self) -> None:
        while True:
            name, *args = self.commands.get()
            try:
                answer = getattr(self, f"do_{name}")(*args)
            except EpochBroken as error:
                answer = ("broken", error.epoch, error.why, time.monotonic_ns())
            self.pipe.send(answer)

    def do_enter(self, formation: Formation) -> tuple[float, float]:
        begin = time.perf_counter()
        self.fabric.prepare(formation)
        prepared = time.perf_counter()
        self.fabric.switch(formation)
        return prepared - begin, time.perf_counter() - prepared

    def do_counts(self) -> tuple[int, int]:
        return self.fabric.counts.dialed, self.fabric.counts.accepted

    def do_all_reduce(self, group: int, size: int) -> float:
        tensor = torch.full((size,), float(self.fabric.table.role + 1))
        self.groups[group].all_reduce(tensor)
        assert tensor.min() == tensor.max()
        return float(tensor[0])

    def do_barrier(self, group: int) -> None:
        self.groups[group].barrier()

    def do_send(self, group: int, dst: int, size: int) -> None:
        self.groups[group].send(torch.full((size,), float(self.fabric.table.role)), dst, 0)

    def do_recv(self, group: int, src: int, size: int) -> float:
        tensor = torch.empty(size)
        self.groups[group].recv(tensor, src, 0)
        return float(tensor.sum())

    def do_fork(self) -> tuple[int, int]:
        """A child that lives on as a data loader's worker does: its pid, and how many TCP sockets and boards it has."""
        near, far = Pipe()
        pid = os.fork()
        if not pid:
            far.send(tcp_sockets() + boards())
            signal.pause()
        far.close()
        return pid, near.recv()

    def do_little_memory(self) -> None:
        """From now on nothing large can be mapped."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (1 << 30),) * 2)


def tcp_sockets() -> int:
    """How many this process has open."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            number = os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[")[:-1]
        except FileNotFoundError:  # the listing's own
            continue
        found += f" {number} " in Path("/proc/self/net/tcp").read_text()
    return found


def boards() -> int:
    """How many this process has open or mapped."""
    open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return "".join([*open_files, Path("/proc/self/maps").read_text()]).count("memfd:everstep")


class Controller:
    def __init__(self, shared_memory: bool) -> None:
        self.shared_memory = shared_memory
        self.pids: list[int] = []
        self.children: list[int] = []  # of members
        self.pipes: list[Connection] = []
        self.seats: list[Seat] = []

    def start(self, count: int) -> list[int]:
        """New members; their numbers."""
        fresh = range(len(self.pids), len(self.pids) + count)
        for number in fresh:
            near, far = Pipe()
            pid = os.fork()
            if not pid:
                for pipe in (near, *self.pipes):
                    pipe.close()
                torch.set_num_threads(1)
                try:
                    Member(f"node/{number}#0", far, self.shared_memory).run()
                finally:
                    os._exit(1)
            far.close()
            self.pids.append(pid)
            self.pipes.append(near)
        for number in fresh:
            self.seats.append(Seat(f"node/{number}#0", "node", "this host", self.pipes[number].recv()))
        return [*fresh]

    def formation(self, epoch: int, numbers: list[int]) -> Formation:
        return Formation(epoch, tuple(self.seats[number] for number in numbers), abort=True, floor=0)

    def tell(self, number: int, *command: Any) -> None:
        self.pipes[number].send(command)

    def all(self, numbers: list[int], *command: Any) -> list[Any]:
        for number in numbers:
            self.tell(number, *command)
        return [self.pipes[number].recv() for number in numbers]

    def answered(self, numbers: list[int]) -> list[int]:
        ready = wait([self.pipes[number] for number in numbers], timeout=0)
        return [number for number in numbers if self.pipes[number] in ready]

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)


def abort(controller: Controller, how: signal.Signals) -> dict[str, Any]:
    """One of eight is killed, or stopped, while all others wait for it, in every way there is."""
    members = controller.start(8)
    enter = controller.all(members, "enter", controller.formation(1, members))
    sums = controller.all(members, "all_reduce", 0, 1000)
    *survivors, victim = members
    calls = {0: ("all_reduce", 0, LARGE), 1: ("all_reduce", 0, LARGE), 2: ("barrier", 1), 3: ("barrier", 1)}
    calls |= {4: ("recv", 2, victim, 10), 5: ("send", 2, victim, LARGE), 6: ("recv", 2, victim, LARGE)}
    for number, call in calls.items():
        controller.tell(number, *call)
    time.sleep(1)
    early = controller.answered(survivors)
    os.kill(controller.pids[victim], how)
    ended = time.monotonic_ns()
    if how == signal.SIGKILL:
        time.sleep(0.1)  # as if it took so long to notice; over TCP they see it themselves
    told = time.monotonic_ns()
    for number in survivors:
        controller.tell(number, "abort", 1, "worker 7 died")
    broken = [controller.pipes[number].recv() for number in survivors]
    counts = controller.all(survivors, "counts")
    again = controller.all(survivors, "enter", controller.formation(2, survivors))
    return {
        "sums": sums,
        "early": early,
        "broken": [answer[:3] for answer in broken],
        "ms_after_end": [(answer[3] - ended) / 1e6 for answer in broken],
        "ms_after_abort": [(answer[3] - told) / 1e6 for answer in broken],
        "enter_ms": [[1e3 * part for part in times] for times in (*enter, *again)],
        "opened": controller.all(survivors, "counts") != counts,
        "next_sums": controller.all(survivors, "all_reduce", 0, 100_000),
        "next_p2p": next_p2p(controller, survivors),
    }


def next_p2p(controller: Controller, numbers: list[int]) -> list[Any]:
    """Pairs that had messages under way before, and one that had none."""
    for src, dst in ((5, 6), (0, 4)):
        controller.tell(src, "send", 2, dst, 1000)
        controller.tell(dst, "recv", 2, src, 1000)
    controller.all([1, 2, 3], "counts")
    return [controller.pipes[number].recv() for number in (5, 6, 0, 4)]


def join(controller: Controller) -> dict[str, Any]:
    """Seven members, then an eighth."""
    members = controller.start(7)
    first = controller.all(members, "enter", controller.formation(1, members))
    before = controller.all(members, "counts")
    [joiner] = controller.start(1)
    times = controller.all([*members, joiner], "enter", controller.formation(2, [*members, joiner]))
    after = controller.all([*members, joiner], "counts")
    return {
        "first_ms": [1e3 * prepare for prepare, _ in first],
        "stayers_ms": [1e3 * prepare for prepare, _ in times[:-1]],
        "joiner_ms": 1e3 * times[-1][0],
        "switch_ms": [1e3 * switch for _, switch in times],
        "opened": [sum(now) - sum(then) for now, then in zip(after, [*before, (0, 0)], strict=True)],
        "sums": controller.all([*members, joiner], "all_reduce", 0, 1000),
    }


def children(controller: Controller) -> dict[str, Any]:
    """A member with a forked child dies: its peer must see the connection end although the child lives."""
    members = controller.start(2)
    controller.all(members, "enter", controller.formation(1, members))
    [(child, kept)] = controller.all([1], "fork")
    controller.children.append(child)
    controller.tell(0, "recv", 0, 1, 10)
    time.sleep(0.2)
    begin = time.monotonic_ns()
    os.kill(controller.pids[1], signal.SIGKILL)
    answer = controller.pipes[0].recv()
    return {"kept": kept, "answer": answer[:3], "ms": (answer[3] - begin) / 1e6}


def fallback(controller: Controller) -> dict[str, Any]:
    members = controller.start(3)
    controller.all([1], "little_memory")
    controller.all(members, "enter", controller.formation(1, members))
    return {"sums": controller.all(members, "all_reduce", 0, 1000)}


SCENARIOS: dict[str, Callable[[Controller], dict[str, Any]]] = {
    "kill": functools.partial(abort, how=signal.SIGKILL),
    "stop": functools.partial(abort, how=signal.SIGSTOP),
    "join": join,
    "children": children,
    "fallback": fallback,
}

if __name__ == "__main__":
    controller = Controller(sys.argv[2] == "SHM")
    try:
        print(json.dumps(SCENARIOS[sys.argv[1]](controller)))
    finally:
        controller.end()

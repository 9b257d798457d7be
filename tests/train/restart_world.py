"""Members with a restartable function, as processes, and this one as their agents and controller: it forms epochs.

with World(tmp_path, 2, "waiting", "100") as world:
    world.form()
    world.members[1].kill()
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import restart_member
import warm

from everstep.core import wire
from everstep.core.formation import Formation, Seat, SessionReport, Stage

DEADLINE_S = 60.0


class Process:
    """One life of one place."""

    def __init__(self, directory: Path, place: int, life: int, args: tuple[str, ...]) -> None:
        self.worker = f"node0/{place}#{life}"
        self.reports: list[SessionReport] = []
        self._path = directory / f"out-{place}-{life}.txt"
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = warm.context().Process(  # has torch imported, as the zygote of an agent
                target=restart_member.run, args=(self.worker, theirs, str(directory), str(self._path), *args)
            )
            self.process.start()
        self._reader = wire.FrameReader(self.worker, trusted=True)

    @property
    def last(self) -> SessionReport | None:
        return self.reports[-1] if self.reports else None

    def text(self) -> str:
        return self._path.read_text(errors="replace") if self._path.exists() else ""

    def lines(self, first: str) -> list[str]:
        return [line for line in self.text().splitlines() if line.split(" ")[0] == first]

    def hear(self) -> None:
        data = self.socket.recv(1 << 16)
        for message in self._reader.feed(data) if data else ():
            assert isinstance(message, SessionReport)
            self.reports.append(message)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def code(self) -> int | None:
        """What it ended with; None while it runs."""
        return self.process.exitcode

    def close(self) -> None:
        self.kill()
        self.process.close()
        self.socket.close()


class World:
    """`args`: of each member's script."""

    def __init__(self, directory: Path, size: int, *args: str) -> None:
        self._directory, self._args = directory, args
        self.epoch = 0
        self.everybody: list[Process] = []
        self.members = [self._start(place, 0) for place in range(size)]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.everybody:
            process.close()

    def _start(self, place: int, life: int) -> Process:
        process = Process(self._directory, place, life, self._args)
        self.everybody.append(process)
        return process

    def replace(self, place: int) -> Process:
        life = int(self.members[place].worker.rpartition("#")[2]) + 1
        self.members[place] = self._start(place, life)
        return self.members[place]

    def until(self, what: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, self._stacks()
            living = [process for process in self.members if process.code() is None]
            readable, _, _ = select.select([process.socket for process in living], [], [], 0.01)
            for process in living:
                if process.socket in readable:
                    process.hear()

    def _stacks(self) -> str:
        """Where everybody is, behind all that was said."""
        living = [p for p in self.everybody if p.code() is None and p.process.pid is not None]
        for process in living:
            os.kill(process.process.pid or 0, signal.SIGUSR1)
        time.sleep(1.0)
        return "\n".join(f"{p.worker}:\n{p.text()}" for p in self.everybody)

    def until_ready(self, *places: int) -> None:
        """Until these (all: none given) wait for an entry after the present one."""
        chosen = [self.members[place] for place in places or range(len(self.members))]
        self.until(lambda: all(p.last is not None and p.last.stage is Stage.READY for p in chosen))

    def form(self, abort: bool = True) -> Formation:
        """The next epoch, of all present members, once they are ready."""
        self.until_ready()
        return self.tell(abort)

    def tell(self, abort: bool = True) -> Formation:
        """The next epoch, whether or not anybody is ready."""
        self.epoch += 1
        reports = [process.last for process in self.members]
        seats = tuple(Seat(r.worker, "node0", r.host, r.endpoint) for r in reports if r is not None)
        assert len(seats) == len(self.members)
        formation = Formation(self.epoch, seats, abort=abort, floor=0)
        for process in self.members:
            if process.code() is None:
                process.socket.sendall(wire.encode(formation))
        return formation

    def until_step(self, step: int) -> None:
        self.until(lambda: all(f"step {step}" in process.lines("step") for process in self.members))

    def finish(self) -> list[str]:
        """The results of all, which end well."""
        self.until(lambda: all(process.code() is not None for process in self.members))
        codes = [process.code() for process in self.members]
        assert not any(codes), "\n".join(f"{p.worker}: {p.code()}\n{p.text()}" for p in self.members)
        return [line for process in self.members for line in process.lines("result")]

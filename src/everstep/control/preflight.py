"""The examination of an agent's node before it takes part: a quick one at the start, a full one after it was lost.

The quick one is a few system calls. The full one (a matrix product with a known answer, memory, disk, devices, the
network to itself) runs in a process of its own, forked from the warm one, so that nothing it meets harms the agent.
What is broken keeps the node out, and is looked at again every few seconds; what is only slow is said.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from everstep.control.launch import Answer, Forked, Kind, Reaped, Spawner, SpawnFailed, SpawnRequest
from everstep.control.prepare import AgentOptions
from everstep.core.checkup import Reading, decode, encode
from everstep.core.config import Preflight as Wanted
from everstep.core.config import size_of
from everstep.detect import health
from everstep.probe import host

KEY = 0  # of its process among those of the agent: workers have those of their epochs, which count from 1
PATIENCE_S = 120.0  # for the full one: a device or a disk that does not answer is broken
AGAIN_S = 3.0  # an unfit node is examined again so often


class Preflight:
    """`tell(number, unfit)` is called after each examination, with what is broken, or with nothing."""

    def __init__(self, options: AgentOptions, env: dict[str, str], tell: Callable[[int, str], None]) -> None:
        wanted = options.config.preflight
        self.kind = wanted.again if options.again else wanted.start
        self.options, self.env, self.tell = options, env, tell
        self.folder = Path(options.log_dir)
        self.bars = bars(wanted)
        self.wanted, self.number = 0, -1  # the newest examination that is to be made, and that was begun
        self.running = False
        self.pid = 0  # of the process that examines; 0: not known yet
        self.next_s = 0.0  # when it is late, or when an unfit node is examined again
        self.unfit = ""
        self.checks: Sequence[str] = ()  # what is told to be broken
        self.result: BinaryIO | None = None

    def ask(self, number: int) -> None:
        """A node that was lost is to be used again; `tick` begins."""
        self.wanted, self.kind = number, self.options.config.preflight.again

    def begin(self, spawner: Spawner, now: float) -> None:
        self.number = self.wanted
        if self.kind == "off":
            self._tell("")
        elif self.kind == "quick":
            self.next_s = now + AGAIN_S
            self._judge(host.quick(self.folder))
        else:
            self.running, self.pid, self.next_s = True, 0, now + PATIENCE_S
            fd = os.memfd_create("everstep-exam", os.MFD_CLOEXEC)  # needs no room on a disk
            self.result = open(fd, "rb")  # noqa: SIM115 - until the answer
            spawner.spawn(self._request(), self.result.fileno())

    def tick(self, spawner: Spawner, now: float) -> None:
        """Call it while nothing of an epoch runs here."""
        if self.running and now >= self.next_s:
            self.next_s = now + PATIENCE_S
            self._tell(f"its examination did not end within {PATIENCE_S:g} s")
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)
        elif not self.running and (self.wanted > self.number or (self.unfit and now >= self.next_s)):
            self.begin(spawner, now)

    def answered(self, answer: Answer, now: float) -> None:
        """What the spawner says about the process with our key."""
        match answer:
            case Forked(_, pid):
                self.pid = pid
                return
            case SpawnFailed(_, why):
                self._tell(f"it cannot be examined: {why}")
            case Reaped(_, _, 0) if self.result is not None:
                self.result.seek(0)
                self._compare(decode(self.result.read()))
            case Reaped(_, _, status):
                code = os.waitstatus_to_exitcode(status)
                how = f"with exit status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
                self._tell(f"its examination ended {how}: see {self._file('exam.log')}")
        self.running, self.next_s = False, now + AGAIN_S
        if self.result is not None:
            self.result.close()
            self.result = None

    def _request(self) -> SpawnRequest:
        options, log = self.options, str(self._file("exam.log"))
        args = (str(self.folder), options.address)
        return SpawnRequest(KEY, Kind.EXAM, "", args, self.env, os.getcwd(), log, log)

    def _file(self, name: str) -> Path:
        return self.folder / name

    def _compare(self, readings: Sequence[Reading]) -> None:
        """With what this node had when it was well, in an earlier life of its agent."""
        known = self._file("health.json")
        if not readings:
            self._tell("its examination left no result")
            return
        self._judge(readings, decode(known.read_bytes()) if known.exists() else ())
        if not self.unfit:
            try:
                known.write_bytes(encode(readings))
            except OSError as error:  # full since then: there is just nothing to compare the next one with
                print(f"everstep: {known}: {error.strerror}", file=sys.stderr)

    def _judge(self, readings: Sequence[Reading], earlier: Sequence[Reading] = ()) -> None:
        found = health.judge(readings, self.bars, earlier=earlier)
        slow = [complaint for complaint in found if not complaint.broken]
        if slow:
            print(f"everstep: {self.options.node} is slow: {health.sentence(slow)}", file=sys.stderr)
        broken = [complaint for complaint in found if complaint.broken]
        checks = [complaint.check for complaint in broken]
        same = self.unfit and checks == self.checks  # with other numbers: nothing new to say
        self._tell(self.unfit if same else health.sentence(broken), checks)

    def _tell(self, unfit: str, checks: Sequence[str] = ()) -> None:
        self.unfit, self.checks = unfit, checks
        self.tell(self.number, unfit)


def bars(wanted: Wanted) -> health.Bars:
    return health.Bars(
        shm_bytes=size_of(wanted.shm, "preflight.shm"),
        disk_bytes=size_of(wanted.disk, "preflight.disk"),
        memory_bytes=size_of(wanted.memory, "preflight.memory"),
        descriptors=wanted.descriptors,
    )

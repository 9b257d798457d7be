"""The agent's sampler: how busy its workers, with all that they started, and its node are. A thread of its own.

Nobody waits for it: a driver that hangs, or a host of many processes, must not hold the agent up. It looks every few
seconds, and for new children (which takes a look at every process of the host) so seldom that this costs SCAN_SHARE of
a processor at most. Memory of a worker is not told here: heartbeats tell it, for its own process. Children are not
added to it, because they share most of it with their parent, and what they share is slow to find out.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from everstep.control import procfs
from everstep.control.procfs import TICKS_PER_S, ProcessSample
from everstep.core.load import NodeLoad
from everstep.probe import machine
from everstep.probe.devices import Devices

EVERY_S = 5.0
SCAN_S, SCAN_SHARE = 15.0, 5e-4

Processes = Mapping[int, ProcessSample]  # by pid


class Trees:
    """Processors that workers and all their descendants keep busy. `Trees.sample` is to be called again and again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, tuple[int, ...]] = {}  # first process of a worker -> it and its descendants
        self._before: dict[int, dict[int, ProcessSample]] = {}
        self._before_s = clock()
        self._scan_s = self._before_s

    def sample(self, workers: Mapping[int, int]) -> tuple[int, ...]:
        """`workers`: local rank -> pid. By local rank: percent of one processor since the last call, -1 where nobody
        runs."""
        now_s = self._clock()
        if now_s >= self._scan_s or self._known.keys() != set(workers.values()):
            self._known = descendants(set(workers.values()))
            took_s = self._clock() - now_s
            self._scan_s = now_s + max(SCAN_S, took_s / SCAN_SHARE)
        passed_s, self._before_s = max(now_s - self._before_s, 1e-3), now_s
        most, boot_s = os.cpu_count() or 1, time.clock_gettime(time.CLOCK_BOOTTIME)
        busy = [-1] * (max(workers, default=-1) + 1)
        after: dict[int, dict[int, ProcessSample]] = {}
        for local_rank, pid in workers.items():
            found = (procfs.sample(each) for each in self._known[pid])
            after[pid] = {each.pid: each for each in found if each is not None}
            if pid in after[pid]:
                used_s = spent_s(self._before.get(pid, {}), after[pid], passed_s, boot_s)
                busy[local_rank] = round(100 * min(most, used_s / passed_s))
        self._before = after
        return tuple(busy)


def descendants(roots: set[int]) -> dict[int, tuple[int, ...]]:
    """Each of `roots` with all that descends from it. Whose parents ended before it descends from somebody else."""
    children: dict[int, list[int]] = {}
    for pid in procfs.pids() if roots else ():
        try:
            process = procfs.sample(pid)
        except PermissionError:  # another user's, where /proc hides them
            continue
        if process is not None:
            children.setdefault(process.ppid, []).append(pid)
    found = {}
    for root in roots:
        family = [root]
        for pid in family:  # it grows
            family += children.get(pid, ())
        found[root] = tuple(family)
    return found


def spent_s(before: Processes, after: Processes, passed_s: float, boot_s: float) -> float:
    """Processor time of a family between two looks `passed_s` apart; the second one was at `boot_s` since boot.

    Of a process that was not known before, as much of its time as falls into these seconds if it spent it evenly. The
    time of one that ended is in its parent's count of ended children, with what was seen of it before; one that lived
    between two looks is in there too.
    """
    spent = ended = told = 0.0
    for pid, now in after.items():
        was = before.get(pid)
        if was is not None and was.start_ticks == now.start_ticks:
            spent += now.cpu_s - was.cpu_s
            ended += now.children_s - was.children_s
        else:
            age_s = max(boot_s - now.start_ticks / TICKS_PER_S, 1 / TICKS_PER_S)
            spent += now.cpu_s * min(1.0, passed_s / age_s)
    for pid, was in before.items():
        if pid not in after or after[pid].start_ticks != was.start_ticks:
            told += was.cpu_s + was.children_s
    return spent + max(0.0, ended - told)


class LoadSampler:
    """Begins with `start`. `take(pids)` from another thread: the newest sample, once, or None."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-load", daemon=True)
        self._pids: Mapping[int, int] = {}  # replaced as a whole, and so is the newest sample
        self._newest: NodeLoad | None = None
        self.used_s = 0.0  # processor time that all this took

    def start(self) -> None:
        self._thread.start()

    def take(self, pids: Mapping[int, int]) -> NodeLoad | None:
        """`pids`: local rank -> pid of the workers that run now."""
        self._pids = pids
        newest, self._newest = self._newest, None
        return newest

    def close(self) -> None:
        """Not waited for: it may hang in a driver."""
        self._stop.set()

    def _run(self) -> None:
        try:
            trees, devices = Trees(), Devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
            device_mb = devices.memory_mb()
            before = machine.counters(time.monotonic())
            while not self._stop.wait(self._every_s):
                now = machine.counters(time.monotonic())
                self._newest = msgspec.structs.replace(
                    machine.load(before, now),
                    workers=trees.sample(self._pids),
                    device_mb=device_mb,
                    devices=devices.sample(),
                )
                before, self.used_s = now, time.thread_time()
        except OSError as error:  # no descriptors are left, say: how busy it is is not worth a node
            print(f"everstep: how busy this node is is not known any more: {error}", file=sys.stderr)

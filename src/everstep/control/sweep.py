"""Finding and ending what a dead worker left behind: loader workers, shells, daemons that left their session.

Workers are forked from a zygote which was exec'd with EVERSTEP_JOB_ID and EVERSTEP_NODE in its environment, so
everything below them carries both in /proc/PID/environ, however often it forked or called setsid. A process
that was exec'd with a cleaned environment is found by its parents (the zygote is a child subreaper: orphans
become its children), by its process group or by its session.

All functions block: some 40 us a process of the host, and a process stuck in the kernel with its memory map
locked can block the read of its environment. Call them from a thread.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from everstep.control import procfs
from everstep.control.host import ProcessHandle
from everstep.control.procfs import ProcessSample
from everstep.control.trackers import LAST_S, is_tracker

JOB_VARIABLE = "EVERSTEP_JOB_ID"
NODE_VARIABLE = "EVERSTEP_NODE"
_USUAL_ENVIRON_BYTES = 32 << 10
_LARGEST_ENVIRON_BYTES = 4 << 20  # exec takes at most a quarter of the stack's limit: 2 MB by default
_HELD_AT_ONCE = 256  # pidfds; the usual limit is 1024 descriptors
_FREEZE_ROUNDS = 20  # a tree deeper than this is forking faster than we stop it


class Traces(msgspec.Struct, frozen=True):
    """Other ways than the environment to know a process as ours.

    `reapers`: kept themselves, while every descendant of theirs that is not spared is a leftover (the zygote).
    `groups`, `sessions`: process groups and sessions whose members are leftovers whatever they carry.
    `born_before` (see `boot_s`) keeps what started later, such as workers forked while we look.
    """

    reapers: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    sessions: tuple[int, ...] = ()
    born_before: float = math.inf


NO_TRACES = Traces()


class Purged(msgspec.Struct, frozen=True):
    """What `purge` did: who was killed, and who is still there (stuck in the kernel, or another user's).

    `trackers`: resource trackers left to end by themselves, for the caller to see out.
    """

    killed: tuple[int, ...]
    remaining: tuple[int, ...]
    took_s: float
    trackers: tuple[ProcessSample, ...] = ()


def boot_s() -> float:
    """Now, on the clock that the start times of processes use."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def leftovers(job: str, node: str, spare: Collection[int], also: Traces = NO_TRACES) -> list[int]:
    """Pids of living processes of this job and node which should not be there.

    `spare`: kept together with all their descendants (the workers that run). This process and its own ancestors
    are kept, but not its descendants. `also`: ways to find those whose environment was cleaned, and more to keep.
    """
    return [process.pid for process in _leftovers(job, node, spare, also)]


def purge(
    job: str,
    node: str,
    spare: Collection[int],
    also: Traces = NO_TRACES,
    *,
    within_s: float = 2.0,
    trackers_s: float = LAST_S,
) -> Purged:
    """SIGKILL all `leftovers` and wait for their deaths, again and again until none is left or `within_s` is over.

    Resource trackers come last: they get `trackers_s` to end by themselves, or, with 0, are left alone.
    """
    began = time.monotonic()
    deadline = began + within_s
    killed: set[int] = set()
    tried: set[int] = set()
    while True:
        trackers, found = _apart(_leftovers(job, node, spare, also))
        if tried.issuperset(process.pid for process in found) and (not found or time.monotonic() >= deadline):
            break
        tried.update(process.pid for process in found)
        killed.update(_kill_and_wait(found, deadline))
    if trackers_s > 0:
        _wait_gone(trackers, time.monotonic() + trackers_s)
        killed.update(_kill_and_wait(_still_there(trackers), time.monotonic() + within_s))
        trackers = []
    return Purged(
        tuple(sorted(killed)), tuple(p.pid for p in found), time.monotonic() - began, trackers=tuple(trackers)
    )


def _still_there(processes: list[ProcessSample]) -> list[ProcessSample]:
    now = [(before, procfs.sample(before.pid)) for before in processes]
    return [seen for before, seen in now if seen and seen.alive and seen.start_ticks == before.start_ticks]


def _apart(processes: list[ProcessSample]) -> tuple[list[ProcessSample], list[ProcessSample]]:
    """The resource trackers among them, and the others."""
    trackers = [process for process in processes if is_tracker(process.pid)]
    return trackers, [process for process in processes if process not in trackers]


def kill_tree(
    roots: Iterable[int], spare: Collection[int] = (), signum: int = signal.SIGKILL, within_s: float = 0.0
) -> list[int]:
    """Signal these processes and all their descendants but `spare` with theirs; waits `within_s` for the deaths.

    For SIGKILL the tree is stopped first, level by level, so that nobody forks on while we look: a child of a
    killed parent would be re-parented and out of sight. Returns the pids that got the signal.
    """
    roots = set(roots)
    tree: dict[int, ProcessSample] = {}
    for _ in range(_FREEZE_ROUNDS if signum == signal.SIGKILL else 1):
        table = snapshot()
        spared = _with_descendants(set(spare), table) | {os.getpid()}
        grown = {pid: table[pid] for pid in _with_descendants(roots | tree.keys(), table) - spared if table[pid].alive}
        new = [process for pid, process in grown.items() if pid not in tree]
        tree |= grown
        if signum == signal.SIGKILL:
            _signal_all(new, signal.SIGSTOP)
        if not new:
            break
    if within_s > 0 and signum == signal.SIGKILL:
        return sorted(_kill_and_wait(list(tree.values()), time.monotonic() + within_s))
    return sorted(_signal_all(tree.values(), signum))


def snapshot() -> dict[int, ProcessSample]:
    """All processes of the host but the kernel's own threads."""
    samples = (procfs.sample(pid) for pid in procfs.pids())
    return {process.pid: process for process in samples if process is not None and not process.of_kernel}


def _leftovers(job: str, node: str, spare: Collection[int], also: Traces) -> list[ProcessSample]:
    marks = (f"{JOB_VARIABLE}={job}".encode(), f"{NODE_VARIABLE}={node}".encode())
    newest_tick = also.born_before * procfs.TICKS_PER_S - 1  # a start time is rounded down to a tick
    table = snapshot()
    kept = _with_descendants(set(spare), table) | set(also.reapers) | set(_ancestors(os.getpid(), table))
    orphans = _with_descendants(set(also.reapers), table)
    found: set[int] = set()
    for pid, process in table.items():
        if pid in kept or process.start_ticks > newest_tick:
            continue
        traced = pid in orphans or process.pgrp in also.groups or process.session in also.sessions
        if traced or _carries(pid, marks):
            found.add(pid)
    found = _with_descendants(found, table, stop=kept)  # a leftover may be the parent of a spared worker
    return [table[pid] for pid in sorted(found) if table[pid].alive]


def _carries(pid: int, marks: tuple[bytes, ...]) -> bool:
    """Whether the environment a process was exec'd with has all these entries. Other users' are not ours to read."""
    path = f"/proc/{pid}/environ"
    try:
        raw = procfs.read_bytes(path, _USUAL_ENVIRON_BYTES)
        if len(raw) == _USUAL_ENVIRON_BYTES:
            raw = procfs.read_bytes(path, _LARGEST_ENVIRON_BYTES)
    except (*procfs.GONE, PermissionError):
        return False
    if not all(mark in raw for mark in marks):  # spares nearly everybody the split
        return False
    entries = raw.split(b"\0")
    return all(mark in entries for mark in marks)


def _with_descendants(
    roots: set[int], table: Mapping[int, ProcessSample], stop: Collection[int] = frozenset()
) -> set[int]:
    """The roots that exist and everything below them, not entering `stop`."""
    below: dict[int, list[int]] = {}
    for pid, process in table.items():
        below.setdefault(process.ppid, []).append(pid)
    reached: set[int] = set()
    todo = [pid for pid in roots if pid in table]
    while todo:
        pid = todo.pop()
        if pid not in reached and pid not in stop:
            reached.add(pid)
            todo += below.get(pid, ())
    return reached


def _ancestors(pid: int, table: Mapping[int, ProcessSample]) -> Iterator[int]:
    """The process itself, its parent, and so on up."""
    while pid in table:
        yield pid
        pid = table[pid].ppid


def _signal_all(processes: Iterable[ProcessSample], signum: int) -> list[int]:
    """The pids that got the signal: not those that went meanwhile, nor another user's (a setuid program)."""
    reached = []
    for process in processes:
        try:
            with ProcessHandle(process.pid, process.start_ticks) as handle:
                if handle.send(signum):
                    reached.append(process.pid)
        except (ProcessLookupError, PermissionError):
            continue
    return reached


def _kill_and_wait(processes: list[ProcessSample], deadline: float) -> list[int]:
    """SIGKILL each, all first, then wait for the deaths; returns those that got the signal."""
    reached = _signal_all(processes, signal.SIGKILL)
    for first in range(0, len(processes), _HELD_AT_ONCE):
        _wait_gone(processes[first : first + _HELD_AT_ONCE], deadline)
    return reached


def _wait_gone(processes: list[ProcessSample], deadline: float) -> None:
    handles: dict[int, ProcessHandle] = {}
    poll = select.poll()
    try:
        for process in processes:
            try:
                handle = ProcessHandle(process.pid, process.start_ticks)
            except ProcessLookupError:
                continue
            handles[handle.fd] = handle
            poll.register(handle.fd, select.POLLIN)
        waiting = len(handles)
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                poll.unregister(fd)
                waiting -= 1
    finally:
        for handle in handles.values():
            handle.close()

"""Readings of a machine that need no torch: memory, disk, shared memory, descriptors, clock, versions.

`quick` costs a millisecond and is made before every start; `full` writes and reads a file as well.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from everstep.core.checkup import Reading

SHM = Path("/dev/shm")
UNLIMITED = 1 << 30  # descriptors, when there is no limit
QUICK_BYTES = 4096
DISK_BYTES = 8 << 20


def quick(folder: Path) -> list[Reading]:
    """`folder`: where this node is to write. It must be there."""
    return [*_limits(folder), *_write(folder, QUICK_BYTES, rates=False)]


def full(folder: Path, clock: Clock) -> list[Reading]:
    """As `quick`, with the rates of the disk, versions, and the clock since `clock` was made."""
    limits = _limits(folder)
    room = min((reading.value for reading in limits if reading.check == "disk.free"), default=0.0)
    num_bytes = max(QUICK_BYTES, min(DISK_BYTES, int(room / 2)))
    return [*limits, *_write(folder, num_bytes, rates=True), *versions(), cpus(), clock.reading()]


def _limits(folder: Path) -> list[Reading]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = UNLIMITED if hard == resource.RLIM_INFINITY else hard  # agents raise the soft one to it
    return [
        Reading("files.limit", limit, detail=f"soft limit {soft}"),
        Reading("memory.free", available_bytes()),
        *_room("shm.free", SHM),
        *_room("disk.free", folder),
    ]


class Clock:
    """Compares the wall clock with the monotonic one over the examination: a jump breaks certificates and logs."""

    def __init__(self) -> None:
        self._began = self._now()

    def _now(self) -> tuple[float, float]:
        return time.time(), time.monotonic()

    def reading(self) -> Reading:
        (wall, steady), (wall_before, steady_before) = self._now(), self._began
        passed = steady - steady_before
        return Reading("clock.step", abs((wall - wall_before) - passed), detail=f"in {passed:.2f} s")


def versions() -> Iterator[Reading]:
    yield Reading("version", 0, "python", ".".join(platform.python_version_tuple()[:2]))
    for name in ("torch", "everstep"):
        try:
            yield Reading("version", 0, name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Reading("version", 0, name, "missing")


def cpus() -> Reading:
    """Processors that this process may use; less, when its cgroup has a quota."""
    usable = float(len(os.sched_getaffinity(0)))
    quota, _, period = _cgroup("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        usable = min(usable, int(quota) / int(period))
    return Reading("cpus", usable)


def available_bytes() -> float:
    """What the kernel thinks can be had without swapping, within the limit of the cgroup."""
    available = _meminfo("MemAvailable")
    limit, current = _cgroup("memory.max"), _cgroup("memory.current")
    if limit.isdigit() and current.isdigit():
        counted = dict(line.split() for line in _cgroup("memory.stat").splitlines())
        cached = int(counted.get("inactive_file", 0)) + int(counted.get("slab_reclaimable", 0))
        available = min(available, int(limit) - int(current) + cached)
    return available


def memory_bytes() -> float:
    """All that there is, within the limit of the cgroup."""
    limit = _cgroup("memory.max")
    return min(_meminfo("MemTotal"), float(limit) if limit.isdigit() else float("inf"))


def _meminfo(name: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return float(lines[name].split()[0]) * 1024


def _cgroup(name: str) -> str:
    """A file of this process's cgroup (version 2); empty where there is none."""
    own = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    path = next((line[3:] for line in own if line.startswith("0::")), "/")
    for folder in (f"/sys/fs/cgroup{path}", "/sys/fs/cgroup"):  # in a container the second one is its own
        try:
            return Path(folder, name).read_text(encoding="ascii").strip()
        except OSError:
            continue
    return ""


def _room(check: str, folder: Path) -> Iterator[Reading]:
    try:
        found = os.statvfs(folder)
    except OSError as error:
        yield Reading("disk.failed", 1, str(folder), f"{error.strerror}")
    else:
        yield Reading(check, float(found.f_bavail * found.f_frsize), str(folder))


def _write(folder: Path, num_bytes: int, rates: bool) -> list[Reading]:
    """Write a file and read it back. A disk that takes nothing is a reading, not an error."""
    where, data = str(folder), random.Random(num_bytes).randbytes(num_bytes)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            began = time.monotonic()
            _write_all(file.fileno(), data)
            if not rates:
                return []
            os.fsync(file.fileno())
            written = time.monotonic()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            back = _read_all(file.fileno())
            took_s = time.monotonic() - written
    except OSError as error:
        return [Reading("disk.failed", 1, where, error.strerror or str(error))]
    wrong = sum(a != b for a, b in zip(data, back, strict=False)) + abs(len(data) - len(back)) if back != data else 0
    return [
        Reading("disk.write", num_bytes / max(written - began, 1e-9), where),
        Reading("disk.read", num_bytes / max(took_s, 1e-9), where),
        Reading("disk.wrong", wrong, where),
    ]


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read_all(fd: int) -> bytes:
    return b"".join(iter(lambda: os.read(fd, 1 << 20), b""))

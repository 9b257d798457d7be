"""How much memory the machine, and the cgroups we are in, can still give. Memory for images counts like any other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

SPARE_BYTES = 256 << 20  # which a vault leaves to others
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def available_bytes() -> int:
    """What can be taken without driving others out, by the kernel's estimate; the least of machine and cgroups."""
    return max(0, min(_machine_bytes(), *_cgroup_bytes()) - SPARE_BYTES)


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return _UNLIMITED


def _cgroup_bytes() -> Iterator[int]:
    """What each memory cgroup above us has left; caches which it would give up count as left."""
    yield _UNLIMITED
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            names, root = ("memory.max", "memory.current", "inactive_file"), _CGROUPS
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = _CGROUPS / "memory"
        else:
            continue
        group = root / path.lstrip("/")
        while group.is_relative_to(root):
            with contextlib.suppress(OSError, ValueError):  # the root has no limit, "max" is none
                yield _left(group, *names)
            group = group.parent


def _left(group: Path, limit: str, usage: str, cache: str) -> int:
    most, used = int((group / limit).read_text()), int((group / usage).read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return most - used + int(stat.get(cache, 0))

"""How busy the machine is, from /proc: processors, memory, shared memory, network. Some 0.3 ms a look."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from everstep.core.load import NodeLoad
from everstep.probe import host

KB, MB = 10**3, 10**6
STAT, NETWORK, INTERFACES = Path("/proc/stat"), Path("/proc/net/dev"), Path("/sys/class/net")


class Counters(NamedTuple):
    """They only grow."""

    at_s: float
    busy: int  # of all processors together, in ticks
    ticks: int
    in_bytes: int
    out_bytes: int


def counters(now_s: float) -> Counters:
    with STAT.open(encoding="ascii") as file:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    busy = user + nice + system + irq + softirq
    return Counters(now_s, busy, busy + idle + iowait + steal, *_network(NETWORK.read_text(encoding="ascii")))


def _network(text: str) -> tuple[int, int]:
    """Bytes in and out over real interfaces; where there is none (a container), over all that are not the loopback."""
    lines = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in text.splitlines()[2:])}
    names = [name for name in lines if name != "lo"]
    names = [name for name in names if (INTERFACES / name / "device").exists()] or names
    return sum(int(lines[name][0]) for name in names), sum(int(lines[name][8]) for name in names)


def load(before: Counters, now: Counters) -> NodeLoad:
    """What the machine did between these two, and what it has left now."""
    cpus, took_s = os.cpu_count() or 1, max(now.at_s - before.at_s, 1e-6)
    ticks = now.ticks - before.ticks
    shm_free, shm = _shm()
    return NodeLoad(
        busy_percent=round(100 * cpus * (now.busy - before.busy) / ticks) if ticks > 0 else -1,
        cpus=cpus,
        free_mb=max(0, int(host.available_bytes() / MB)),
        memory_mb=int(host.memory_bytes() / MB),
        shm_free_mb=shm_free,
        shm_mb=shm,
        in_kb_per_s=round(max(0, now.in_bytes - before.in_bytes) / took_s / KB),
        out_kb_per_s=round(max(0, now.out_bytes - before.out_bytes) / took_s / KB),
    )


def _shm() -> tuple[int, int]:
    """Free and in all; not known where a container has none."""
    try:
        found = os.statvfs(host.SHM)
    except OSError:
        return -1, 0
    return found.f_bavail * found.f_frsize // MB, found.f_blocks * found.f_frsize // MB

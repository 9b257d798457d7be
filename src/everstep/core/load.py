"""How busy a node, its workers and its devices are: what its agent measures, and what the journal keeps of it.

On the wire and in the journal these are arrays without names: the load of a node of eight workers and devices takes 250
bytes. -1: not known, or not there. `mean` makes one of the samples of a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


class DeviceLoad(msgspec.Struct, frozen=True, array_like=True):
    """An accelerator."""

    busy_percent: int = -1  # of the time in which some kernel ran
    used_mb: int = -1  # 10^6 bytes
    memory_mb: int = -1
    celsius: int = -1


class NodeLoad(msgspec.Struct, frozen=True, array_like=True):
    """A machine, and what the agent's job runs on it. Processors and network are those of the whole machine."""

    busy_cpus: float = -1.0  # processors that work; 1.5: one, and another one half of the time
    cpus: int = 0
    free_mb: int = -1  # memory that can be had (10^6 bytes), within the limit of the agent's cgroup
    memory_mb: int = 0
    shm_free_mb: int = -1  # of /dev/shm
    shm_mb: int = 0
    in_mb_per_s: float = -1.0  # network, without what stays within the machine
    out_mb_per_s: float = -1.0
    workers: tuple[float, ...] = ()  # by local rank: processors that it and its children keep busy
    devices: tuple[DeviceLoad, ...] = ()  # those that the node may use, in its order

    @property
    def cpu_share(self) -> float:
        """Of the machine's processors, 0 to 1."""
        return self.busy_cpus / self.cpus if self.cpus and self.busy_cpus >= 0 else -1.0

    @property
    def memory_share(self) -> float:
        """Of the memory, that which cannot be had any more."""
        return 1 - self.free_mb / self.memory_mb if self.memory_mb and self.free_mb >= 0 else -1.0

    @property
    def device_share(self) -> float:
        """Of the time of all devices, that in which they ran something."""
        return average(device.busy_percent / 100 for device in self.devices if device.busy_percent >= 0)


def average(values: Iterable[float]) -> float:
    """Of what is known; -1: nothing is."""
    known = [value for value in values if value >= 0]
    return sum(known) / len(known) if known else -1.0


def mean(samples: Sequence[NodeLoad]) -> NodeLoad:
    """Of the samples of a while, the newest last: how busy it was on average, and how much was left at the end."""
    newest = samples[-1]
    return msgspec.structs.replace(
        newest,
        busy_cpus=round(average(sample.busy_cpus for sample in samples), 2),
        in_mb_per_s=round(average(sample.in_mb_per_s for sample in samples), 1),
        out_mb_per_s=round(average(sample.out_mb_per_s for sample in samples), 1),
        workers=tuple(
            round(average(s.workers[k] for s in samples if k < len(s.workers)), 2) if now >= 0 else -1.0
            for k, now in enumerate(newest.workers)
        ),
        devices=tuple(
            msgspec.structs.replace(
                now, busy_percent=round(average(s.devices[k].busy_percent for s in samples if k < len(s.devices)))
            )
            for k, now in enumerate(newest.devices)
        ),
    )

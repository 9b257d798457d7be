"""How busy a node, its workers and its devices are: what its agent measures, and what the journal keeps of it.

On the wire and in the journal these are arrays of whole numbers: the load of a node of eight workers and devices takes
200 bytes. -1: not known, or not there. `mean` makes one of the samples of a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


class DeviceLoad(msgspec.Struct, frozen=True, array_like=True):
    """An accelerator."""

    busy_percent: int = -1  # of the time in which some kernel ran
    used_percent: int = -1  # of its memory
    celsius: int = -1


class NodeLoad(msgspec.Struct, frozen=True, array_like=True):
    """A machine, and what the agent's job runs on it. Processors, memory and network are those of the whole machine."""

    busy_percent: int = -1  # of one processor: 150 is one, and another one half of the time
    cpus: int = 0
    free_mb: int = -1  # memory that can be had (10^6 bytes), within the limit of the agent's cgroup
    memory_mb: int = 0
    shm_free_mb: int = -1  # of /dev/shm
    shm_mb: int = 0
    in_kb_per_s: int = -1  # network (10^3 bytes), without what stays within the machine
    out_kb_per_s: int = -1
    workers: tuple[int, ...] = ()  # by local rank: percent of one processor, its children included
    device_mb: int = 0  # memory of each device (10^6 bytes)
    devices: tuple[DeviceLoad, ...] = ()  # those that the node may use, in its order

    @property
    def cpu_share(self) -> float:
        """Of the machine's processors, 0 to 1."""
        return self.busy_percent / 100 / self.cpus if self.cpus and self.busy_percent >= 0 else -1.0

    @property
    def memory_share(self) -> float:
        """Of the memory, that which cannot be had any more."""
        return 1 - self.free_mb / self.memory_mb if self.memory_mb and self.free_mb >= 0 else -1.0

    @property
    def shm_share(self) -> float:
        return 1 - self.shm_free_mb / self.shm_mb if self.shm_mb and self.shm_free_mb >= 0 else -1.0

    @property
    def device_share(self) -> float:
        """Of the time of all devices, that in which they ran something."""
        return average(device.busy_percent / 100 for device in self.devices)

    @property
    def device_memory_share(self) -> float:
        return average(device.used_percent / 100 for device in self.devices)


def average(values: Iterable[float]) -> float:
    """Of what is known; -1: nothing is."""
    known = [value for value in values if value >= 0]
    return sum(known) / len(known) if known else -1.0


def mean(samples: Sequence[NodeLoad]) -> NodeLoad:
    """Of the samples of a while, the newest last: how busy it was on average, and how much was left at the end. Three
    digits of it are enough: more are noise, which takes most of the room in a packed journal."""
    newest = samples[-1]
    workers, devices = [], []
    for k, share in enumerate(newest.workers):
        known = average(sample.workers[k] for sample in samples if k < len(sample.workers))
        workers.append(round(known) if share >= 0 else -1)
    for k, device in enumerate(newest.devices):
        known = average(sample.devices[k].busy_percent for sample in samples if k < len(sample.devices))
        devices.append(msgspec.structs.replace(device, busy_percent=round(known)))
    return msgspec.structs.replace(
        newest,
        busy_percent=round(average(sample.busy_percent for sample in samples)),
        free_mb=_short(newest.free_mb),
        shm_free_mb=_short(newest.shm_free_mb),
        in_kb_per_s=_short(average(sample.in_kb_per_s for sample in samples)),
        out_kb_per_s=_short(average(sample.out_kb_per_s for sample in samples)),
        workers=tuple(workers),
        devices=tuple(devices),
    )


def _short(value: float) -> int:
    return int(float(f"{value:.3g}"))

"""What a job used of its machines over its whole life, as a fold over `LoadSeen`, and in words for the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from everstep.core.load import NodeLoad
from everstep.observe.view import Usage


def add(usage: Usage, loads: Mapping[str, NodeLoad]) -> None:
    """One record. Nodes weigh the same, and so do records: they come evenly but for incidents."""
    for node, load in loads.items():
        if load.cpu_share >= 0:
            usage.looks += 1
            usage.cpu_share += (load.cpu_share - usage.cpu_share) / usage.looks
        if load.device_share >= 0:
            usage.device_looks += 1
            usage.device_share += (load.device_share - usage.device_share) / usage.device_looks
        if load.memory_share > usage.memory_peak:
            usage.memory_peak, usage.memory_node = load.memory_share, node
        worst = max((device.used_percent for device in load.devices), default=-1) / 100
        if worst >= 0 and worst > usage.device_memory_peak:  # below 0: no device, or one that does not tell
            usage.device_memory_peak, usage.device_memory_node = worst, node
        for local_rank, percent in enumerate(load.workers):
            if percent > usage.worker_percent:
                usage.worker_percent, usage.worker = percent, f"{node}/{local_rank}"


def lines(usage: Usage) -> Iterator[str]:
    if usage.looks:
        yield f"processors {usage.cpu_share:.0%} busy on average"
        yield f"memory of a node: {usage.memory_peak:.0%} used at most, on {usage.memory_node}"
    if usage.worker:
        yield f"the busiest worker: {usage.worker}, {usage.worker_percent} % of a processor, its children included"
    if usage.device_looks:
        yield f"devices {usage.device_share:.0%} busy on average"
    if usage.device_memory_node:
        yield f"memory of a device: {usage.device_memory_peak:.0%} used at most, on {usage.device_memory_node}"

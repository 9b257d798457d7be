"""What fails, as counted in published runs: causes are drawn from the counts, not from printed percentages."""

from __future__ import annotations

from everstep.core.errors import UsageError

# Llama 3 (arXiv 2407.21783, table 5): 16,384 H100, 54 days, 419 unexpected interruptions. The printed 30.1 % for
# faulty GPUs is 35.3 % by count.
LLAMA3 = {
    "gpu": 148,
    "hbm3": 72,
    "software": 54,
    "network": 35,
    "host-maintenance": 32,
    "sram": 19,
    "gsp": 17,
    "nic": 7,
    "nccl-watchdog": 7,
    "silent-corruption": 6,
    "thermal": 6,
    "ssd": 3,
    "power-supply": 3,
    "chassis": 2,
    "io-board": 2,
    "dependency": 2,
    "cpu": 2,
    "memory": 2,
}

# ByteRobust (SOSP'25): incidents of 778,135 jobs; what people change themselves (code, data) is not among them.
BYTEROBUST = {
    "cuda-error": 19968,
    "cpu-overload": 6095,
    "host-memory": 5567,
    "hang": 5506,
    "disk-space": 2755,
    "infiniband": 1599,
    "mount": 1176,
    "hdfs": 1104,
    "container": 781,
    "mfu-decline": 442,
    "kernel-panic": 203,
    "gpu-memory": 188,
    "nan": 148,
    "external": 128,
    "gpu-unavailable": 76,
    "disk": 47,
}

CENSUSES: dict[str, dict[str, int]] = {"llama3": LLAMA3, "byterobust": BYTEROBUST}

# After these the machine itself is sound: its worker starts again on the same node.
TRANSIENT = {"software", "nccl-watchdog", "dependency", "cuda-error", "cpu-overload", "host-memory", "container"}
TRANSIENT |= {"disk-space", "mount", "hdfs", "external", "nan", "hang"}


def census(name: str) -> dict[str, int]:
    """The counts of a published run. Raises UsageError for a name nobody knows."""
    if name not in CENSUSES:
        raise UsageError(f"failures.causes = {name!r}: there are {', '.join(CENSUSES)}")
    return CENSUSES[name]

"""One machine examined in full, here and now; and as the work of a process, which leaves the readings in a file."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from everstep.core.checkup import Place, Reading, encode
from everstep.core.proof import new_nonce
from everstep.probe import host, ring

LOOPBACK_S = 0.1


def take(folder: Path, address: str = "127.0.0.1") -> list[Reading]:
    """All readings of this machine. `folder`: where this node writes; `address`: one of its own."""
    clock = host.Clock()
    found: list[Reading] = []
    if importlib.util.find_spec("torch") is not None:
        found += importlib.import_module("everstep.probe.device").readings()
    return [*found, *host.full(folder, clock), *loopback(address)]


def loopback(address: str) -> list[Reading]:
    """What this machine sends to itself through its network stack."""
    try:
        rings = ring.Rings(address, new_nonce())
    except OSError as error:
        return [Reading("network.failed", 1, detail=f"nothing can listen on {address}: {error.strerror}")]
    try:
        done = rings.run(0, (Place("self", address, rings.port),), "self", LOOPBACK_S)
    finally:
        rings.close()
    if done.why:
        return [Reading("network.failed", 1, detail=done.why)]
    return [Reading("network.rate", done.rate), Reading("network.wrong", done.wrong)]


def run(folder: str, address: str, fd: int) -> int:
    """Examine, then write the readings to `fd`; the exit status of the process that was made for it."""
    with open(fd, "wb") as file:
        file.write(encode(take(Path(folder), address)))
    return 0

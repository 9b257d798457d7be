"""A fabric for the ranks of a script that has only a store: they tell each other where they listen, and all are linked.

The one-time secret that proves the links travels through the store too: who can read the store is trusted, as with any
other backend. The store may outlive the group, and be used for the next one.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from everstep.comms.fabric import Fabric
from everstep.core import identity
from everstep.core.formation import Formation, Seat

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # nothing is sent: connecting a datagram socket only asks the kernel for the way


class Store(Protocol):
    """What is used of torch's stores. `get` waits."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


class Life(msgspec.Struct, frozen=True):
    """A process, for other processes of its PID namespace; `born` tells it from a later one with its number."""

    pid: int
    born: int
    namespace: int


class Place(msgspec.Struct, frozen=True):
    """Where a rank runs. `network`: ranks with the same one reach each other by the loopback address."""

    host: str
    network: str
    address: str
    life: Life


def meet(store: Store, rank: int, size: int, timeout_s: float) -> tuple[Fabric, tuple[Life | None, ...]]:
    """A fabric in its epoch 1, whose roles are the ranks; and the lives of the ranks which this one can watch.

    Raises LinkError, which names a rank that cannot be reached, and what the store raises.
    """
    # A key of this rank alone: every rank has met on this store equally often.
    turn = store.add(f"times/{rank}", 1)
    mine = _place()
    if rank == 0:
        store.set(f"secret/{turn}", secrets.token_hex(32))
    store.set(f"place/{turn}/{rank}", msgspec.json.encode(mine).decode())
    places = [msgspec.json.decode(text, type=Place) for text in _read(store, f"place/{turn}", size)]
    fabric = Fabric(f"rank {rank}", mine.host, store.get(f"secret/{turn}"), bind=_address(mine, places))
    try:
        store.set(f"endpoint/{turn}/{rank}", fabric.endpoint)
        endpoints = [text.decode() for text in _read(store, f"endpoint/{turn}", size)]
        formation = _formation(places, endpoints)
        fabric.prepare(formation, timeout_s)
        fabric.switch(formation)
    except BaseException:
        fabric.close()
        raise
    if rank == 0:
        store.delete_key(f"secret/{turn}")  # every other rank has proven that it knows it
    lives = (place.life if place.life.namespace == mine.life.namespace else None for place in places)
    return fabric, tuple(None if role == rank else life for role, life in enumerate(lives))


def born(pid: int) -> int:
    """When a process began, in ticks since boot. Raises ProcessLookupError."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(f"no process {pid}") from error
    return int(text.rpartition(")")[2].split()[19])


def _read(store: Store, name: str, size: int) -> list[bytes]:
    """What each rank wrote, once all have."""
    return [store.get(f"{name}/{rank}") for rank in range(size)]


def _place() -> Place:
    host, pid = identity.host(), os.getpid()
    network = f"{host} {os.stat('/proc/self/ns/net').st_ino}"
    life = Life(pid, born(pid), os.stat("/proc/self/ns/pid").st_ino)
    known = identity.mine()
    address = known.address if known is not None else _way_to(os.environ.get("MASTER_ADDR", LOOPBACK))
    return Place(host, network, address, life)


def _address(mine: Place, places: Sequence[Place]) -> str:
    """Where the other ranks reach this one. Raises ValueError when there is no such address."""
    away = [place for place in places if place.network != mine.network]
    if not away:
        return LOOPBACK
    # On the machine that MASTER_ADDR names, that name may stand for the loopback.
    ways = [mine.address, *(_way_to(place.address) for place in away if not _is_loopback(place.address))]
    for way in ways:
        if not _is_loopback(way):
            return way
    raise ValueError(f"no address of {mine.host} for the ranks on other hosts: MASTER_ADDR must not be the loopback")


def _way_to(name: str) -> str:
    """Our own address on the way to that host; the loopback when it is not known."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError:
        return LOOPBACK


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _formation(places: Sequence[Place], endpoints: Sequence[str]) -> Formation:
    """All ranks in their order; sums are first inside each host, if there are several."""
    seats = tuple(
        Seat(f"rank {rank}", place.host, place.host, endpoint)
        for rank, (place, endpoint) in enumerate(zip(places, endpoints, strict=True))
    )
    hosts = list(dict.fromkeys(place.host for place in places))
    groups = tuple(hosts.index(place.host) for place in places) if len(hosts) > 1 else ()
    return Formation(1, seats, abort=False, floor=0, groups=groups)

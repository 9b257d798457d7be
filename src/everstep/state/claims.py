"""Claims: small files that say who is doing what to a checkpoint, and whether that one still lives.

A claim has a name of its own and is written before its owner looks at the others'. So of two who must not both go on,
at least one sees the other, on any store where a file is listed once it is written; and clearing a dead one's claim
away is safe to do twice. (One shared lock file would need an atomic take-over, which object stores do not have.)

An owner on this machine is known to live by its process; one elsewhere by its claim, renewed every RENEW_S.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from everstep.state.layout import CLAIMS, TEMPORARY
from everstep.state.store import Store

RENEW_S = 60.0
STALE_S = 600.0  # more than clocks of two nodes differ, and than a store is away for


_held: set[str] = set()  # by this process; so one that could not be removed, as the store was away, is known to be void


class Owner(msgspec.Struct, frozen=True):
    """`boot` and `space`: the kernel and its table of processes in which `pid` is a name; `began`: of the process."""

    host: str
    boot: str
    space: int
    pid: int
    began: str
    renewed_s: float  # wall clock

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def ourselves() -> Owner:
    pid = os.getpid()
    return Owner(socket.gethostname(), _boot(), _space(), pid, _began(pid) or "", time.time())


def lives(owner: Owner, name: str) -> bool:
    """Whether somebody still stands for a claim."""
    if owner.boot and (owner.boot, owner.space) == (_boot(), _space()):
        if owner.pid == os.getpid() and owner.began == _began(owner.pid):
            return name in _held
        return _began(owner.pid) == owner.began
    return time.time() - owner.renewed_s < STALE_S


class Claim:
    """Ours, until it is released. `kind`: "reading.step-0000000123"."""

    def __init__(self, store: Store, kind: str) -> None:
        self.store = store
        self.kind = kind
        self.name = f"{kind}.{time.time_ns():020d}-{secrets.token_hex(4)}"
        self._due = 0.0
        store.make(CLAIMS)
        _held.add(self.name)
        try:
            self.renew()
        except BaseException:
            _held.discard(self.name)
            raise

    def renew(self) -> None:
        """Call it now and then while the work lasts; it does little."""
        if time.monotonic() >= self._due:
            try:
                self._put()
            except FileNotFoundError:  # somebody swept it before it had its name
                self._put()
            self._due = time.monotonic() + RENEW_S

    def _put(self) -> None:
        self.store.put(f"{CLAIMS}/{self.name}", msgspec.json.encode(ourselves()), durable=False)

    def others(self) -> dict[str, Owner]:
        """Living claims of the same kind, and whose."""
        return {name: owner for name, owner in living(self.store, self.kind).items() if name != self.name}

    def release(self) -> None:
        """Never fails: what cannot be removed now is void anyway, and is swept later."""
        _held.discard(self.name)
        with suppress(OSError):
            self.store.remove(f"{CLAIMS}/{self.name}")


def living(store: Store, kind: str) -> dict[str, Owner]:
    """Claims of a kind ("reading": whatever is read) whose owners live."""
    return {name: owner for name, owner in _all(store, kind) if lives(owner, name)}


def bury(store: Store) -> None:
    """Clear away the claims of dead owners; and half of one, when nobody else can be at it."""
    names = store.sizes(CLAIMS)
    claims = dict(_all(store, ""))
    for name, owner in claims.items():
        if not lives(owner, name):
            store.remove(f"{CLAIMS}/{name}")
    if not any(lives(owner, name) for name, owner in claims.items() if name not in _held):
        for name in names:
            if TEMPORARY in name:
                store.remove(f"{CLAIMS}/{name}")


def _all(store: Store, kind: str) -> Iterator[tuple[str, Owner]]:
    for name in sorted(store.sizes(CLAIMS)):
        if TEMPORARY in name or (kind and not name.startswith(kind + ".")):
            continue
        try:
            yield name, msgspec.json.decode(store.get(f"{CLAIMS}/{name}"), type=Owner)
        except FileNotFoundError:  # released since
            continue
        except msgspec.MsgspecError:  # torn by a crash of the machine: nobody lives by it
            yield name, Owner("", "", 0, 0, "", 0.0)


@contextmanager
def claim(store: Store, kind: str) -> Iterator[Claim]:
    made = Claim(store, kind)
    try:
        yield made
    finally:
        made.release()


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no such kernel: then claims are known by their age alone
        return ""


def _space() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _began(pid: int) -> str | None:
    """When a process began, in ticks since boot; None when there is none, or it is dead and only not yet reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]

"""What a worker process knows about itself: set once by the process that becomes a worker, read by its session.

Not in the environment: a child of the script would inherit it and take itself for the worker.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class VaultPlace(msgspec.Struct, frozen=True):
    """Where a node's vault is found, alive or not: who listens there starts it when somebody comes."""

    socket: str = ""  # abstract name of its Unix socket for workers, in hex; empty: the node has none
    endpoint: str = ""  # "host:port" for vaults of other nodes


class Identity(msgspec.Struct, frozen=True):
    """One worker under an agent. `channel`: its socket to the agent. `secret`: proves links to be ours."""

    worker: str  # node/local_rank#life
    address: str  # where workers of other nodes reach this one
    secret: bytes
    channel: int
    vault: VaultPlace = VaultPlace()


_mine: Identity | None = None


def take(identity: Identity) -> None:
    """This process is that worker from now on."""
    global _mine
    _mine = identity


def mine() -> Identity | None:
    """None in a process that no agent started: its world has one member."""
    return _mine


def host() -> str:
    """Identity of this machine: workers with the same one may share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

"""What a vault is told by who starts it. Light: the launcher needs neither the vault's code nor its libraries."""

from __future__ import annotations

import signal

import msgspec

FINISH_SIGNAL = signal.SIGUSR2  # end once the images that are asked for are on disk


class Options(msgspec.Struct, frozen=True):
    """`listen_fd`: a listening Unix socket. `address`: where vaults of other nodes reach this one."""

    node: str
    secret: bytes
    listen_fd: int
    address: str
    parent: int
    budget_bytes: int = 0  # of images; 0: half of what is available
    rate_bytes_per_s: float = 0.0  # of each copy to a peer; 0: as fast as it goes
    finish_s: float = 60.0  # for the last writes, once it is to end
    ignored: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # sent to everybody: the last saves need it
    persister: str = "everstep.state.persist:checkpoints"  # makes what writes to disk

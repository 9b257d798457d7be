"""What a vault is told by who starts it. Light: the launcher needs neither the vault's code nor its libraries."""

from __future__ import annotations

import signal
import socket

import msgspec

FINISH_SIGNAL = signal.SIGUSR2  # end once the images that are asked for are on disk


class Options(msgspec.Struct, frozen=True):
    """`listen_fd`: a listening Unix socket; `remote_fd`: a TCP socket that listens at `endpoint`, for other vaults."""

    node: str
    secret: bytes
    listen_fd: int
    remote_fd: int
    endpoint: str
    parent: int
    budget_bytes: int = 0  # of images; 0: half of what is available
    rate_bytes_per_s: float = 0.0  # of each copy to a peer; 0: as fast as it goes
    finish_s: float = 60.0  # for the last writes, once it is to end
    ignored: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # sent to everybody: the last saves need it
    persister: str = "everstep.state.persist:checkpoints"  # makes what writes to disk


def unix_listener() -> socket.socket:
    """For workers of this host. The kernel chooses a free abstract name, so no file is left."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("")
    listener.listen(128)
    return listener


def tcp_listener(address: str) -> socket.socket:
    """For vaults of other nodes, at a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=64)


def endpoint_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

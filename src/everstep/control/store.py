"""The rendezvous store of one epoch: torch's TCPStore on a listening socket that its agent has opened.

A process of its own, so that killing it ends every trace of the epoch. Clients may connect before it runs:
the socket listens already, and the kernel keeps them waiting in the backlog.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket

UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def serve(fd: int, world_size: int) -> int:
    """Serve on the listening socket `fd` until killed."""
    with socket.socket(fileno=os.dup(fd)) as listening:
        host, port = listening.getsockname()[:2]
    distributed = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(
        host_name=UNSPECIFIED.get(host, host),
        port=port,
        world_size=world_size or None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=fd,
    )
    while store is not None:
        signal.pause()
    return 0

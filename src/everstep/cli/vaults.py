"""The vaults of the nodes of this host: children of the launcher, so that they outlive workers and agents.

The launcher listens for each; the vault is started when the first worker connects, so scripts which keep nothing never
have one, and again, on the same socket, when it died.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from everstep.control.token import links_secret, read_token
from everstep.core.config import RunConfig, size_of
from everstep.core.identity import VaultPlace
from everstep.state.available import available_bytes
from everstep.state.vault_options import FINISH_SIGNAL, Options, endpoint_of, tcp_listener, unix_listener

MOST_DEATHS = 5  # within a minute: one that dies more often is given up
PERIOD_S = 60.0
FINISH_S = 60.0  # for the last writes to disk, when the job has ended

Start = Callable[[list[str], list[int], str], Awaitable[asyncio.subprocess.Process]]


class Vaults:
    """`start` makes a child of a command and of descriptors to inherit; the text is the name of its pid file."""

    def __init__(self, config: RunConfig, token_file: Path, num_nodes: int, start: Start) -> None:
        self._config, self._token_file, self._start = config, token_file, start
        memory = config.vault.memory
        share = available_bytes() // 2 // max(num_nodes, 1)
        self._budget = size_of(memory, "vault.memory") if memory else share
        self._listeners: dict[str, tuple[socket.socket, socket.socket]] = {}  # for workers, for other vaults
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    def listen(self, node: str, address: str) -> VaultPlace:
        """Where it is found, which stays the same whoever dies; nowhere when nothing is to be kept."""
        if not self._budget:
            return VaultPlace()
        if node not in self._listeners:
            self._listeners[node] = unix_listener(), tcp_listener(address or "127.0.0.1")
        local, remote = self._listeners[node]
        return VaultPlace(local.getsockname().hex(), endpoint_of(remote))

    async def mind(self, node: str) -> None:
        """Start the vault of a node whenever somebody wants it and there is none. To be cancelled."""
        if node not in self._listeners:
            return
        deaths: list[float] = []
        while len(deaths) < MOST_DEATHS:
            await _readable(self._listeners[node])
            process = await self._open(node)
            status = await process.wait()
            deaths = [t for t in deaths if time.monotonic() - t < PERIOD_S] + [time.monotonic()]
            how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
            print(f"everstep: the vault of {node} died ({how}); what it kept in memory is lost", file=sys.stderr)
        print(f"everstep: the vault of {node} dies again and again; giving up", file=sys.stderr)
        for listener in self._listeners.pop(node):
            listener.close()

    async def _open(self, node: str) -> asyncio.subprocess.Process:
        local, remote = self._listeners[node]
        rate = size_of(self._config.vault.rate or "0", "vault.rate")
        options = Options(
            node,
            links_secret(read_token(self._token_file)),
            local.fileno(),
            remote.fileno(),
            endpoint_of(remote),
            os.getpid(),
            self._budget,
            rate,
            FINISH_S,
            ignored=self._config.restart.signals,
        )
        with open(os.memfd_create("everstep-vault"), "wb") as file:
            file.write(msgspec.json.encode(options))
            file.flush()
            python = self._config.worker.python or sys.executable
            command = [python, "-m", "everstep.state.vault", f"/proc/self/fd/{file.fileno()}"]
            fds = [file.fileno(), local.fileno(), remote.fileno()]
            self._processes[node] = await self._start(command, fds, f"vault-{node}.pid")
        return self._processes[node]

    @property
    def processes(self) -> list[asyncio.subprocess.Process]:
        return list(self._processes.values())

    async def close(self, patience_s: float) -> bool:
        """End all, once they wrote what is to be on disk. False: something is not on disk."""
        living = [process for process in self.processes if process.returncode is None]
        for process in living:
            process.send_signal(FINISH_SIGNAL)
        if living:
            await asyncio.wait([asyncio.ensure_future(process.wait()) for process in living], timeout=patience_s)
        for process in living:
            if process.returncode is None:
                process.kill()
                await process.wait()
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.close()
        return all(process.returncode == 0 for process in living)


async def _readable(socks: Sequence[socket.socket]) -> None:
    """Until somebody waits at one of them."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    for sock in socks:
        loop.add_reader(sock, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        for sock in socks:
            loop.remove_reader(sock)

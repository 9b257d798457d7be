"""Where and how an agent's processes run: their environment, files, sockets. Turns a plan into spawn requests."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
import tempfile
from pathlib import Path

import msgspec

from everstep.control import seats
from everstep.control.environ import worker_env
from everstep.control.launch import Kind, SpawnRequest, Warm
from everstep.control.output import line_prefix
from everstep.control.token import links_secret
from everstep.core.config import RunConfig, Std, size_of
from everstep.core.identity import VaultPlace
from everstep.core.trace import RING_BYTES
from everstep.core.types import EpochPlan

STORE = -1  # the store's place among the keys of an epoch
KEYS = 1 << 16  # keys an epoch: its workers', of all lives, and the store's


class AgentOptions(msgspec.Struct, frozen=True):
    """What the launcher tells an agent it starts."""

    node: str
    incarnation: str  # random, one per agent process
    address: str
    node_rank: int  # the group rank it would like, -1: any
    host: str  # of the controller
    port: int
    job: str
    slots: int
    log_dir: str
    token_file: str
    launcher_pid: int
    remote: bool  # the controller is on another host
    config: RunConfig
    vault: VaultPlace = VaultPlace()
    again: bool = False  # the agent before it died


class Workplace:
    """Files, environment and sockets of one agent."""

    def __init__(self, options: AgentOptions) -> None:
        self.options = options
        self.config = options.config
        self.base = dict(os.environ) | self.config.env
        self.trace_bytes = size_of(self.config.trace.size or "0", "trace.size")

    def versions(self) -> dict[str, str]:
        """Found without importing anything: a node with another torch must not join."""
        found = {"python": ".".join(platform.python_version_tuple()[:2])}
        for name in ("torch", "everstep"):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found

    def check_logs(self) -> None:
        """Raises OSError when no attempt could have its logs here: such a node must not join."""
        folder = Path(self.options.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=folder).cleanup()

    def warm(self, answer: Warm) -> None:
        """The zygote is ready; how long that took is worth a line in the node's log folder."""
        folder = Path(self.options.log_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "zygote.json").write_bytes(msgspec.json.encode(answer))
        except OSError as error:  # a full disk: the examination of the node is who judges it
            print(f"everstep: {folder / 'zygote.json'}: {error.strerror}", file=sys.stderr)

    def zygote_env(self) -> dict[str, str]:
        """One thread only: numpy's BLAS starts its own at import when it may."""
        marks = {"EVERSTEP_JOB_ID": self.options.job, "EVERSTEP_NODE": self.options.node}
        return self.base | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | marks

    def open_store_socket(self) -> socket.socket:
        """A listening socket for the next epoch's store: connections queue up before the store runs."""
        family = socket.AF_INET6 if ":" in self.options.address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self.options.address, 0))
        sock.listen(1024)
        return sock

    def folder(self, epoch: int, local_rank: int, life: int) -> Path:
        name = f"{local_rank}.{life}" if life else str(local_rank)
        return Path(self.options.log_dir) / f"attempt_{epoch}" / name

    def request(self, plan: EpochPlan, local_rank: int, life: int, secret: bytes) -> SpawnRequest:
        """`secret`: the job's token; workers prove to each other what is derived from it."""
        worker, folder = self.config.worker, self.folder(plan.epoch, local_rank, life)
        slots = self.options.slots
        key = plan.epoch * KEYS + life * slots + local_rank
        assert life * slots + local_rank < KEYS - 1
        folder.mkdir(parents=True, exist_ok=True)
        env = worker_env(
            self.base,
            plan,
            self.options.node,
            local_rank,
            job=self.options.job,
            role=self.config.logs.role,
            error_file=str(folder / "error.json"),
            max_restarts=self.config.restart.max_restarts,
            omp_threads=worker.omp_num_threads or 1,
            virtual_local_rank=worker.virtual_local_rank,
        )
        if worker.omp_num_threads:
            env["OMP_NUM_THREADS"] = str(worker.omp_num_threads)
        return SpawnRequest(
            key=key,
            kind=Kind(worker.kind),
            target=worker.target,
            args=worker.args,
            env=env,
            cwd=os.getcwd(),
            stdout=str(folder / "stdout.log"),
            stderr=str(folder / "stderr.log"),
            stacks=str(folder / "stacks.txt"),
            worker=seats.name(self.options.node, local_rank, life),
            address=self.options.address,
            secret=links_secret(secret),
            vault=self.options.vault,
            ring_bytes=RING_BYTES if self.trace_bytes else 0,
        )

    def console(self, request: SpawnRequest, local_rank: int) -> list[tuple[str, int]]:
        """Files of this worker that show on the console, and where."""
        shown = self.config.logs.console(local_rank)
        files = [(Std.OUT, request.stdout, sys.stdout.fileno()), (Std.ERR, request.stderr, sys.stderr.fileno())]
        return [(path, fd) for stream, path, fd in files if stream in shown]

    def prefix(self, rank: int, local_rank: int) -> str:
        template = self.base.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "")
        return line_prefix(rank, local_rank, self.config.logs.role, template)

    def store_request(self, key: int, world_size: int) -> SpawnRequest:
        folder = Path(self.options.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        log = str(folder / "store.log")
        marks = {"EVERSTEP_JOB_ID": self.options.job, "EVERSTEP_NODE": self.options.node}
        return SpawnRequest(
            key=key,
            kind=Kind.STORE,
            target="",
            args=(),
            env=self.base | marks,
            cwd=os.getcwd(),
            stdout=log,
            stderr=log,
            world_size=world_size,
        )

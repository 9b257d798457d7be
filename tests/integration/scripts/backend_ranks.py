"""Forks ranks that have torch imported already, and waits for them."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

import everstep.comms.group  # noqa: F401 registers the backend
from everstep.comms.fabric import Fabric
from everstep.core.formation import Formation, Seat

TOKEN = b"0123456789abcdef" * 4


def fork(size: int, main: Callable[[int], None]) -> list[int]:
    """The PIDs of new processes, one for each rank."""
    gc.freeze()  # what is imported stays: nobody needs to look through it
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                main(rank)
                code = 0
            except BaseException as error:  # noqa: BLE001 the parent must not go on twice
                traceback.print_exc()
                sys.last_value = error  # as the interpreter does before its exit functions
            finally:
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return children


def wait(children: list[int]) -> list[int]:
    """Their exit codes. After the first failure the others, which may wait for it, are killed."""
    codes = dict.fromkeys(children, 0)
    left = set(children)
    while left:
        pid, status = os.waitpid(-1, 0)
        codes[pid] = os.waitstatus_to_exitcode(status)
        left.discard(pid)
        if codes[pid] > 0:
            for other in left:
                os.kill(other, signal.SIGKILL)
    return [codes[child] for child in children]


def fails(size: int, main: Callable[[int, str], None]) -> int:
    """Run it on all ranks, which share a folder; 1 when one of them failed."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            return int(any(wait(fork(size, lambda rank: main(rank, folder)))))
        finally:
            tempfile.tempdir = None


def init(backend: str, rank: int, size: int, folder: str, **options: object) -> None:
    """A default group that meets in a file."""
    store = dist.FileStore(f"{folder}/{backend}", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)


def fabric_of(rank: int, size: int, folder: str, shared_memory: bool) -> tuple[Fabric, tuple[Seat, ...]]:
    """As a session has one: in no epoch yet. And the seats of all."""
    store = dist.FileStore(f"{folder}/seats", size)
    fabric = Fabric(f"node/{rank}#0", "host", TOKEN, shared_memory=shared_memory)
    store.set(str(rank), fabric.endpoint)
    return fabric, tuple(Seat(f"node/{r}#0", "node", "host", store.get(str(r)).decode()) for r in range(size))


def enter(fabric: Fabric, epoch: int, seats: tuple[Seat, ...]) -> None:
    formation = Formation(epoch, seats, abort=False, floor=0)
    fabric.prepare(formation)
    fabric.switch(formation)

"""One member of test_restartable.py: becomes the worker that an agent would have forked, then runs a script with a
restartable function.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.core import identity
from everstep.probe import boot
from everstep.train.restartable import Entry

STEPS = 12
CHECKPOINT = Path("checkpoint.pt")


def say(*words: object) -> None:
    print(*words, flush=True)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def train(count: int, at_step: Callable[[int], None] = lambda step: None) -> float:
    """DDP and a checkpoint of its own; the sum of its parameters."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 1)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    begin = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        begin = saved["step"]
    say("entry", os.environ["TORCHELASTIC_RESTART_COUNT"], "rank", rank, "of", dist.get_world_size(), "from", begin)
    for step in range(begin, count):
        at_step(step)
        optimizer.zero_grad()
        wrapped(batch(step, rank)).square().mean().backward()
        optimizer.step()
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, "checkpoint.tmp")
            os.replace("checkpoint.tmp", CHECKPOINT)
        dist.barrier()
        say("step", step)
    dist.destroy_process_group()
    return float(sum(p.detach().sum() for p in model.parameters()))


# What the function is in the midst of when its entry ends ------------------------------------------------


def loop() -> None:
    while True:
        pass


def swallow() -> None:
    """A handler that is too wide: the next try gets through."""
    try:
        loop()
    except BaseException:  # noqa: BLE001 - as scripts have it
        say("swallowed")
    loop()


def deadlock() -> None:
    """A call in C that heeds neither signals nor sockets."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def collective() -> None:
    """The other member never takes part in this one."""
    dist.all_reduce(torch.ones(1000))


def store() -> None:
    dist.distributed_c10d._get_default_store().get("nobody sets it")


STUCK: dict[str, Callable[[], None]] = {
    "loop": loop,
    "sleep": lambda: time.sleep(100),
    "lock": lambda: threading.Semaphore(0).acquire() and None,
    "queue": lambda: queue.Queue[int]().get() and None,
    "swallow": swallow,
    "deadlock": deadlock,
    "collective": collective,
    "store": store,
}


def once(what: Callable[[], None]) -> None:
    """In the first entry of the first life."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        say("now")
        what()


@everstep.restartable(limit_s=2.0)
def stuck(how: str) -> float:
    def fault(step: int) -> None:
        if step == 5:
            once(STUCK[how] if dist.get_rank() == 0 else lambda: time.sleep(100))

    return train(STEPS, fault)


@everstep.restartable
def raising(rank: int) -> float:
    def fault(step: int) -> None:
        if step == 5 and dist.get_rank() == rank:
            once(mistake)

    return train(STEPS, fault)


def mistake() -> None:
    raise KeyError("the function's own mistake")


@everstep.restartable
def waiting(count: int, *, pause: float = 0.0) -> float:
    return train(count, lambda step: time.sleep(pause))


@everstep.restartable
def early() -> str:
    """Rank 0 returns at once, the other one much later."""
    say("in", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["RANK"] == "1":
        once(lambda: time.sleep(100))
    return "through"


@everstep.restartable(
    initialise=lambda entry: say("initialise", *entry),
    abort=lambda entry: say("abort", *entry, threading.current_thread() is threading.main_thread()),
    finalise=lambda entry: say("finalise", *entry, dist.is_initialized()),
    health_check=lambda entry: say("health_check", *entry),
)
def with_callbacks() -> float:
    return train(STEPS, lambda step: once(lambda: time.sleep(100)))


def ill(entry: Entry) -> None:
    if entry.number == 0 and entry.rank == 0:
        raise RuntimeError("this device is broken")


@everstep.restartable(health_check=ill)
def unhealthy() -> float:
    return train(STEPS, lambda step: once(lambda: time.sleep(100)))


@everstep.restartable
def leaving() -> None:
    sys.exit(7)


def run(worker: str, channel: socket.socket, directory: str, output: str, mode: str, *args: str) -> None:
    """In the main thread of a process of its own, with everything it says in the file `output`."""
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.chdir(directory)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    identity.take(identity.Identity(worker, "127.0.0.1", b"a secret of the job", channel.detach()))
    boot.prepare()
    script(mode, *args)


def script(mode: str, *args: str) -> None:
    match mode:
        case "stuck":
            say("result", stuck(args[0]))
        case "raising":
            say("result", raising(int(args[0])))
        case "waiting":
            say("result", waiting(int(args[0]), pause=0.01))
        case "early":
            say("result", early())
        case "callbacks":
            say("result", with_callbacks())
        case "unhealthy":
            say("result", unhealthy())
        case "exit":
            leaving()
        case "twice":
            say("result", waiting(2))
            say("result", waiting(2))

"""What the backend does when ranks die, leave, or do not come; and when a session's members change.

    python backend_faults.py SCENARIO

Ranks print lines of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import backend_ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep.comms.group import make_group

SIZE = 4


def say(**line: object) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def broken(call: Callable[[], object], **more: object) -> None:
    """The call must fail: how, and when."""
    try:
        call()
    except RuntimeError as error:
        causes, cause = [type(error).__name__], error.__cause__
        while cause is not None:
            causes.append(type(cause).__name__)
            cause = cause.__cause__
        say(at=time.monotonic(), causes=causes, text=str(error), **more)
    else:
        say(at=0.0, causes=[], text="it returned", **more)


def wait_in(rank: int) -> Callable[[], object]:
    """Each waits for the victim, the last rank, in another way."""
    x = torch.ones(1 << 16)
    if rank == 0:
        return lambda: dist.all_reduce(x)
    if rank == 1:
        return dist.all_reduce(x, async_op=True).wait
    # The others wait for this one's turn, which never comes: it waits for the victim.
    return lambda: dist.recv(x, SIZE - 1)


def kill(folder: str) -> None:
    """SIGKILL while all wait."""

    def main(rank: int) -> None:
        backend_ranks.init("everstep", rank, SIZE, folder)
        dist.barrier()
        if rank == SIZE - 1:
            Path(folder, "victim").write_text(str(os.getpid()))
            signal.pause()
        broken(wait_in(rank), rank=rank)
        dist.destroy_process_group()
        say(threads=[thread.name for thread in threading.enumerate() if thread.name.startswith("everstep")])

    children = backend_ranks.fork(SIZE, main)
    while not (Path(folder, "victim").exists() and Path(folder, "victim").read_text()):
        time.sleep(0.01)
    time.sleep(0.5)  # till all wait
    say(killed=time.monotonic())
    os.kill(children[-1], signal.SIGKILL)
    say(codes=backend_ranks.wait(children))


def backward(folder: str) -> None:
    """SIGKILL in the middle of DDP's backward pass: an exception for the others, not a crash."""

    def main(rank: int) -> None:
        backend_ranks.init("everstep", rank, SIZE, folder)
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), bucket_cap_mb=0.02)

        def victim(gradient: torch.Tensor) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == SIZE - 1:
            model.module[2].weight.register_hook(victim)
        broken(lambda: model(torch.ones(4, 64)).sum().backward(), rank=rank)

    say(codes=backend_ranks.wait(backend_ranks.fork(SIZE, main)))


def leave(folder: str) -> None:
    """One is done before the others, which need it no more; then they wait for it by mistake."""

    def main(rank: int) -> None:
        backend_ranks.init("everstep", rank, SIZE, folder)
        rest = dist.new_group([0, 1, 2])
        x = torch.ones(1)
        dist.all_reduce(x)
        if rank == 3:
            return  # the end of a script, without a destroy_process_group()
        until, over = time.monotonic() + 1.5, torch.zeros(1)
        while not over:
            dist.all_reduce(x, group=rest)
            time.sleep(0.05)
            over = torch.tensor([float(time.monotonic() >= until)])
            dist.broadcast(over, 0, group=rest)  # one clock decides for all
        began = time.monotonic()
        broken(lambda: dist.all_reduce(x), rank=rank, began=began)
        dist.destroy_process_group()

    say(codes=backend_ranks.wait(backend_ranks.fork(SIZE, main)))


def late(folder: str) -> None:
    """One does not come within the time-out."""

    def main(rank: int) -> None:
        backend_ranks.init("everstep", rank, SIZE, folder, timeout=timedelta(seconds=1))
        dist.barrier()
        began = time.monotonic()
        if rank == 3:
            time.sleep(2)
        broken(lambda: dist.barrier(), rank=rank, began=began)

    say(codes=backend_ranks.wait(backend_ranks.fork(SIZE, main)))


def members(folder: str) -> None:
    """A session's group: one member leaves while works wait; the same group goes on with those who are left."""

    def main(rank: int) -> None:
        fabric, seats = backend_ranks.fabric_of(rank, SIZE, folder, shared_memory=True)
        backend_ranks.enter(fabric, 1, seats)
        group = make_group(fabric)
        x = torch.ones(4)
        dist.all_reduce(x)
        say(sum=float(x[0]), size=dist.get_world_size())
        Path(folder, f"done-{rank}").touch()  # nobody goes on while another is still in the first all-reduce
        while len(list(Path(folder).glob("done-*"))) < SIZE:
            time.sleep(0.01)
        if rank == 0:
            return  # without a word: it has no controller that would tell
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]  # which wait for rank 0
        backend_ranks.enter(fabric, 2, seats[1:])
        for work in works:
            broken(work.wait, rank=rank)
        assert dist.group.WORLD is group
        y = torch.full((4,), float(rank))
        dist.all_reduce(y)
        dist.broadcast(x, 2)
        say(sum=float(y[0]), size=dist.get_world_size(), role=dist.get_rank(), rank=rank)
        dist.barrier()
        dist.destroy_process_group()
        fabric.close()

    say(codes=backend_ranks.wait(backend_ranks.fork(SIZE, main)))


def mixed(folder: str) -> None:
    """A group of the one backend beside a default group of the other; and default groups one after the other."""

    def main(rank: int) -> None:
        for default, other in (("gloo", "everstep"), ("everstep", "gloo")):
            backend_ranks.init(default, rank, SIZE, folder)
            group = dist.new_group([1, 2, 3], backend=other)
            x = torch.full((4,), float(rank))
            dist.all_reduce(x)
            if rank:
                dist.all_reduce(x, group=group)
                say(backend=dist.get_backend(group), sum=float(x[0]))
            dist.barrier()
            dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/again", SIZE)
        for turn in range(3):
            dist.init_process_group("everstep", store=store, rank=rank, world_size=SIZE)
            x = torch.full((4,), float(rank + turn))
            dist.all_reduce(x)
            say(turn=turn, sum=float(x[0]))
            dist.destroy_process_group()

    say(codes=backend_ranks.wait(backend_ranks.fork(SIZE, main)))


SCENARIOS = {each.__name__: each for each in (kill, backward, leave, late, members, mixed)}


def main() -> None:
    torch.set_num_threads(1)
    folder = sys.argv[2]
    Path(folder).mkdir(exist_ok=True)
    SCENARIOS[sys.argv[1]](folder)


if __name__ == "__main__":
    main()

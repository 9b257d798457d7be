"""Collectives against gloo, alternating in one run; and how soon all members hear of a death, whatever they wait for.

    python benchmarks/collectives.py [--quick | --full] [--json]

Processes of one host, float32, one torch thread each. The size is that of the longer side: the input of a
reduce-scatter, the output of an all-gather. A time is the median over blocks of calls, taken at rank 0. The death is a
SIGKILL, which the kernel tells the parent through the robust mutex as it tells an agent.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import torch
import torch.distributed as dist
from harness import Claim, arguments, machine, median, say, show

from everstep.comms.collectives import Communicator
from everstep.comms.fabric import Fabric
from everstep.control import robust
from everstep.core.errors import EpochBroken
from everstep.core.formation import Formation, Seat
from everstep.core.page import Page, Word

SIZES = (1 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)
MEMBERS = (2, 4, 8)
SMALL = 4 << 20
TOKEN = b"benchmark" * 8


def formation_of(fabric: Fabric, pipe: Connection) -> Formation:
    """All seats, through the parent."""
    pipe.send(fabric.endpoint)
    endpoints = pipe.recv()
    seats = tuple(Seat(f"bench/{i}#0", "bench", "bench", endpoint) for i, endpoint in enumerate(endpoints))
    return Formation(1, seats, abort=False, floor=0)


def crew(members: int, run: Callable[[int, Fabric, Connection], None]) -> tuple[list[int], list[Connection]]:
    """Fork the members; each enters the epoch, and runs."""
    pids, pipes = [], []
    for rank in range(members):
        ours, theirs = Pipe()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                fabric = Fabric(f"bench/{rank}#0", "bench", TOKEN)
                formation = formation_of(fabric, theirs)
                fabric.prepare(formation)
                fabric.switch(formation)
                run(rank, fabric, theirs)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        pids.append(pid)
        pipes.append(ours)
    endpoints = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(endpoints)
    return pids, pipes


def calls(c: Communicator, size: int, members: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By collective: ours, gloo's."""
    whole = torch.zeros(size // 4)
    share = torch.zeros(size // 4 // members)
    sums = torch.zeros(size // 4)
    return {
        "all-reduce": (lambda: c.all_reduce(sums), lambda: dist.all_reduce(sums)),
        "reduce-scatter": (
            lambda: c.reduce_scatter_single(share, whole),
            lambda: dist.reduce_scatter_single(share, whole),
        ),
        "all-gather": (lambda: c.all_gather_single(whole, share), lambda: dist.all_gather_single(whole, share)),
    }


def timed(c: Communicator, call: Callable[[], object], repeats: int) -> float:
    """Seconds a call, once all have come here."""
    c.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def compare(rank: int, members: int, fabric: Fabric, pipe: Connection, store: str, blocks: int) -> None:
    """Rank 0 sends one row for each collective and size."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=members)
    c = Communicator(fabric)
    for size in SIZES:
        for name, (ours, gloos) in calls(c, size, members).items():
            repeats = max(1, min(5, 4 * SMALL // size))
            ours(), gloos()  # the first call of a size touches its memory
            count = 3 * blocks if size <= SMALL else blocks
            rows = [(timed(c, ours, repeats), timed(c, gloos, repeats)) for _ in range(count)]
            if rank == 0:
                pipe.send((name, size, [row[0] for row in rows], [row[1] for row in rows]))
    c.barrier()


def ratios(members: int, blocks: int) -> list[Claim]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pids, pipes = crew(members, lambda r, fabric, pipe: compare(r, members, fabric, pipe, store, blocks))
        for _ in range(3 * len(SIZES)):
            name, size, ours, gloos = pipes[0].recv()
            value, peer = median(ours) * 1e3, median(gloos) * 1e3
            least = 2 if name == "all-reduce" and size <= SMALL else 1
            claim = f"{name} of {size >> 10} KB, {members} members"
            rows.append(Claim(claim, value, "ms", "gloo", peer, peer / value, f">= {least}x", peer / value >= least))
            say(f"{claim}: {value:.3f} ms, gloo {peer:.3f} ms, ratio {peer / value:.2f}")
        for pid in pids:
            os.waitpid(pid, 0)
    return rows


def wait_for_ever(rank: int, fabric: Fabric, pipe: Connection, page: Page) -> None:
    """Each in another call that needs the last rank, which never calls; tell when it raised."""
    c, long = Communicator(fabric), torch.zeros(8 << 20)
    last = c.size - 1
    if rank == last:
        robust.lock(page)
        page[Word.READY_NS] = 1
        pipe.send(os.getpid())
        signal.pause()
    waits = [
        lambda: c.all_reduce(long),
        lambda: Communicator(fabric, 1, (1, last)).broadcast(long, 1),
        lambda: c.recv(long, last),
        lambda: c.send(long, last),
        lambda: Communicator(fabric, 2, (4, last)).all_gather_bytes(b"vote"),
        lambda: Communicator(fabric, 3, (5, last)).barrier(),
        lambda: Communicator(fabric, 4, (6, last)).all_to_all_single(torch.zeros(2), torch.zeros(2)),
    ]
    listener = threading.Thread(target=lambda: (pipe.recv(), fabric.abort(1, "a member died")))
    listener.start()
    pipe.send(os.getpid())
    try:
        waits[rank]()
    except EpochBroken:
        pipe.send(time.monotonic())
    listener.join()
    pipe.recv()  # whoever ended now would take a core from those who have not heard yet


def death(members: int) -> float:
    """Seconds from the kill until the last survivor's call had raised."""
    page = Page.create("bench")
    robust.init(page)
    pids, pipes = crew(members, lambda rank, fabric, pipe: wait_for_ever(rank, fabric, pipe, page))

    def tell(_ns: int) -> None:
        for pipe in pipes[:-1]:
            pipe.send("abort")

    watch = robust.DeathWatch(page, tell)
    for pipe in pipes:
        pipe.recv()
    time.sleep(0.3)  # until all wait
    began = time.monotonic()
    os.kill(pids[-1], signal.SIGKILL)
    ended = [pipe.recv() for pipe in pipes[:-1]]
    for pipe in pipes[:-1]:
        pipe.send("end")
    watch.close()
    for pid in pids:
        os.waitpid(pid, 0)
    return max(ended) - began


def main() -> None:
    options = arguments(__doc__ or "")
    say(machine())
    rows = [row for members in MEMBERS for row in ratios(members, 15 if options.full else 3)]
    times = [death(8) for _ in range(20 if options.full else 5)]
    say(json.dumps([round(t * 1e3, 2) for t in times]))
    what = "SIGKILL of 1 of 8 -> the calls of all 7 others have raised"
    rows.append(Claim(f"{what}, median", statistics.median(times) * 1e3, "ms"))
    rows.append(Claim(f"{what}, worst", max(times) * 1e3, "ms", bar="<= 20 ms", holds=max(times) <= 0.02))
    show(rows, options.json)


if __name__ == "__main__":
    main()

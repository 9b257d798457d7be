"""A gloo collective that waits for a stopped peer raises as soon as its sockets are shut from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from everstep.control import procfs, sockets

WORKER = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=45))
x = torch.ones(1000)
dist.all_reduce(x)
print("formed", flush=True)
sys.stdin.readline()
print("going", flush=True)
try:
    dist.all_reduce(x)
    print("done", flush=True)
except RuntimeError as error:
    print("raised", time.monotonic(), flush=True)
"""


def until_asleep(pid: int) -> None:
    """Ten looks in a row at a process that sleeps and uses no CPU: it is inside the collective."""
    deadline = time.monotonic() + 10
    quiet, cpu_s = 0, -1.0
    while quiet < 10:
        assert time.monotonic() < deadline
        seen = procfs.sample(pid)
        assert seen is not None and seen.alive
        quiet = quiet + 1 if (seen.state, seen.cpu_s) == ("S", cpu_s) else 0
        cpu_s = seen.cpu_s
        time.sleep(0.01)


def test_a_collective_with_a_stopped_peer_raises_within_a_second() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKER]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(port)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        waiting, stopped = workers
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline() == "formed\n"
        stopped.send_signal(signal.SIGSTOP)
        assert waiting.stdin is not None and waiting.stdout is not None
        waiting.stdin.write("go\n")
        waiting.stdin.flush()
        assert waiting.stdout.readline() == "going\n"
        until_asleep(waiting.pid)
        cut_at = time.monotonic()
        assert sockets.cut([waiting.pid], sockets.local_addresses()) >= 1
        word, at = waiting.stdout.readline().split()
        assert word == "raised"
        assert float(at) - cut_at < 1.0
        print(f"raised {1000 * (float(at) - cut_at):.1f} ms after the cut")
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()

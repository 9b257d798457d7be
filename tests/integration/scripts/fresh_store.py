"""Writes into the job's store, looks for what earlier attempts wrote there, and fails in another way each time."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def fail(attempt: int) -> None:
    how = attempt % 3
    if how == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == 1:
        raise RuntimeError("not this time")
    os._exit(3)


def main() -> None:
    attempts = int(sys.argv[1])
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    began = time.monotonic()
    dist.init_process_group("gloo")
    total = torch.ones(1000)
    dist.all_reduce(total)
    formed_s = time.monotonic() - began
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, dist.get_world_size(), is_master=False)
    stale = [k for k in range(attempt) if store.check([f"attempt-{k}"])]
    dist.barrier()  # all have looked
    store.set(f"attempt-{attempt}", "written")
    assert store.check([f"attempt-{attempt}"])
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(1 + attempt):
        parameter.grad = torch.ones(1)
        dist.all_reduce(parameter.grad)
        optimizer.step()
    with open(f"formed-{rank}.jsonl", "a") as file:
        print(json.dumps({"attempt": attempt, "s": formed_s, "port": port, "stale": stale}), file=file)
    dist.barrier()
    if attempt < attempts and rank == attempt % 2:
        fail(attempt)
    dist.barrier()  # the others meet their peer's end in here
    dist.destroy_process_group()


main()

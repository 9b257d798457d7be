"""A worker of benchmarks/downtime.py: DistributedDataParallel in NVRx's in-process wrapper.

The way of NVRx's "optimal" example: model, optimizer and store outlive a restart, only the process group and what hangs
on it are made again. State stays in memory: DistributedDataParallel sends the first rank's parameters, which an update
inside `atomic` leaves whole, and the number of the step goes the same way. Monitors look ten times a second.
No `from __future__ import annotations` here: the wrapper tells its own argument by the type.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import downtime_work as work
import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

COLLECTIVE_TIMEOUT = timedelta(seconds=1)  # the wrapper cannot abort gloo: a member two hops from the dead one waits
MEETING_TIMEOUT = timedelta(seconds=30)  # at 1 s a busy machine sometimes gets no group together, and all hang
TICK = timedelta(seconds=0.1)
PORT = int(os.environ["MASTER_PORT"])


@inprocess.Wrapper(
    store_kwargs={"port": PORT + 1},
    monitor_thread_interval=TICK,
    monitor_process_interval=TICK,
    progress_watchdog_interval=TICK,
    heartbeat_interval=TICK,
    last_call_wait=TICK,
)
def train(
    store: dist.Store,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: torch.Tensor,
    notes: work.Notes,
    call_wrapper: inprocess.CallWrapper | None = None,
) -> None:
    assert call_wrapper is not None
    rank, members = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(str(call_wrapper.iteration), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=members, timeout=MEETING_TIMEOUT)
    dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT)
    replicated = DistributedDataParallel(model)
    dist.broadcast(step, 0)
    batch = work.share(rank, members)
    while True:
        optimizer.zero_grad()
        work.loss(replicated, batch).backward()
        with call_wrapper.atomic():
            optimizer.step()
            step += 1
        notes.committed(rank, members, int(step))


def main(folder: Path) -> None:
    model, optimizer = work.build()
    store = dist.TCPStore("localhost", PORT, is_master=os.environ["RANK"] == "0", multi_tenant=True)
    train(store, model, optimizer, torch.zeros(1, dtype=torch.int64), work.Notes(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A worker of benchmarks/downtime.py: one replica group of one process under torchft.

    python downtime_torchft.py FOLDER GROUP NUM_GROUPS        with the lighthouse's address in TORCHFT_LIGHTHOUSE

The loop is the one of torchft's README: its DistributedDataParallel, its optimizer wrapper, a quorum every step.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import downtime_work as work
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

COLLECTIVE_TIMEOUT = timedelta(seconds=1)  # a gloo member two hops from the dead one waits it out


def main(folder: Path, group: int, num_groups: int) -> None:
    model, plain = work.build()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=COLLECTIVE_TIMEOUT),
        load_state_dict=lambda state: model.load_state_dict(state),
        state_dict=lambda: model.state_dict(),
        min_replica_size=1,
        replica_id=f"group{group}",
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
    )
    replicated, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    batch, notes = work.share(group, num_groups), work.Notes(folder)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        work.loss(replicated, batch).backward()
        optimizer.step()
        if manager.current_step() > before:
            notes.committed(group, manager.num_participants(), manager.current_step())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

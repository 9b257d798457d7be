"""A worker of benchmarks/downtime.py: plain DistributedDataParallel, a checkpoint every step, for torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import downtime_work as work
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, members = dist.get_rank(), dist.get_world_size()
    model, optimizer = work.build()
    checkpoint = folder / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    replicated = DistributedDataParallel(model)
    batch, notes = work.share(rank, members), work.Notes(folder)
    while True:
        work.loss(replicated, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        notes.committed(rank, members, step)
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step}, checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A plain DDP script for the benchmarks: 10.5 M parameters, one checkpoint a step, a line in a file for every step.

It knows no launcher: rank and world come from the environment, the state from its own checkpoint. It raises
when it finds the file `raise` in its folder, which is how the benchmark makes an exception.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--no-checkpoint", action="store_true")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    log = (arguments.folder / f"rank{rank}.jsonl").open("a", buffering=1)

    def note(event: str, **fields: object) -> None:
        log.write(json.dumps({"event": event, "t": time.monotonic(), "pid": os.getpid(), **fields}) + "\n")

    note("start")
    dist.init_process_group("gloo")
    note("group")
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(10)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    checkpoint = arguments.folder / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        step = state["step"]
    note("ready")
    while step < arguments.steps:
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        batch = torch.randn(8, WIDTH, generator=generator)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note("step", step=step)
        if rank == 1 and (arguments.folder / "raise").exists():
            (arguments.folder / "raise").unlink()
            note("raise", step=step)
            raise RuntimeError("an error in the script")
        if rank == 0 and not arguments.no_checkpoint:
            torch.save({"model": model.module.state_dict(), "step": step}, checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

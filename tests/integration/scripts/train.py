"""A plain DDP script as people write them: resumes from its checkpoint, saves every few steps and on SIGTERM.

Its data depends on step and rank only, so a resumed run and an undisturbed one print the same losses.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

BATCH = 4


class Numbers(Dataset[torch.Tensor]):
    """Item i is a function of i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds of other work a step")
    parser.add_argument("--save-every", type=int, default=1)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--loader-context", help="how they are started: fork (the default here), spawn, forkserver")
    parser.add_argument("--width", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    asked = False

    def on_term(*_: object) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, on_term)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = torch.nn.Sequential(
        torch.nn.Linear(16, options.width), torch.nn.Tanh(), torch.nn.Linear(options.width, 1, bias=False)
    )
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoint, step = Path("checkpoint.pt"), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        layers.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    numbers = Numbers(options.steps * BATCH * world)
    order = range(step * BATCH * world + rank, len(numbers), world)
    loader = DataLoader(
        numbers,
        batch_size=BATCH,
        sampler=list(order),
        num_workers=options.loader_workers,
        multiprocessing_context=options.loader_context,
    )
    with open(f"losses-{rank}.jsonl", "a") as log:
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            print(json.dumps({"step": step, "loss": loss.item(), "world": world}), file=log, flush=True)
            if asked or step % options.save_every == 0:
                if rank == 0:
                    state = {"model": layers.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, "checkpoint.tmp")
                    os.replace("checkpoint.tmp", checkpoint)
                dist.barrier()
            if asked:
                print(f"rank {rank} stops at step {step}", flush=True)
                break
            time.sleep(options.pace)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A plain DDP loop with its own checkpoint, entered again in the same processes when a worker dies.

The loop is the script's own: `@everstep.restartable` only says where to begin anew. Kill a worker and watch:

    python examples/restartable_ddp.py                                       # alone, a world of one
    everstep run --nproc-per-node 4 examples/restartable_ddp.py
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import everstep


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, default=Path("restartable_ddp.pt"))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of other work a step")
    return parser.parse_args()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Data that is a function of step and rank: whoever computes it gets the same."""
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    new = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
    os.replace(new, path)


@everstep.restartable
def main(args: argparse.Namespace) -> None:
    """Everything an entry needs is made in here: groups, model, optimizer, data."""
    dist.init_process_group("gloo")
    rank, entry = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, args.width), nn.Tanh(), nn.Linear(args.width, 1))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begin = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
    print(
        f"rank {rank} of {dist.get_world_size()}, process {os.getpid()}, entry {entry}: from step {begin}", flush=True
    )
    for step in range(begin, args.steps):
        inputs, targets = batch(step, rank)
        loss = F.mse_loss(parallel(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % args.save_every == 0:
            save(args.checkpoint, model, optimizer, step + 1)
            print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)
        time.sleep(args.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())

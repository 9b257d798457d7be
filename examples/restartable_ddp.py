"""A plain DDP loop, entered again in the same processes when a worker dies, with the state of the last step.

The loop is the script's own: `@everstep.restartable` says where to begin anew, `everstep.keep` from which step. Kill a
worker and watch; stop it with Ctrl-C or SIGTERM and run it again: it goes on from the folder of --checkpoints.

    python examples/restartable_ddp.py --checkpoints runs/a                  # alone, a world of one
    everstep run --nproc-per-node 4 examples/restartable_ddp.py --checkpoints runs/a
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import everstep


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", help="folder or URL that outlives the job; default: memory only")
    parser.add_argument("--every", type=int, help="steps from one checkpoint to the next; default: when it is cheap")
    parser.add_argument("--memory-every", type=int, default=1, help="the same, in the memory of the nodes")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of other work a step")
    return parser.parse_args()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Data that is a function of step and rank: whoever computes it gets the same."""
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


@everstep.restartable
def main(args: argparse.Namespace) -> None:
    """Everything an entry needs is made in here: groups, model, optimizer, data."""
    dist.init_process_group("gloo")
    rank, entry = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, args.width), nn.Tanh(), nn.Linear(args.width, 1))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saving = everstep.Saving(args.checkpoints, every=args.every, memory_every=args.memory_every)
    with everstep.keep(model=parallel, optimizer=optimizer, checkpoints=saving) as kept:
        me = f"rank {rank} of {dist.get_world_size()}, process {os.getpid()}, entry {entry}"
        print(f"{me}: from step {kept.step}", flush=True)
        for step in range(kept.step, args.steps):
            inputs, targets = batch(step, rank)
            loss = F.mse_loss(parallel(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.committed()
            if rank == 0 and (step + 1) % 10 == 0:
                print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)
            time.sleep(args.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())

"""A script that owns its loop and keeps its state: each step is written down, with its bits, before it is committed.

Restartable with DDP, or --plain; or with FSDP2. A restartable one leaves the end of its loop to the function's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--checkpoints")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--save-at", type=int, default=-1, help="the first rank asks in this step")
    return parser.parse_args()


def build(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(1)
    if not args.sharded:
        norm = nn.BatchNorm1d(args.width)
        return DistributedDataParallel(nn.Sequential(nn.Linear(16, args.width), norm, nn.Linear(args.width, 1)))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(16, args.width), nn.Tanh(), nn.Linear(args.width, 1))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def digest(model: nn.Module) -> str:
    """Of this rank's parameters."""
    parts = [getattr(parameter, "to_local", lambda p=parameter: p)().detach() for parameter in model.parameters()]
    return hashlib.blake2b(b"".join(part.numpy().tobytes() for part in parts), digest_size=8).hexdigest()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def main(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, entry = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    saving = everstep.Saving(args.checkpoints, every=1000, memory_every=1)
    kept = everstep.keep(model=model, optimizer=optimizer, schedule=schedule, checkpoints=saving)
    with open(f"steps-{os.getpid()}.jsonl", "a") as log:
        for step in range(kept.step, args.steps):
            optimizer.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            schedule.step()
            line = {"step": step, "rank": rank, "entry": entry, "digest": digest(model), "time": time.time()}
            print(json.dumps(line), file=log, flush=True)
            if (step, rank) == (args.save_at, 0):
                kept.save()
            kept.committed()
            time.sleep(args.pause)
    if args.plain:
        kept.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    args = parse_args()
    (main if args.plain else everstep.restartable(main))(args)

"""A model sharded by FSDP2 on a session, in replicas of shards, for tests of recovery. Writes what session_train does.

The second weight has 65 rows for two shards, the last one row: neither divides evenly.

A file die-WHERE-ROLE in --out makes that member die there, once: forward, backward, vote (before it), apply.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
from session_train import add_saving, data, die, saving, write
from torch import nn
from torch.distributed.fsdp import fully_shard

import everstep
from everstep.state.local import local


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of this member's part of parameters, buffers and the optimizer's state."""
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        hashed.update(local(tensor).numpy().tobytes())
    for state in optimizer.state.values():
        for value in state.values():
            hashed.update(local(value).numpy().tobytes())
    return hashed.hexdigest()


def build(dropout: float, norm: bool) -> nn.Sequential:
    torch.manual_seed(7)
    extra = [nn.BatchNorm1d(65)] if norm else []
    block = nn.Sequential(nn.Linear(64, 65), nn.Dropout(dropout), *extra, nn.Tanh(), nn.Linear(65, 64))
    return nn.Sequential(nn.Linear(16, 64), block, nn.ReLU(), nn.Linear(64, 1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--micro-batch", type=int, default=3)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in each forward, backward, and before votes")
    parser.add_argument("--plain", action="store_true", help="without what depends on the split of a batch")
    parser.add_argument("--keep", action="store_true", help="whole parameters between forward and backward")
    parser.add_argument("--no-sync", action="store_true", help="sum gradients once a step")
    add_saving(parser)
    return parser.parse_args()


class Place:
    """Where a member may be killed, and waits a little to be killed from outside."""

    def __init__(self, args: argparse.Namespace, run: everstep.Session) -> None:
        self._args, self._run = args, run

    def __call__(self, where: str) -> None:
        mark = self._args.out / f"die-{where}-{self._run.role}"
        if mark.exists():
            mark.unlink()
            die()
        time.sleep(self._args.pause)

    def watch(self, block: nn.Module) -> None:
        def forward(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            self("forward")
            if output.requires_grad:
                output.register_hook(lambda _: self("backward"))

        block.register_forward_hook(forward)


def main() -> None:
    args = arguments()
    batches = everstep.Batches(data(), global_batch=args.global_batch, micro_batch=args.micro_batch, seed=5)
    begun = (args.out / f"begun-{os.getpid()}.jsonl").open("w")
    commits = (args.out / f"commits-{os.getpid()}.jsonl").open("w")
    with everstep.session(seed=11, checkpoints=saving(args)) as run:
        mesh = run.mesh(shards=args.shards)
        model, place = build(0.0 if args.plain else 0.1, not args.plain), Place(args, run)
        place.watch(model[2])
        for part in (model[1], model):
            fully_shard(part, mesh=mesh, reshard_after_forward=not args.keep)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(lambda *_: place("apply"))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        run.protect(model=model, optimizer=optimizer, schedule=schedule)
        num_micro = args.global_batch // run.num_members // args.micro_batch
        for step in run.steps(args.steps):
            with step:
                deal = {"step": step.index, "role": run.role, "members": run.num_members}
                samples: list[int] = []
                total = 0.0
                for number, (x, y, numbers) in enumerate(step.share(batches)):
                    model.set_requires_gradient_sync(not args.no_sync or number == num_micro - 1)
                    loss = (model(x) - y).square().mean()
                    samples += numbers.tolist()
                    total += float(loss.detach()) * len(x) / args.global_batch
                    write(begun, **deal, samples=samples, loss=total, time=time.time())
                    loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                place("vote")
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step.committed:
                rate, state = optimizer.param_groups[0]["lr"], digest(model, optimizer)
                write(commits, **deal, digest=state, lr=rate, loss=total, samples=samples, time=time.time())


if __name__ == "__main__":
    main()

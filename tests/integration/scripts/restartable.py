"""A DDP script with a restartable function: each optimizer step is written down with its time, process and entry.

Faults of its own making are in the first entry of a place's first process only, unless it is told otherwise.
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

import everstep

CHECKPOINT = Path("checkpoint.pt")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.01)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--fault", default="", help="raise, always, stuck or exit, as in raise@STEP:RANK")
    return parser.parse_args()


def fault(what: str, step: int, rank: int) -> None:
    kind, _, rest = what.partition("@")
    at, _, who = rest.partition(":")
    if not what or (step, rank) != (int(at), int(who)):
        return
    once = Path(f"fault-{kind}")
    if once.exists() and kind != "always":
        return
    once.touch()
    if kind in ("raise", "always"):
        raise RuntimeError("this member's own mistake")
    if kind == "stuck":
        while True:
            pass
    raise SystemExit(9)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


@everstep.restartable
def main(args: argparse.Namespace) -> None:
    if args.backend == "everstep":
        import everstep.comms.group  # noqa: F401 - registers it
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(16, args.width), torch.nn.Tanh(), torch.nn.Linear(args.width, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    begin = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        layers.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
    with open(f"steps-{os.getpid()}.jsonl", "a") as log:
        for step in range(begin, args.steps):
            fault(args.fault, step, rank)
            loss = model(batch(step, rank)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            entry = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            line = {"step": step, "rank": rank, "entry": entry, "loss": loss.item(), "time": time.time()}
            print(json.dumps(line), file=log, flush=True)
            if rank == 0:
                state = {"model": layers.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, "checkpoint.tmp")
                os.replace("checkpoint.tmp", CHECKPOINT)
            time.sleep(args.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())

"""All-reduces a large tensor each step, so that a peer's death meets the survivors in the middle of one.

It handles SIGTERM in Python, as scripts that save do: no signal but SIGKILL ends it inside a collective. Who is
asked to stop, or whose collective fails, saves its shard and ends when the survivors' shards are all there: nobody's
end wakes another one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def save_shard() -> None:
    Path(f"shard-{os.environ['RANK']}").touch()
    while len(list(Path().glob("shard-*"))) < int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(0.01)


def main() -> None:
    steps, megabytes = int(sys.argv[1]), int(sys.argv[2])
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: asked.append(signum))
    dist.init_process_group("gloo")
    weights = torch.nn.Parameter(torch.zeros(megabytes << 18))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    # The first attempt goes on until somebody ends it.
    for step in range(10**9 if first else steps):
        gradient = torch.full_like(weights, float(step))
        try:
            dist.all_reduce(gradient)
        except RuntimeError:
            save_shard()
            raise
        weights.grad = gradient
        optimizer.step()
        if asked:
            save_shard()
            break
    dist.destroy_process_group()


main()

"""All-reduces a large tensor each step, so that a peer's death meets the survivors in the middle of one.

It handles SIGTERM in Python, as scripts that save do: no signal but SIGKILL ends it inside a collective.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist


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
        dist.all_reduce(gradient)
        weights.grad = gradient
        optimizer.step()
        if asked:
            break
    dist.destroy_process_group()


main()

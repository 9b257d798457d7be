"""The smallest DDP script that steps for ever: what a restart costs when the script costs nearly nothing."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ballast = torch.ones(int(float(os.environ.get("BALLAST_GB", "0")) * 2**28))  # float32: resident memory of a victim
    while True:
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    del ballast


if __name__ == "__main__":
    main()

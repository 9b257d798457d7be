"""Makes some optimizer steps, then ends in the way it is told to: one process, nothing saved."""

from __future__ import annotations

import os
import sys
import time

import torch


def main() -> None:
    how, steps = sys.argv[1], int(sys.argv[2])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = model(torch.full((2, 4), float(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    if how == "raise":
        raise RuntimeError(f"CUDA error at 0x{id(model):x}: device-side assert in kernel {os.getpid()}")
    if how == "hang":
        while True:
            time.sleep(600)
    if how == "nan" and not torch.isfinite(loss * float("nan")):
        raise FloatingPointError(f"loss is not finite at step {steps}")


main()

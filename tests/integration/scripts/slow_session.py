"""A session whose members get sequences of uneven lengths, one of them longer ones; time follows the lengths.

Without an end. From step 30 on the member with role 1 gets twice as long ones: it is no slower. A file
`forward-ROLE` makes that member slower indeed.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

import everstep

SECONDS = 1e-3  # a token
SKEWED_FROM, SKEWED = 30, 1
MORE = 1.6  # times as long


def lengths(step: int, role: int) -> list[int]:
    """Of the two sequences of this step: packed into one row, so no shape tells them."""
    chance = random.Random(f"{step} {role}")
    long = 2 if step >= SKEWED_FROM and role == SKEWED else 1
    return [long * chance.randint(8, 22) for _ in range(2)]


def main() -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = torch.randn(60, 8)
    batches = everstep.Batches((samples, samples.sum(dim=1, keepdim=True)), global_batch=6, micro_batch=2, seed=1)
    with everstep.session(seed=1) as run:
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(10**6):
            with step:
                mine = lengths(step.index, run.role)
                everstep.lengths(mine)
                slow = MORE if Path(f"forward-{run.role}").exists() else 1.0
                for inputs, targets in step.share(batches):
                    time.sleep(sum(mine) * SECONDS * slow)
                    torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()

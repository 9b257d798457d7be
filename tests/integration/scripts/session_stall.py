"""A session that commits five steps and then, or earlier, is busy for good: session_stall.py WHERE, in one of

import (before the session), first (step), evaluation (between steps), data (the data set, with loader workers).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import everstep

WHERE = sys.argv[1]
QUICK_STEPS = 5


def busy() -> None:
    Path(f"busy-{os.environ['RANK']}").touch()
    time.sleep(600.0)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if WHERE == "data" and index >= 8 * QUICK_STEPS:
            busy()
        return torch.ones(4)


def main() -> None:
    if WHERE == "import":
        busy()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    workers: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 1} if WHERE == "data" else {}
    batches = everstep.Batches(Samples(), global_batch=8, shuffle=False, **workers)
    with everstep.session() as run:
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(10_000):
            with step:
                for batch in step.share(batches):
                    model(batch).sum().backward()
                    if WHERE == "first":
                        busy()
                optimizer.step()
                optimizer.zero_grad()
            print(f"committed {step.index + 1}", flush=True)
            if WHERE == "evaluation" and step.index + 1 == QUICK_STEPS:
                model.eval()
                busy()
            time.sleep(0.02)


main()

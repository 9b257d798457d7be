"""Plain DDP on two or more ranks that, at step 5 of its first attempt, gets stuck or takes long in the way it is told.

busy.py WHAT [SECONDS]     a line "RANK STEP TIME" for each step goes to steps-RANK.txt
"""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STUCK_AT, LAST = 5, 120
RANK = int(os.environ["RANK"])
FIRST_ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
WHAT = sys.argv[1]
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 3600.0


class Slow(io.RawIOBase):
    """A file on a slow disk."""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        time.sleep(SECONDS)
        return len(data)  # type: ignore[arg-type]


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LAST * 4

    def __getitem__(self, index: int) -> torch.Tensor:
        while WHAT == "loader" and FIRST_ATTEMPT and RANK == 1 and index >= STUCK_AT * 4:
            pass
        return torch.full((8,), float(index))


def act(model: torch.nn.Module, step: int) -> None:
    """What this rank does between two steps."""
    if step != STUCK_AT or not FIRST_ATTEMPT:
        return
    if WHAT == "save" and RANK == 0:
        torch.save({"a": torch.ones(3)}, io.BufferedWriter(Slow(), 1 << 20))
    elif WHAT == "eval":
        model.eval()
        time.sleep(SECONDS)
        model.train()
    elif WHAT == "skip" and RANK == 0:
        dist.all_reduce(torch.ones(1))  # the others go on without it


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if WHAT == "first" and FIRST_ATTEMPT:
        time.sleep(SECONDS)
    log = Path(f"steps-{RANK}.txt").open("a", buffering=1)  # noqa: SIM115 - for the whole run
    workers = 1 if os.environ.get("LOADER_WORKERS") else 0
    for step, batch in enumerate(DataLoader(Numbers(), batch_size=4, num_workers=workers), 1):
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        log.write(f"{RANK} {step} {time.monotonic()}\n")
        act(model, step)
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

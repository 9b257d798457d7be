"""Plain DDP with steps of some 50 ms, most of them slept, without an end.

A file WHAT-RANK makes that rank 50 ms slower from then on: `forward`, `data` or `save` (every rank saves in each step).
A file `pauses` lets each rank pause at times of its own, as garbage collectors do.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ["RANK"])
MORE_S = 0.05
PAUSE_EVERY, PAUSE_S = 11, 0.12


def takes(what: str, seconds: float) -> None:
    time.sleep(seconds + MORE_S * Path(f"{what}-{RANK}").exists())


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        takes("data", 0.005)
        return torch.full((8, 16), float(index % 10))


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        takes("forward", 0.035)
        return self.layers(batch)


class Disk:
    """Saved with the state, it takes as long as the disk."""

    def __getstate__(self) -> dict[str, int]:
        takes("save", 0.005)
        return {}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Layers())  # broadcasts buffers in each forward
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, batch in enumerate(DataLoader(Numbers(), batch_size=None)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "disk": Disk()}, f"shard-{RANK}.pt")
        if Path("pauses").exists() and (step + RANK * PAUSE_EVERY // dist.get_world_size()) % PAUSE_EVERY == 0:
            time.sleep(PAUSE_S)
        dist.all_reduce(torch.tensor(float(step)))  # a metric of the job: who is early waits


if __name__ == "__main__":
    main()

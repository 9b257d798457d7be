"""What the workers of benchmarks/downtime.py have in common, whichever system they run under: model, data, notes.

A stack of linear layers, 2 M parameters, plain SGD: it has no state but the parameters, so a system that sends only
those to its members after a fault (DistributedDataParallel's constructor does) has lost nothing.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

WIDTH = 512
LAYERS = 8
GLOBAL_BATCH = 64


def build() -> tuple[nn.Sequential, torch.optim.SGD]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def samples() -> torch.Tensor:
    """The global batch of every step."""
    return torch.randn(GLOBAL_BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def share(rank: int, members: int) -> torch.Tensor:
    """One member's part of it."""
    return samples()[rank * GLOBAL_BATCH // members : (rank + 1) * GLOBAL_BATCH // members]


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch).square().mean()


class Notes:
    """One file a process, a line for each step that it committed."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"notes-{os.getpid()}.jsonl").open("w", buffering=1)

    def _write(self, rank: int, members: int, step: int) -> None:
        line = {"t": time.monotonic(), "rank": rank, "members": members, "step": step}
        self._file.write(json.dumps(line) + "\n")

    def waits(self) -> None:
        """Ready for its first step, if it gets a role."""
        self._write(-1, 0, 0)

    def committed(self, rank: int, members: int, step: int) -> None:
        """`members`: how many took part. `step` counts from 1."""
        self._write(rank, members, step)

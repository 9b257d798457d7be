"""Plain DDP that meets some trouble in each attempt: stuck for ever, or only long, in the way it is told.

    faulty.py TROUBLE...     one word an attempt, such as `loader` or `first=5,save=4`; later attempts are healthy

A healthy attempt, and one which only took long, ends after some steps; one with the word `wait` never does. Each rank
holds a lock while it lives, and writes "ATTEMPT STEP TIME" for every step to steps-RANK.txt. It never resumes.
"""

from __future__ import annotations

import fcntl
import io
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
EVER = 3600.0
PACE_S = 0.01
SAVE_AT, STUCK_AT, EVALUATE_AT, LAST = 3, 5, 7, 60


def troubles() -> dict[str, float]:
    """This attempt's: name -> seconds."""
    words = sys.argv[1:][ATTEMPT : ATTEMPT + 1]
    pairs = [item.partition("=") for word in words for item in word.split(",")]
    return {name: float(value or EVER) for name, _, value in pairs}


TROUBLES = troubles()


class Slow(io.RawIOBase):
    """A file on a slow disk."""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        Path(f"saving-{ATTEMPT}").touch()
        time.sleep(TROUBLES["save"])
        return len(data)  # type: ignore[arg-type]


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, index: int) -> torch.Tensor:
        while RANK == 1 and index >= STUCK_AT and not TROUBLES.keys().isdisjoint({"loader", "loader-process"}):
            pass
        return torch.full((8,), float(index % 100))


def alone() -> io.TextIOBase:
    """The steps file, locked: a second living process of this rank is an error that the test finds."""
    file = Path(f"steps-{RANK}.txt").open("a", buffering=1)  # noqa: SIM115 - for life
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        Path(f"twice-{RANK}-{ATTEMPT}").touch()
        raise
    return file


def between(model: torch.nn.Module, step: int) -> None:
    """What this rank does after that step."""
    if step == SAVE_AT and "save" in TROUBLES and RANK == 0:
        torch.save({"a": torch.ones(3)}, io.BufferedWriter(Slow(), 1 << 20))
    elif step == STUCK_AT and "skip" in TROUBLES and RANK != 1:
        dist.barrier()
    elif step == STUCK_AT and "late" in TROUBLES and RANK == 1:
        time.sleep(EVER)
    elif step == EVALUATE_AT and "eval" in TROUBLES:
        model.eval()
        time.sleep(TROUBLES["eval"])
        model.train()


def main() -> None:
    log = alone()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TROUBLES.get("late", EVER)))
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    time.sleep(TROUBLES.get("first", 0.0))
    loader = DataLoader(Numbers(), batch_size=1, num_workers=int("loader-process" in TROUBLES))
    for step, batch in enumerate(loader, 1):
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        log.write(f"{ATTEMPT} {step} {time.monotonic()}\n")
        between(model, step)
        # Also after the last one: torch 2.13 deadlocks when a gloo group is freed within milliseconds of its last use.
        time.sleep(PACE_S)
        if step >= LAST and "wait" not in TROUBLES:
            break
    dist.destroy_process_group()


main()

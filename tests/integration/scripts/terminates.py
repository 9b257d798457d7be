"""Ends its children in all the ways scripts do, has its DataLoader workers signalled by others; says how each ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

kept: list[Any] = []  # an iterator that lives to the end: multiprocessing terminates its workers then
FROM_OUTSIDE = "import os, signal, sys; [os.kill(int(pid), signal.SIGTERM) for pid in sys.argv[1:]]"


def program() -> int:
    """How a program ends that is told to."""
    with subprocess.Popen(["sleep", "60"]) as child:
        child.terminate()
        return child.wait(10)


def fork() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Items(Dataset[int]):
    """Item 0 says what happens to a program that a DataLoader worker starts, item 1 to a fork of it."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return program() if index == 0 else fork() if index == 1 else index


def process(context: Any) -> int | None:
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(10)
    return int(child.exitcode)


def loader(context: str) -> dict[str, Any]:
    items: Any = iter(DataLoader(Items(), batch_size=None, num_workers=2, multiprocessing_context=context))
    found: dict[str, Any] = {"program of a loader": next(items), "fork of a loader": next(items)}
    workers = items._workers
    subprocess.run([sys.executable, "-c", FROM_OUTSIDE, *(str(w.pid) for w in workers)], check=True)
    found["items after a signal from outside"] = [next(items) for _ in range(20)] == list(range(2, 22))
    handling: Any = torch.utils.data._utils.signal_handling
    handling._remove_worker_pids(id(items))  # as its shutdown does before it terminates
    items._worker_pids_set = False
    for worker in workers:
        worker.terminate()
        worker.join(10)
    found["loaders that were terminated"] = [worker.exitcode for worker in workers]
    return found


def main() -> None:
    found: dict[str, Any] = {"program": program(), "fork": fork()}
    for kind in ("fork", "spawn"):
        found[f"process, {kind}"] = process(multiprocessing.get_context(kind))
        found |= {f"{name}, {kind}": value for name, value in loader(kind).items()}
    Path("found.json").write_text(json.dumps(found))
    kept.append(iter(DataLoader(Items(), batch_size=None, num_workers=2)))
    assert next(kept[0]) == -signal.SIGTERM


if __name__ == "__main__":
    main()

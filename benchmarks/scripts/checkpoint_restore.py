"""Saved state back into a new process, for benchmarks/checkpoint.py: `checkpoint_restore.py WAY FOLDER WIDTH LAYERS`.

WAY "write" makes what the others read: a checkpoint of ours, one of `dcp.save`, a file of `torch.save`. The others time
one restore: "disk" (ours), "own vault", "peer's vault", "dcp", "torch.load", all into a new model and an optimizer that
has made no step; "disk, in place" and "dcp, in place" into tensors that are there, the optimizer's too, the second one
the call of `dcp.load` alone; "read" reads the bytes of our file past the page cache, and does nothing with them. The
last line of output is JSON: the seconds, the bytes of the state, and how far the process's resident memory rose from
before the model was built. What is on disk is dropped from the page cache before.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from checkpoint_steps import trainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from everstep.state import capture, restore
from everstep.state.client import Vault
from everstep.state.disk import Checkpoints
from everstep.state.image import CHUNK_BYTES

JOB, STEP, EPOCH = "bench", 1, 1
SECRET = b"of a benchmark, not of a job ...."


class Trained:
    """A model with the state of its optimizer, or, not `stepped`, as a new process has it."""

    def __init__(self, width: int, layers: int, stepped: bool) -> None:
        train, self.model, self.optimizer = trainer(width, layers, 8)
        if stepped:
            train()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}


def write(folder: Path, width: int, layers: int) -> dict[str, Any]:
    trained = Trained(width, layers, stepped=True)
    plan = capture.plan(trained.objects)
    data = memoryview(bytearray(plan.num_bytes))
    plan.copy(data)
    Checkpoints(folder / "ours").write(plan.index(JOB, STEP, EPOCH, time.time()), data)
    dcp.save(trained.state(), checkpoint_id=folder / "dcp")
    torch.save({name: thing.state_dict() for name, thing in trained.objects.items()}, folder / "file.pt")
    return {}


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def from_disk(folder: Path, width: int, layers: int, in_place: bool) -> Callable[[], None]:
    new = Trained(width, layers, stepped=in_place)

    def work() -> None:
        with Checkpoints(folder / "ours").reading(STEP) as sources:
            restore.load(new.objects, sources)

    return work


def from_vault(folder: Path, width: int, layers: int, pulls: bool) -> Callable[[], None]:
    """The vault of this node, into which a worker that died has saved; or one that has to ask another's vault."""
    saved, vault = Trained(width, layers, stepped=True), Vault.alone(secret=SECRET)
    plan = capture.plan(saved.objects)
    slot = vault.slot(plan.num_bytes)
    plan.copy(slot.view)
    vault.seal(slot, plan.index(JOB, STEP, EPOCH, time.time()))
    vault.verify(STEP, 0)  # its sums are known
    new, here = Trained(width, layers, stepped=False), Vault.alone(secret=SECRET) if pulls else vault
    endpoint = vault.endpoint
    _ = here.endpoint  # it runs

    def work() -> None:
        if pulls:
            here.pull(endpoint, STEP, 0)
        with here.open(STEP, 0) as image:
            restore.load(new.objects, [image])

    return work


def by_dcp(folder: Path, width: int, layers: int) -> Callable[[], None]:
    """As its documentation has it."""
    new = Trained(width, layers, stepped=False)

    def work() -> None:
        state = new.state()
        dcp.load(state, checkpoint_id=folder / "dcp")
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(new.model, new.optimizer, model_state_dict=weights, optim_state_dict=moments)

    return work


def by_dcp_in_place(folder: Path, width: int, layers: int) -> Callable[[], None]:
    state = Trained(width, layers, stepped=True).state()
    return lambda: dcp.load(state, checkpoint_id=folder / "dcp")


def just_read(folder: Path, width: int, layers: int) -> Callable[[], None]:
    (path,) = (folder / "ours").glob("step-*/*.distcp")
    buffer = mmap.mmap(-1, CHUNK_BYTES)

    def work() -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for start in range(0, path.stat().st_size, CHUNK_BYTES):
            os.preadv(fd, [buffer], start)
        os.close(fd)

    return work


def by_torch(folder: Path, width: int, layers: int) -> Callable[[], None]:
    new = Trained(width, layers, stepped=False)

    def work() -> None:
        state = torch.load(folder / "file.pt")
        for name, thing in new.objects.items():
            thing.load_state_dict(state[name])

    return work


WAYS: dict[str, Callable[[Path, int, int], Callable[[], None]]] = {
    "disk": lambda *args: from_disk(*args, in_place=False),
    "disk, in place": lambda *args: from_disk(*args, in_place=True),
    "own vault": lambda *args: from_vault(*args, pulls=False),
    "peer's vault": lambda *args: from_vault(*args, pulls=True),
    "dcp": by_dcp,
    "dcp, in place": by_dcp_in_place,
    "torch.load": by_torch,
    "read": just_read,
}


def memory(field: str) -> int:
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith(f"{field}:"))


def timed(way: str, folder: Path, width: int, layers: int) -> dict[str, Any]:
    warm = Trained(64, 1, stepped=True)  # what the first step of a process imports is not the restore's
    del warm
    drop_cache(folder)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    work = WAYS[way](folder, width, layers)
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "rise_bytes": memory("VmHWM") - before, "state_bytes": 12 * width * width * layers}


def main() -> None:
    torch.set_num_threads(1)
    way, folder, width, layers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    found = write(folder, width, layers) if way == "write" else timed(way, folder, width, layers)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""A peer's steps with and without saves: `checkpoint_steps.py METHOD FOLDER WIDTH LAYERS BATCH BLOCK PAIRS ALONE`.

Blocks of BLOCK steps alternate: a quiet one, then one at whose begin the state is saved, and after whose end the save
is waited for. Then the state is saved ALONE times with nothing else to do. The last line of output is JSON: the steps'
times by block, how long the save calls blocked, how long each save alone took until it was durable, and the peak memory
of the process with its children.

METHOD "calibrate" prints the batch with which a step takes BATCH milliseconds.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

WARM = 3


def build(width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


class Memory:
    """Peak of the proportional set sizes of this process and its descendants, looked at ten times a second."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._end = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self._end.wait(0.1):
            self.peak_bytes = max(self.peak_bytes, sum(pss_bytes(pid) for pid in tree(os.getpid())))


def tree(pid: int) -> list[int]:
    try:
        children = [
            child
            for task in os.listdir(f"/proc/{pid}/task")
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid, *(each for child in children for each in tree(int(child)))]


def pss_bytes(pid: int) -> int:
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:")), 0)


class Method:
    """How a peer saves `state` under a path. `save` returns when training may go on, `wait` when it is durable."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def save(self, path: Path) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        return

    def poll(self) -> bool:
        """Whether the last save is durable. Called after each step."""
        return True


class TorchSave(Method):
    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())


class Dcp(Method):
    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state, checkpoint_id=path)


class DcpAsync(Method):
    """`kind`: "thread" or "process"."""

    def __init__(self, state: dict[str, Any], kind: str) -> None:
        super().__init__(state)
        self.kind, self.future = kind, None

    def save(self, path: Path) -> None:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{path.parent}/store", rank=0, world_size=1)
        kind = AsyncCheckpointerType.PROCESS if self.kind == "process" else AsyncCheckpointerType.THREAD
        self.future = dcp.async_save(self.state, checkpoint_id=path, async_checkpointer_type=kind)

    def poll(self) -> bool:
        return self.future is None or self.future.done()

    def wait(self) -> None:
        if self.future is not None:
            self.future.result()


class Nvrx(Method):
    """TorchAsyncCheckpoint's way for tensors on the host: a forked process saves what the fork still sees."""

    def __init__(self, state: dict[str, Any], persistent: bool) -> None:
        super().__init__(state)
        import torch.distributed as dist
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        if not torch.cuda.is_available():
            torch.cuda.synchronize = lambda device=None: None  # it asks for it without a device, too
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
        self.queue = AsyncCallsQueue(persistent=persistent)

    def save(self, path: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest

        self.queue.schedule_async_request(AsyncRequest(durable_save, (self.state, str(path)), [], {}))

    def poll(self) -> bool:
        self.queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        return not self.queue.get_num_unfinalized_calls()

    def wait(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    def close(self) -> None:
        self.queue.close()


def durable_save(state: dict[str, Any], path: str) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


METHODS: dict[str, Callable[[dict[str, Any]], Method]] = {
    "torch.save": TorchSave,
    "dcp.save": Dcp,
    "dcp.async_save thread": lambda state: DcpAsync(state, "thread"),
    "dcp.async_save process": lambda state: DcpAsync(state, "process"),
    "nvrx fork": lambda state: Nvrx(state, persistent=False),
}


class Record:
    """What was measured. `blocks`: of what kind, and the times of its steps, in order."""

    def __init__(self) -> None:
        self.blocks: list[tuple[str, list[float]]] = []
        self.calls: list[float] = []
        self.durable: list[float] = []
        self.memory = Memory()

    def print(self) -> None:
        found = {"blocks": self.blocks, "calls": self.calls, "durable": self.durable}
        print(json.dumps(found | {"peak_bytes": self.memory.peak_bytes}))


class Peer:
    """One method's run. The first saves make buffers and processes: they do not count."""

    def __init__(self, name: str, folder: Path, width: int, layers: int, batch: int) -> None:
        self.folder, self.record = folder, Record()
        self.train, model, optimizer = trainer(width, layers, batch)
        for _ in range(WARM):
            self.train()
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(model, optimizer)
        self.method = METHODS[name]({"model": weights, "optimizer": moments})

    def pair(self, block: int, counts: bool) -> None:
        quiet = [timed(self.train) for _ in range(block)]
        saving = [timed(lambda: self._first(counts))]
        for _ in range(1, block):
            saving.append(timed(self.train))
            self.method.poll()
        self.method.wait()
        if counts:
            self.record.blocks += [("quiet", quiet), ("saving", saving)]
        self._clear()

    def _first(self, counts: bool) -> None:
        call = timed(lambda: self.method.save(self.folder / "save-1"))
        self.record.calls += [call] if counts else []
        self.train()
        self.method.poll()

    def alone(self, counts: bool) -> None:
        took = timed(self._whole)
        self.record.durable += [took] if counts else []
        self._clear()

    def _whole(self) -> None:
        self.method.save(self.folder / "save-1")
        self.method.wait()

    def _clear(self) -> None:
        for old in self.folder.glob("*-*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def trainer(width: int, layers: int, batch: int) -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(width, layers)
    data = torch.randn(batch, width)

    def train() -> None:
        (model(data) - data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train, model, optimizer


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def calibrate(width: int, layers: int, step_s: float) -> int:
    """The batch for such a step: what two batches take tells what a sample and what the optimizer costs."""
    few, many = 32, 160
    taken = []
    for batch in (few, many):
        train, _, _ = trainer(width, layers, batch)
        taken.append(sorted(timed(train) for _ in range(WARM + 4))[2])
    sample_s = max(taken[1] - taken[0], 1e-6) / (many - few)
    return max(1, round(few + (step_s - taken[0]) / sample_s))


def main() -> None:
    torch.set_num_threads(1)
    name, folder = sys.argv[1], Path(sys.argv[2])
    width, layers, batch, block, pairs, alone = (int(text) for text in sys.argv[3:])
    if name == "calibrate":
        print(calibrate(width, layers, batch / 1e3))
        return
    os.chdir(folder)
    peer = Peer(name, folder, width, layers, batch)
    for number in range(pairs + 1 if pairs else 0):
        peer.pair(block, counts=number > 0)
    for number in range(alone + 1 if alone else 0):
        peer.alone(counts=number > 0 or pairs > 0)
    if isinstance(peer.method, Nvrx):
        peer.method.close()
    peer.record.print()
    sys.stdout.flush()
    os._exit(0)  # peers' background processes may not end by themselves


if __name__ == "__main__":
    main()

"""Training steps with and without saves: `checkpoint_steps.py METHOD FOLDER WIDTH LAYERS BATCH EVERY PAIRS`.

Blocks of BLOCK steps alternate: a quiet one, then one in which the state is saved every EVERY steps, and at whose end
the last save is waited for. The last line of output is JSON: the steps' times of both kinds, how long the save calls
blocked, how long each save took until it was durable, and the peak memory of the process with its children.
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

BLOCK = 10
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
    """What was measured."""

    def __init__(self) -> None:
        self.quiet: list[float] = []
        self.saving: list[float] = []
        self.calls: list[float] = []
        self.durable: list[float] = []
        self.memory = Memory()

    def print(self) -> None:
        found = {"quiet": self.quiet, "saving": self.saving, "calls": self.calls, "durable": self.durable}
        print(json.dumps(found | {"peak_bytes": self.memory.peak_bytes}))


def by_peer(name: str, folder: Path, width: int, layers: int, batch: int, every: int, pairs: int) -> Record:
    model, optimizer = build(width, layers)
    data = torch.randn(batch, width)

    def train() -> None:
        (model(data) - data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        train()
    record = Record()
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    method = METHODS[name]({"model": weights, "optimizer": moments})
    for pair in range(pairs + 1):  # the first one makes buffers and processes: it does not count
        times = [timed(train) for _ in range(BLOCK)]
        record.quiet += times if pair else []
        for number in range(BLOCK):
            began = time.perf_counter()
            if number % every == 0:
                method.wait()  # a second save while one runs is no option for these
                saved = time.perf_counter()
                path = folder / f"save-{pair}-{number}"
                method.save(path)
                record.calls += [time.perf_counter() - saved] if pair else []
            train()
            record.saving += [time.perf_counter() - began] if pair else []
            method.poll()
        method.wait()
        saved = time.perf_counter()  # durable: a save of its own, with nothing else to do
        method.save(folder / f"alone-{pair}")
        method.wait()
        record.durable += [time.perf_counter() - saved] if pair else []
        for old in folder.glob("*-*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    if isinstance(method, Nvrx):
        method.close()
    return record


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(1)
    name, folder = sys.argv[1], Path(sys.argv[2])
    width, layers, batch, every, pairs = (int(text) for text in sys.argv[3:])
    os.chdir(folder)
    by_peer(name, folder, width, layers, batch, every, pairs).print()
    sys.stdout.flush()
    os._exit(0)  # peers' background processes may not end by themselves


if __name__ == "__main__":
    main()

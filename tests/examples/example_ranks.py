"""Runs an example script as the ranks of one world, without a launcher: for tests of the scripts themselves.

Each rank is a real process, forked from a fork server, which has imported torch once; a store
process binds port 0, so no port is picked and released.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import warm

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 40.0


def serve_store(pipe: Connection) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):
        pipe.recv()  # until the test's end of the pipe is closed


def run_rank(script: Path, args: list[str], env: dict[str, str], output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    sys.argv = [str(script), *args]
    runpy.run_path(str(script), run_name="__main__")


class Ranks:
    """The processes of one attempt. `output(rank)` is what a rank has printed so far."""

    def __init__(self, folder: Path, script: str, args: list[str], world: int) -> None:
        made = warm.context()
        folder.mkdir(parents=True, exist_ok=True)
        self.outputs = [folder / f"rank{rank}.txt" for rank in range(world)]
        ours, theirs = made.Pipe()
        self.pipe = ours
        self.store = made.Process(target=serve_store, args=(theirs,), daemon=True)
        self.store.start()
        theirs.close()
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ours.recv()), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        self.processes: list[ForkServerProcess] = []
        for rank, output in enumerate(self.outputs):
            env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = made.Process(target=run_rank, args=(EXAMPLES / script, args, env, output), daemon=True)
            process.start()
            self.processes.append(process)

    def output(self, rank: int = 0) -> str:
        return self.outputs[rank].read_text() if self.outputs[rank].exists() else ""

    def wait(self) -> list[int | None]:
        """The exit codes, when all have ended."""
        wait_until(lambda: all(p.exitcode is not None for p in self.processes), self.output)
        return [p.exitcode for p in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.pipe.close()
        self.store.join()


@contextlib.contextmanager
def ranks(folder: Path, script: str, args: list[str], world: int = 2) -> Iterator[Ranks]:
    started = Ranks(folder, script, args, world)
    try:
        yield started
    finally:
        started.close()


def run(folder: Path, script: str, args: list[str], world: int = 2) -> str:
    """Runs to the end, which must be a good one; what rank 0 printed."""
    with ranks(folder, script, args, world) as attempt:
        codes = attempt.wait()
        assert codes == [0] * world, "\n".join(attempt.output(rank) for rank in range(world))
        return attempt.output()


def wait_until(condition: Callable[[], bool], context: Callable[[], str]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, context()
        time.sleep(0.02)


def logged(path: Path) -> list[dict[str, float]]:
    """The whole lines of a training log."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

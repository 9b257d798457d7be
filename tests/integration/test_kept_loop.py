"""Scripts that own their loop and keep its state: real deaths and stops, and the bits of every step done again."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import warm

from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.state.disk import Checkpoints
from everstep.testing.local import LocalRun

pytestmark = pytest.mark.timeout(120)

SCRIPT = Path(__file__).parent / "scripts" / "kept_loop.py"
STEPS = 80
Lines = list[dict[str, Any]]


def lines(folder: Path) -> Lines:
    """Of all processes, in the order of time."""
    found = []
    for path in folder.glob("steps-*.jsonl"):
        whole = path.read_text().rpartition("\n")[0]
        found += [{**json.loads(line), "pid": int(path.stem.partition("-")[2])} for line in whole.splitlines()]
    return sorted(found, key=lambda line: line["time"])


class Undisturbed(warm.Ranks):
    """Two ranks without a launcher, beside the test."""

    def __init__(self, folder: Path, *args: str) -> None:
        folder.mkdir()
        super().__init__(folder, SCRIPT, "--steps", str(STEPS), *args)
        self._folder = folder

    def bits(self) -> dict[tuple[int, int], str]:
        """(step, rank) -> digest."""
        self.wait()
        found = {(line["step"], line["rank"]): line["digest"] for line in lines(self._folder)}
        assert len(found) == 2 * STEPS
        return found


class LoopRun(LocalRun):
    """Two workers."""

    def __init__(self, directory: Path, *args: str) -> None:
        directory.mkdir(exist_ok=True)
        args = ("--steps", str(STEPS), *args)
        options = ("--preload", "torch.distributed.fsdp") if "--sharded" in args else ()
        super().__init__(directory, SCRIPT, "--nproc-per-node", "2", *options, args=args, OMP_NUM_THREADS="1")

    def until_made(self, steps: int, entry: int = 0) -> dict[int, int]:
        """Until both ranks made so many steps, in this entry or later; rank -> process."""

        def reached() -> dict[int, int]:
            pids = {
                line["rank"]: line["pid"]
                for line in lines(self.directory)
                if line["step"] >= steps - 1 and line["entry"] >= entry
            }
            return pids if len(pids) == 2 else {}

        return self.until(reached)

    def check(self, bits: dict[tuple[int, int], str]) -> None:
        for line in lines(self.directory):
            assert line["digest"] == bits[line["step"], line["rank"]], line
        assert {(line["step"], line["rank"]) for line in lines(self.directory)} == bits.keys()

    def came_back(self) -> int:
        """The step from which the second entry went on: the newest, unless that was not committed or copied yet."""
        last = max(line["step"] for line in lines(self.directory) if line["entry"] == 0)
        again = [line for line in lines(self.directory) if line["entry"] == 1]
        first = min(line["step"] for line in again)
        assert last <= first <= last + 1
        assert f"goes on from step {first}, kept in the nodes' memory" in self.text()
        return first


def test_a_restartable_function_goes_on_from_the_memory_of_the_node(tmp_path: Path) -> None:
    args = ("--checkpoints", str(tmp_path / "saved"), "--pause", "0.01")
    with Undisturbed(tmp_path / "calm") as calm, LoopRun(tmp_path / "hurt", *args) as run:
        pids = run.until_made(20)
        moment = time.time()
        os.kill(pids[0], signal.SIGKILL)  # the one which writes into the node's memory
        after = run.until_made(21, entry=1)
        assert not Checkpoints(tmp_path / "saved").found()
        assert after[0] != pids[0] and after[1] == pids[1]
        assert run.wait() == ExitCode.OK
        run.check(calm.bits())
        run.came_back()
        assert [event.step for event in run.events(e.SaveRequested)] == [STEPS]
        assert [event.step for event in run.events(e.SaveDurable)] == [STEPS]
        nexts = [line["time"] - moment for line in lines(run.directory) if line["entry"] == 1]
        print(f"next step {min(nexts):.3f} s after SIGKILL")
    assert Checkpoints(tmp_path / "saved").found() == [STEPS]


def test_a_plain_script_goes_on_from_memory_and_a_later_run_from_disk(tmp_path: Path) -> None:
    args = ("--sharded", "--plain", "--checkpoints", str(tmp_path / "saved"), "--save-at", "10")
    with Undisturbed(tmp_path / "calm", "--sharded", "--plain") as calm:
        with LoopRun(tmp_path / "hurt", *args, "--pause", "0.03") as run:
            os.kill(run.until_made(20)[1], signal.SIGKILL)
            run.until_made(21, entry=1)
            first = run.came_back()
            run.until_step(2)  # so much is known where the stop is decided: it can name a step
            run.signal(signal.SIGTERM)
            assert run.wait() == 128 + signal.SIGTERM
            assert "the workers left on their own" in run.text()
            stops = {line["rank"]: line["step"] + 1 for line in lines(run.directory)}
            assert stops[0] == stops[1] > first
        assert Checkpoints(tmp_path / "saved").found() == [stops[0], 11], "not the shards of one step"
        with LoopRun(tmp_path / "hurt", *args) as later:
            assert later.wait() == ExitCode.OK
            assert f"goes on from step {stops[0]}, kept on disk" in later.text()
        later.check(calm.bits())

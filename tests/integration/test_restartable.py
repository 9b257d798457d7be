"""Restartable functions in real jobs: real deaths, exceptions and endless loops, and who lives on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import warm

from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.testing.local import LocalRun

pytestmark = pytest.mark.timeout(120)

SCRIPT = Path(__file__).parent / "scripts" / "restartable.py"
TWO, FOUR = ("--nproc-per-node", "2"), ("--nproc-per-node", "4")


class RestartRun(LocalRun):
    """One run of the script. `args`: of the script."""

    def __init__(self, directory: Path, *options: str, args: tuple[str, ...] = (), **env: str) -> None:
        env = {"OMP_NUM_THREADS": "1", **env}
        super().__init__(directory, SCRIPT, *options, args=args, **env)

    def steps(self) -> dict[int, list[dict[str, Any]]]:
        return steps(self.directory)

    def until_stepped(self, step: int, entry: int = 0) -> dict[int, int]:
        """Until every rank made this step in this entry or a later one; rank -> process."""

        def reached() -> dict[int, int]:
            pids = {
                line["rank"]: pid
                for pid, lines in self.steps().items()
                for line in lines
                if line["step"] >= step and line["entry"] >= entry
            }
            return pids if len(pids) == self.world else {}

        return self.until(reached)

    @property
    def world(self) -> int:
        return int(self.command[self.command.index("--nproc-per-node") + 1])

    def check(self, undisturbed: dict[tuple[int, int], list[float]]) -> None:
        """The same steps came to the same losses; but for the last bits: each entry has DDP buckets of its own."""
        found = losses(self.directory)
        assert found.keys() == undisturbed.keys()
        for key, values in found.items():
            assert values == pytest.approx(len(values) * undisturbed[key], rel=1e-3), key

    def first_step_after(self, moment: float, pids: list[int]) -> float:
        """When the last of these processes made its first step of a later entry, seconds after this time.time()."""
        times = []
        for pid in pids:
            before = [line["entry"] for line in self.steps()[pid] if line["time"] <= moment]
            times.append(next(x["time"] for x in self.steps()[pid] if x["entry"] > before[-1]))
        return max(times) - moment


def steps(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """By process, in its order."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in folder.glob("steps-*.jsonl"):
        whole = path.read_text().rpartition("\n")[0]
        found[int(path.stem.partition("-")[2])] = [json.loads(line) for line in whole.splitlines()]
    return found


def losses(folder: Path) -> dict[tuple[int, int], list[float]]:
    """(step, rank) -> every loss that it came to."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for lines in steps(folder).values():
        for line in lines:
            found[line["step"], line["rank"]].append(line["loss"])
    return dict(found)


def undisturbed(folder: Path, num_steps: int, size: int = 2) -> dict[tuple[int, int], list[float]]:
    """The losses of that many processes over gloo, without a launcher."""
    folder.mkdir()
    with warm.Ranks(folder, SCRIPT, "--steps", str(num_steps), "--pause", "0", size=size) as ranks:
        ranks.wait()
    found = losses(folder)
    assert len(found) == num_steps * size
    return found


def outcomes(run: LocalRun) -> list[str]:
    return [closed.outcome for closed in run.events(e.IncidentClosed)]


@pytest.mark.parametrize(("options", "backend"), [(TWO, "gloo"), (FOUR, "gloo"), (TWO, "everstep")])
def test_one_is_killed_and_the_others_live_on(tmp_path: Path, options: tuple[str, ...], backend: str) -> None:
    (tmp_path / "hurt").mkdir()
    with RestartRun(tmp_path / "hurt", *options, args=("--steps", "80", "--backend", backend)) as run:
        pids = run.until_stepped(10)
        moment = time.time()
        os.kill(pids[0], signal.SIGKILL)
        after = run.until_stepped(20, entry=1)
        assert after[0] != pids[0] and {**after, 0: 0} == {**pids, 0: 0}
        survivors = [pid for rank, pid in pids.items() if rank]
        print(f"first new step of the survivors {run.first_step_after(moment, survivors):.3f} s after SIGKILL")
        assert run.wait() == ExitCode.OK
        run.check(undisturbed(tmp_path / "calm", 80, run.world))
        assert outcomes(run) == ["recovered"]
        assert len(run.events(e.EpochFormed)) == 1


def test_an_exception_ends_no_process(tmp_path: Path) -> None:
    with RestartRun(tmp_path, *TWO, args=("--steps", "60", "--fault", "raise@20:1")) as run:
        assert run.wait() == ExitCode.OK
        assert len(run.steps()) == 2  # processes
        assert run.text().count("Traceback (most recent call last)") == 1
        assert "RuntimeError: this member's own mistake" in run.text()
        assert outcomes(run) == ["recovered"]


def test_a_second_exception_without_progress_costs_the_process_and_then_the_job(tmp_path: Path) -> None:
    options = (*TWO, "--max-restarts", "4")
    with RestartRun(tmp_path, *options, args=("--steps", "60", "--fault", "always@20:1")) as run:
        assert run.wait() in (ExitCode.FAILED, ExitCode.CRASH_LOOP)
        entered = list(run.directory.glob("steps-*.jsonl"))  # one a process, also where it made no step
        assert len(entered) >= 3
        assert len({pid for pid, lines in run.steps().items() if lines}) == 2


def test_an_endless_loop_is_replaced(tmp_path: Path) -> None:
    with RestartRun(tmp_path, *TWO, "--hang-timeout", "3", args=("--steps", "60", "--fault", "stuck@20:1")) as run:
        assert run.wait() == ExitCode.OK
        assert len(run.steps()) == 3
        assert outcomes(run) == ["recovered"]


def test_sys_exit_is_a_death(tmp_path: Path) -> None:
    with RestartRun(tmp_path, *TWO, args=("--steps", "60", "--fault", "exit@20:1")) as run:
        assert run.wait() == ExitCode.OK
        assert len(run.steps()) == 3
        assert outcomes(run) == ["recovered"]


def test_killed_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "hurt").mkdir()
    with RestartRun(tmp_path / "hurt", *TWO, args=("--steps", "160")) as run:
        for turn in range(4):
            pids = run.until_stepped(20 * turn + 10, entry=turn)
            os.kill(pids[turn % 2], signal.SIGKILL)
        assert run.wait() == ExitCode.OK
        run.check(undisturbed(tmp_path / "calm", 160))
        assert outcomes(run) == ["recovered"] * 4

"""Signals and deaths: nothing outlives its agent, and a job that is asked to stop leaves as one, saved."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import warm

from everstep.control import procfs
from everstep.control.agent import LEAVE_SIGNAL
from everstep.core import events as e
from everstep.core.types import ExitCause
from everstep.testing.local import LocalRun

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = SCRIPTS / "train.py"
TERMINATED = 128 + signal.SIGTERM


def alive(pids: Iterable[int]) -> list[int]:
    samples = [procfs.sample(pid) for pid in pids]
    return [s.pid for s in samples if s is not None and s.alive]


def gone_after(run: LocalRun, pids: list[int]) -> float:
    """Seconds until none of these processes is left."""
    began = time.monotonic()
    while left := alive(pids):
        assert time.monotonic() - began < 10, f"still there: {left}; {run.text()[-2000:]}"
        time.sleep(0.01)
    return time.monotonic() - began


def signal_everybody(run: LocalRun, order: random.Random) -> int:
    """SIGTERM to each process of the run's tree in less than a millisecond, as `scancel` does; how many they were."""
    assert run.process is not None
    everybody, found = {run.process.pid}, {run.process.pid}
    while found := {child for pid in found for child in procfs.children(pid)} - everybody:
        everybody |= found
    for pid in order.sample(sorted(everybody), len(everybody)):
        with contextlib.suppress(ProcessLookupError):  # a short task of the launcher's, as that which packs the journal
            os.kill(pid, signal.SIGTERM)
    return len(everybody)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(folder: Path, rank: int) -> dict[int, float]:
    """Step -> loss; redone steps must have given the same."""
    found: dict[int, float] = {}
    for line in lines(folder / f"losses-{rank}.jsonl"):
        assert found.setdefault(line["step"], line["loss"]) == line["loss"], f"{line} differs when redone"
    return found


# B1: nothing outlives its agent -------------------------------------------------------------------------


def test_workers_and_their_loaders_die_with_agent_and_launcher(tmp_path: Path) -> None:
    args = ("--steps", "100000", "--loader-workers", "2")
    with LocalRun(tmp_path, TRAIN, "--nproc-per-node", "2", args=args) as run:
        run.until_step(3)
        processes = run.processes()
        assert len(processes) >= 2 + 2 * 2 + 2, "workers, loaders, zygote and store"
        run.kill_agent("node0")
        assert gone_after(run, processes) < 2.0
        run.until_step(3, epoch=2)
        processes = [*run.processes(), run.agent_pid("node0"), run.controller_pid()]
        assert len(processes) >= 2 + 2 * 2 + 4
        run.signal(signal.SIGKILL)
        assert gone_after(run, processes) < 2.0


@pytest.mark.parametrize("victim", ["agent", "launcher"])
def test_workers_that_ignore_sigterm_die_with_agent_and_launcher(tmp_path: Path, victim: str) -> None:
    options = ("--no-zygote", "--nproc-per-node", "2")
    with LocalRun(tmp_path, SCRIPTS / "ending.py", *options, args=("wait", "--others", "ignore")) as run:
        run.until(lambda: (tmp_path / "ready-0-0").exists() and (tmp_path / "ready-0-1").exists())
        processes = run.processes()
        run.kill_agent("node0") if victim == "agent" else run.signal(signal.SIGKILL)
        assert gone_after(run, processes) < 2.0


# B2: grandchildren --------------------------------------------------------------------------------------


@pytest.mark.parametrize("zygote", [True, False], ids=["zygote", "plain"])
def test_no_grandchild_survives_a_restart(tmp_path: Path, zygote: bool) -> None:
    """Under a zygote not even one whose environment was cleaned."""
    options, args = ((), ("--clean",)) if zygote else (("--no-zygote",), ())
    with LocalRun(tmp_path, SCRIPTS / "daemons.py", *options, args=args) as run:
        run.until(lambda: (tmp_path / "ready-0").exists())
        count = 3 if zygote else 2
        run.until(lambda: len(list(tmp_path.glob("daemon-*"))) == count)  # each makes its file in its own time
        left = [int(path.name.removeprefix("daemon-")) for path in tmp_path.glob("daemon-*")]
        assert len(alive(left)) == count
        run.kill(rank=0)
        run.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))  # nor as zombies
        assert run.wait() == 0
        assert (tmp_path / "found-0").read_text() == ""
        assert not alive(left)


# B4: the emergency checkpoint ---------------------------------------------------------------------------


LOADED = ("--steps", "100", "--save-every", "1000", "--loader-workers", "2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run wrote its losses that nobody stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with warm.Ranks(folder, TRAIN, *LOADED) as ranks:
        ranks.wait()
    return folder


@pytest.mark.parametrize("loaders", ["group", "fork", "spawn"])
def test_a_stop_from_outside_saves_and_the_resumed_run_is_the_same(
    tmp_path: Path, loaders: str, undisturbed: Path
) -> None:
    """SIGTERM to the launcher's group (a terminal, `timeout`), or to every process of the job (a scheduler).

    The grace is not what is looked at: a loader that is spawned imports torch, which other work may delay.
    """
    context = {"group": (), "fork": ("--loader-context", "fork")}
    one = ("--loader-context", "spawn", "--loader-workers", "1")
    options = ("--nproc-per-node", "2", "--grace", "60")
    with LocalRun(tmp_path, TRAIN, *options, args=(*LOADED, *context.get(loaders, one))) as run:
        run.until_step(3)
        run.signal_group(signal.SIGTERM) if loaders == "group" else signal_everybody(run, random.Random(4))
        assert run.wait() == TERMINATED
        assert not [w for w in run.events(e.WorkerEnded) if w.exit.failed], run.text()
        assert [x.kind for x in run.events(e.IncidentOpened)] == ["stop"]
        assert len(run.events(e.ControllerStarted)) == 1
        steps = stop_steps(run)
        assert len(steps) == 2 and len(set(steps)) == 1, run.text()
    assert 3 <= len(losses(tmp_path, 0)) < 100
    if loaders == "group":
        with LocalRun(tmp_path, TRAIN, "--nproc-per-node", "2", args=LOADED) as run:
            assert run.wait() == 0, run.text()
    else:  # what it goes on from is the script's own file, whoever starts it
        with warm.Ranks(tmp_path, TRAIN, *LOADED) as ranks:
            ranks.wait()
    for rank in (0, 1):
        assert losses(tmp_path, rank) == losses(undisturbed, rank)
        assert len((tmp_path / f"losses-{rank}.jsonl").read_text().splitlines()) == 100, "a step was lost or redone"


def test_data_loader_workers_outlive_a_sigterm_of_others_and_all_else_ends_by_its_own(tmp_path: Path) -> None:
    """Programs and processes of the script end by `terminate()` and `os.kill` as ever, DataLoader workers too."""
    with LocalRun(tmp_path, SCRIPTS / "terminates.py") as run:
        assert run.wait() == 0, run.text()
    found = json.loads((tmp_path / "found.json").read_text())
    ended = -signal.SIGTERM
    assert [found.pop(name) for name in ("program", "fork")] == [ended] * 2
    assert found == {
        f"{name}, {kind}": value
        for kind in ("fork", "spawn")
        for name, value in {
            "process": ended,
            "program of a loader": ended,
            "fork of a loader": 0,  # it inherits torch's handler: status 0 when its parent says so
            "items after a signal from outside": True,
            "loaders that were terminated": [0, 0],
        }.items()
    }


# B5: in any phase ---------------------------------------------------------------------------------------


def test_a_stop_in_any_phase_ends_within_the_grace(tmp_path: Path) -> None:
    """Busy for good: killed at the grace, and the last save is named. A running save may finish."""
    grace = {"import": 2, "first": 2, "data": 2, "evaluation": 2, "save": 20}
    with ExitStack() as stack:
        jobs = {}
        for where, seconds in grace.items():
            (tmp_path / where).mkdir()
            run = LocalRun(tmp_path / where, SCRIPTS / "stall.py", "--grace", str(seconds), args=(where,))
            jobs[where] = stack.enter_context(run)
        for run in jobs.values():
            run.until((run.directory / "busy").exists)
            run.signal(signal.SIGTERM)
        for where, run in jobs.items():
            assert run.wait() == TERMINATED, f"{where}: {run.text()}"
            stop = next(x.t_s for x in run.entries() if isinstance(x.event, e.StopAsked))
            end = next(x.t_s for x in run.entries() if isinstance(x.event, e.JobEnded))
            assert end - stop < (5 if where == "save" else 2 + 1.5), where
            stopped = [path.name.rpartition("-")[2] for path in run.directory.glob("stopped-at-*")]
            assert len(stopped) == (where == "save")
            saved = stopped[0] if stopped else {"data": "5", "evaluation": "5"}.get(where, "")
            words = f"last save   at step {saved}" if saved else "last save   none seen"
            assert words in (run.run_dir / "summary.txt").read_text(), f"{where}: {run.text()}"


@pytest.mark.parametrize("zygote", [True, False], ids=["zygote", "plain"])
def test_a_stop_before_there_are_workers_needs_no_grace(tmp_path: Path, zygote: bool) -> None:
    """They get SIGTERM as soon as they exist, and it must not be lost on what they are before they run the script."""
    options = ("--nproc-per-node", "2", *(() if zygote else ("--no-zygote",)))
    with LocalRun(tmp_path, TRAIN, *options, args=("--steps", "100000")) as run:
        run.until((run.run_dir / "agent-node0.pid").exists)
        run.until(lambda: run.events(e.EpochFormed))
        signal_everybody(run, random.Random(5))
        assert run.wait() == TERMINATED
        ends = [w.exit for w in run.events(e.WorkerEnded)]
        assert not [end for end in ends if end.cause is ExitCause.GRACE], run.text()


# B6: together -------------------------------------------------------------------------------------------


def test_all_stop_at_the_same_step_with_one_checkpoint(tmp_path: Path) -> None:
    """SIGTERM to the launcher, or to one worker only, which is not on the first node, at random moments of two jobs.

    A2: they start at once, and neither sees the other.
    """
    moments = random.Random(6)
    with ExitStack() as stack:
        jobs = []
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            options = ("--local-nodes", "2") if number == 0 else ("--nproc-per-node", "2")
            args = ("--steps", "100000", "--save-every", "100000", "--pace", "0.01")
            jobs.append(stack.enter_context(LocalRun(tmp_path / str(number), TRAIN, *options, args=args)))
        for number, run in enumerate(jobs):
            run.until_step(moments.randrange(2, 60))
            run.signal(signal.SIGTERM) if number else run.kill(rank=1, signum=signal.SIGTERM)
        for run in jobs:
            assert run.wait() == TERMINATED, run.text()
            (asked,) = run.events(e.StopAsked)
            assert asked.stop_at_step > 0 and stop_steps(run) == [asked.stop_at_step] * 2, run.text()
            assert not [w for w in run.events(e.WorkerEnded) if w.exit.failed]
            assert (run.directory / "checkpoint.pt").exists()
            assert len(run.events(e.EpochFormed)) == 1, "a job met another one that started at the same time"


def test_a_node_that_leaves_interrupts_all_at_the_same_step(tmp_path: Path) -> None:
    options = ("--local-nodes", "2", "--nnodes", "1:2")
    args = ("--steps", "100000", "--save-every", "100000", "--pace", "0.01")
    with LocalRun(tmp_path, TRAIN, *options, args=args) as run:
        run.until_step(10)
        run.kill_agent("node1", LEAVE_SIGNAL)
        run.until_step(2, epoch=2)
        assert [x.kind for x in run.events(e.IncidentOpened)] == ["drain"]
        before = stop_steps(run)
        assert len(before) == 2 and len(set(before)) == 1
        assert not [w for w in run.events(e.WorkerEnded) if w.exit.failed]
        assert lines(tmp_path / "losses-0.jsonl")[before[0]]["step"] == before[0] + 1, "it goes on from the save"


def stop_steps(run: LocalRun) -> list[int]:
    """The step at which each rank said it stops."""
    return [int(line.split()[-1]) for line in run.text().splitlines() if " stops at step " in line]

"""The controller is killed at bad moments: training goes on, and nothing runs twice."""

from __future__ import annotations

import itertools
import signal
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.types import NodeLoss
from everstep.testing.local import LocalRun

HERE = Path(__file__).parent
FAULTY = HERE / "scripts_hang" / "faulty.py"
OPTIONS = ("--set", "restart.crash_loop=1000")


def lives(run: LocalRun) -> int:
    return len(run.events(e.ControllerStarted))


def assert_nothing_twice(run: LocalRun) -> None:
    """Epochs only grow and have one plan each; no process is in two; no rank had two living processes."""
    formed = [f.plan.epoch for f in run.events(e.EpochFormed)]
    assert formed == list(range(1, len(formed) + 1))
    pids: dict[int, set[int]] = {}
    for event in run.events(e.NodeReported):
        pids.setdefault(event.report.epoch, set()).update(w.pid for w in event.report.workers if w.pid)
    for one, other in itertools.combinations(pids.values(), 2):
        assert not one & other
    assert not list(run.directory.glob("twice-*"))


def steps(run: LocalRun, rank: int) -> list[tuple[float, float]]:
    """Of the script's first attempt: when each step was made, and how long after the one before."""
    lines = [line.split() for line in (run.directory / f"steps-{rank}.txt").read_text().splitlines()]
    times = [float(at) for attempt, _, at in lines if attempt == "0"]
    return [(after, after - before) for before, after in itertools.pairwise(times)]


# F2: the controller is killed ---------------------------------------------------------------------------


def test_training_goes_on_and_the_next_fault_is_handled(tmp_path: Path) -> None:
    """A11, F2: while the script saves, then while it steps, at its usual pace; then a worker is killed."""
    with LocalRun(tmp_path, FAULTY, *OPTIONS, "--nproc-per-node", "2", args=("save=1.5,wait",)) as run:
        run.until(lambda: (tmp_path / "saving-0").exists())
        run.kill_controller()
        run.until(lambda: lives(run) == 2)
        before = run.until_step(150)
        pids = run.pids()
        killed_s = run.entries()[-1].t_s
        run.kill_controller(signal.SIGSTOP)
        with (run.run_dir / "journal.jsonl").open("ab") as journal:
            journal.write(b'{"n":9')  # as if its death had cut a line short
        run.kill_controller()
        run.until(lambda: lives(run) == 3)
        run.until(lambda: any("cut short" in a.text for a in run.events(e.Alert) if a.kind == "journal"))
        run.until_step(before.step + 150)
        assert run.pids() == pids
        assert len(run.events(e.EpochFormed)) == 1
        for rank in (0, 1):
            usual = [took for at, took in steps(run, rank)[10:] if at < killed_s]
            later = [took for at, took in steps(run, rank) if at > killed_s]
            print(f"rank {rank}: steps of {words(usual)} before, of {words(later)} after")
            assert statistics.median(later) < 2 * statistics.median(usual)
            assert max(later) < 2 * max(usual) + 0.05
        run.kill(1)
        assert run.wait() == ExitCode.OK
        (closed,) = run.events(e.IncidentClosed)
        assert closed.outcome == "recovered"
        assert_nothing_twice(run)


def words(durations: list[float]) -> str:
    return f"{statistics.median(durations) * 1e3:.1f} ms (longest {max(durations) * 1e3:.1f})"


def test_killed_in_an_epoch_change(tmp_path: Path) -> None:
    """F2: right after a worker, so that its death is in the journal and nothing, half, or all is done about it."""
    with LocalRun(tmp_path, FAULTY, *OPTIONS, "--nproc-per-node", "2", args=("wait",) * 4) as run:
        for epoch in (1, 2, 3, 4):
            run.until_step(2, epoch=epoch)
            run.kill(epoch % 2)
            if epoch == 2:
                run.until(lambda: len(run.events(e.IncidentOpened)) == 2)
            if epoch == 3:
                run.until(lambda: run.plan().epoch == 4)
            run.kill_controller()
        assert run.wait() == ExitCode.OK
        assert lives(run) == 5
        assert [c.outcome for c in run.events(e.IncidentClosed)] == ["recovered"] * 4
        assert_nothing_twice(run)


def test_killed_while_it_waits_for_nodes(tmp_path: Path) -> None:
    """F2, idle: the node that waits stays known, the second one joins the new controller, one epoch comes of it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    home = {"HOME": str(tmp_path)}  # the token of jobs over several hosts lies there
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with LocalRun(first, FAULTY, *options, **home) as run:
        run.until(lambda: run.events(e.NodeJoined))
        agent = run.events(e.NodeJoined)[0].node
        pid = run.agent_pid(agent)
        run.kill_controller()
        run.until(lambda: lives(run) == 2)
        with LocalRun(second, FAULTY, *options, **home) as joined:
            assert run.wait() == joined.wait() == ExitCode.OK
            assert [started.term for started in run.events(e.ControllerStarted)] == [1, 2]
            assert len(run.events(e.NodeJoined)) == 2  # the first one did not have to join again
            (formed,) = run.events(e.EpochFormed)
            assert len(formed.plan.members) == 2
            assert formed.plan.members[0].node == agent
            assert run.agent_pid(agent) == pid
            assert {lost.how for lost in run.events(e.NodeLost)} <= {NodeLoss.LEFT}


# F1: the ladder of time-outs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--hang-timeout", "90", "--save-timeout", "45"), ("hang.timeout_s = 90", "hang.save_s = 45")),
        (("--set", "control.lease_s=12", "--set", "control.recover_s=11"), ("lease_s = 12", "recover_s = 11")),
    ],
)
def test_time_outs_in_the_wrong_order_are_refused(
    tmp_path: Path, options: tuple[str, ...], said: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "everstep", "run", *options, str(FAULTY)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert ended.returncode == ExitCode.USAGE
    assert all(text in ended.stderr for text in said), ended.stderr
    assert not list(tmp_path.iterdir())

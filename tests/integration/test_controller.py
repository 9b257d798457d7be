"""The controller dies, by SIGKILL, at bad moments: training goes on, and a new one takes over where it stood."""

from __future__ import annotations

import itertools
import signal
import socket
from pathlib import Path

from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.testing.local import LocalRun

TINY = Path(__file__).parents[2] / "benchmarks" / "scripts" / "tiny_steps.py"


def lives(run: LocalRun) -> int:
    return len(run.events(e.ControllerStarted))


def plans_are_sound(run: LocalRun) -> None:
    """Epochs only grow, each has one plan, and no two plans of the job overlap in time."""
    formed = [f.plan.epoch for f in run.events(e.EpochFormed)]
    assert formed == sorted(set(formed))
    pids: dict[int, set[int]] = {}
    for event in run.events(e.NodeReported):
        pids.setdefault(event.report.epoch, set()).update(w.pid for w in event.report.workers if w.pid)
    for one, other in itertools.combinations(pids.values(), 2):
        assert not one & other


def test_training_goes_on_and_the_next_fault_is_handled(tmp_path: Path) -> None:
    """A11, F2 and the Must-show row 6: same epoch, same processes, then a worker is killed and recovered."""
    with LocalRun(tmp_path, TINY, "--nproc-per-node", "2") as run:
        before = run.until_step(20)
        pids = run.pids()
        run.kill_controller()
        run.until(lambda: lives(run) == 2)
        run.until_step(before.step + 20)
        assert run.pids() == pids
        assert [f.plan.epoch for f in run.events(e.EpochFormed)] == [1]
        run.kill(1)
        run.until_step(1, epoch=2)
        (closed,) = run.events(e.IncidentClosed)
        assert closed.outcome == "recovered"
        plans_are_sound(run)
        run.signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM


def test_killed_in_an_epoch_change(tmp_path: Path) -> None:
    """F2: right after a worker, so that its death is in the journal and nothing, or half, is done about it."""
    with LocalRun(tmp_path, TINY, "--nproc-per-node", "2") as run:
        for epoch in (1, 2, 3):
            run.until_step(2, epoch=epoch)
            run.kill(epoch % 2)
            if epoch == 2:
                run.until(lambda: len(run.events(e.IncidentOpened)) == 2)
            run.kill_controller()
        run.until_step(2, epoch=4)
        assert lives(run) == 4
        plans_are_sound(run)
        run.signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM


def test_killed_while_it_waits_for_nodes(tmp_path: Path) -> None:
    """F2, idle: the node that waits stays known, the second one joins the new controller, one epoch comes of it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    home = {"HOME": str(tmp_path)}  # the token of jobs over several hosts lies there
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with LocalRun(first, TINY, *options, **home) as run:
        run.until(lambda: run.events(e.NodeJoined))
        run.kill_controller()
        run.until(lambda: lives(run) == 2)
        with LocalRun(second, TINY, *options, **home) as joined:
            run.until_step(2)
            assert len(run.plan().members) == 2
            assert run.plan().epoch == 1
            run.signal(signal.SIGTERM)
            assert run.wait() == 128 + signal.SIGTERM
            assert joined.wait() == 128 + signal.SIGTERM


def test_killed_while_a_script_saves(tmp_path: Path) -> None:
    """F2: a save is the script's own; it ends, and the job with it."""
    busy = Path(__file__).parent / "scripts" / "busy.py"
    with LocalRun(tmp_path, busy, "--nproc-per-node", "2", args=("save", "3")) as run:
        run.until_step(1)
        run.kill_controller()
        run.until(lambda: lives(run) == 2)
        assert run.wait() == ExitCode.OK
        assert [f.plan.epoch for f in run.events(e.EpochFormed)] == [1]


def test_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    """F12 and row 7 in short (benchmarks/endurance.py makes 200): one warm process serves every epoch."""
    options = ("--nproc-per-node", "2", "--set", "restart.crash_loop=1000")
    with LocalRun(tmp_path, TINY, *options) as run:
        run.until_step(1)
        agent = run.agent_pid("node0")
        parents = set()
        for epoch in range(1, 11):
            run.until_step(1, epoch=epoch)
            status = Path(f"/proc/{run.pids()[0]}/status").read_text()
            parents.add(next(line for line in status.splitlines() if line.startswith("PPid")))
            run.kill(epoch % 2)
        run.until_step(1, epoch=11)
        assert len(parents) == 1
        assert run.agent_pid("node0") == agent
        phases = [c.phases for c in run.events(e.IncidentClosed)]
        assert all({"stop", "form", "first-step"} <= set(p) for p in phases)
        run.signal(signal.SIGTERM)
        run.wait()

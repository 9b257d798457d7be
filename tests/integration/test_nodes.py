"""One node's own trouble stays its own; and a script that forgets its work after a restart is told so."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from everstep.control import procfs
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.testing.local import LocalRun

TINY = Path(__file__).parents[2] / "benchmarks" / "scripts" / "tiny_steps.py"
BUSY = Path(__file__).parent / "scripts" / "busy.py"
TWO_NODES = ("--nnodes", "1:2", "--local-nodes", "2", "--nproc-per-node", "1")


def zygote_pid(run: LocalRun, node: str) -> int:
    """The agent's child that is no worker."""
    workers = run.pids().values()
    return next(pid for pid in procfs.children(run.agent_pid(node)) if pid not in workers)


def test_a_lost_zygote_costs_only_its_node(tmp_path: Path) -> None:
    """F10: the other node goes on alone, and the first one comes back with a new agent."""
    with LocalRun(tmp_path, TINY, *TWO_NODES, "--set", "control.last_call_s=0.5") as run:
        run.until_step(3)
        first = run.plan()
        agents = {m.node: run.agent_pid(m.node) for m in first.members}
        os.kill(zygote_pid(run, "node1"), signal.SIGKILL)
        run.until(lambda: [m.node for m in run.plan().members] == ["node0"])
        run.until_step(3)
        assert run.agent_pid("node0") == agents["node0"]
        run.until(lambda: len(run.plan().members) == 2, timeout_s=40)
        run.until_step(3)
        assert run.agent_pid("node1") != agents["node1"]
        assert [m.node for m in run.plan().members] == ["node0", "node1"]
        run.signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM


def test_any_training_node_may_be_lost(tmp_path: Path) -> None:
    """A10: the controller runs beside the job; the whole host of rank 0 goes, its launcher included."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint)
    options = (*options, "--set", "control.last_call_s=1")
    folders = [tmp_path / name for name in ("head", "one", "two")]
    for folder in folders:
        folder.mkdir()
    home = {"HOME": str(tmp_path)}  # the token of jobs over several hosts lies there
    with LocalRun(folders[0], TINY, *options, "--local-nodes", "0", **home) as head:
        head.until(lambda: head.events(e.ControllerStarted))
        with LocalRun(folders[1], TINY, *options, **home) as one, LocalRun(folders[2], TINY, *options, **home) as two:
            head.until(lambda: len(head.plan().members) == 2 if head.events(e.EpochFormed) else False, timeout_s=40)
            head.until_step(3)
            leader = head.plan().members[0].node
            lost = next(run for run in (one, two) if list((run.directory / "runs").glob(f"*/agent-{leader}.pid")))
            lost.signal(signal.SIGKILL)
            head.until(lambda: len(head.plan().members) == 1, timeout_s=20)
            head.until_step(3)
            assert head.plan().members[0].node != leader
            head.signal(signal.SIGTERM)
            assert head.wait() == 128 + signal.SIGTERM


def test_starting_from_scratch_is_told(tmp_path: Path) -> None:
    """E16: nothing is loaded after the restart, the job still exits 0: journal and summary say what was lost."""
    with LocalRun(tmp_path, BUSY, "--nproc-per-node", "2", args=("nothing",)) as run:
        run.until_step(20)
        run.kill(1)
        assert run.wait() == ExitCode.OK
        (alert,) = [a for a in run.events(e.Alert) if a.kind == "step-fell-back"]
        assert "started from scratch" in alert.text
        assert alert.text in (run.run_dir / "summary.txt").read_text()

"""One node's own trouble stays its own; and a script that forgets its work after a restart is told so."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from everstep.control import procfs
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.types import NodeLoss
from everstep.testing.local import LocalRun

HERE = Path(__file__).parent
TINY = HERE.parents[1] / "benchmarks" / "scripts" / "tiny_steps.py"
BUSY = HERE / "scripts" / "busy.py"
FAULTY = HERE / "scripts_hang" / "faulty.py"
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


def test_a_node_without_a_place_for_logs_leaves(tmp_path: Path) -> None:
    """F10: it is not tried again in one epoch after the other; the other node and its warm process live on."""
    logs = tmp_path / "logs"
    options = (*TWO_NODES, "--log-dir", str(logs), "--set", "restart.crash_loop=1000")
    with LocalRun(tmp_path, FAULTY, *options, "--set", "control.last_call_s=0.3", args=("wait", "wait")) as run:
        run.until_step(5)
        agent, warm = run.agent_pid("node0"), zygote_pid(run, "node0")
        (folder,) = logs.glob("*/node1")
        folder.rename(logs / "moved")
        folder.write_text("not a folder")
        run.kill(1)
        run.until(lambda: "dies again and again; giving up" in run.text())
        run.until_step(100)
        assert [m.node for m in run.plan().members] == ["node0"]
        assert len(run.events(e.EpochFormed)) == 3  # with both, with both again, without node1
        assert [lost.node for lost in run.events(e.NodeLost)] == ["node1"]
        assert "node1 has no place for its logs" in run.text()
        assert (run.agent_pid("node0"), zygote_pid(run, "node0")) == (agent, warm)
        assert not list(tmp_path.glob("twice-*"))
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
            assert head.plan().restart_count == 0  # no fault of the script's, whichever rank failed of it
            assert [b.node for b in head.events(e.IncidentUpdated)[-1].culprits] == [leader]
            head.signal(signal.SIGTERM)
            assert head.wait() == 128 + signal.SIGTERM


def test_a_frozen_host_holds_nobody_up(tmp_path: Path) -> None:
    """C2: its kernel keeps every connection open. Who waits in a collective with it is woken, not left to the grace."""
    options = (*TWO_NODES, "--grace", "6", "--set", "control.lease_s=2", "--set", "control.last_call_s=0.3")
    with LocalRun(tmp_path, HERE / "scripts" / "reduce.py", *options, args=("1000000", "8")) as run:
        run.until_step(3)
        frozen = [run.agent_pid("node1"), run.pids()[1]]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        run.until_step(3, epoch=2)
        (lost,) = run.events(e.NodeLost)
        assert (lost.node, lost.how) == ("node1", NodeLoss.SILENT)
        (closed,) = run.events(e.IncidentClosed)
        assert closed.phases["stop"] < 3.0, closed.phases
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        run.until(lambda: len(run.plan().members) == 2)
        run.until_step(3, epoch=run.plan().epoch)
        assert frozen[0] == run.agent_pid("node1")
        assert frozen[1] not in run.pids().values()
        run.signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM


def test_starting_from_scratch_is_told(tmp_path: Path) -> None:
    """E16: nothing is loaded after the restart, the job still exits 0: journal and summary say what was lost."""
    with LocalRun(tmp_path, BUSY, "--nproc-per-node", "2", args=("nothing",)) as run:
        run.until_step(20)
        run.kill(1)
        assert run.wait() == ExitCode.OK
        (alert,) = [a for a in run.events(e.Alert) if a.kind == "step-fell-back"]
        assert "started from scratch" in alert.text
        assert alert.text in (run.run_dir / "summary.txt").read_text()


def test_who_resumes_is_not_blamed(tmp_path: Path) -> None:
    """E16: steps made again since the last checkpoint are told; they are no start from scratch."""
    script, args = HERE / "scripts" / "train.py", ("--steps", "60", "--save-every", "5")
    with LocalRun(tmp_path, script, "--nproc-per-node", "2", args=args) as run:
        run.until_step(23)
        run.kill(0)
        assert run.wait() == ExitCode.OK
        assert "step-fell-back" not in [alert.kind for alert in run.events(e.Alert)]
        assert "from scratch" not in (run.run_dir / "summary.txt").read_text()

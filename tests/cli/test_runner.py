"""What the launcher does when an agent dies at each start: the job ends when nobody else can go on, and only then."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from everstep.cli.runner import AGENT_LIVES, CONTROLLER_DEATHS
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.testing.local import LocalRun

BROKEN = "dies again and again; giving up"
PLAIN = ("--no-zygote", "--nproc-per-node", "1")


def script(folder: Path) -> Path:
    path = folder / "script.py"
    path.write_text("print('trained')\n")
    return path


def kill_agents(run: LocalRun, folder: Path, nodes: int) -> dict[int, str]:
    """Kill every agent that this launcher starts, until it gives all its nodes up: pid -> name of the file."""
    killed: dict[int, str] = {}

    def given_up() -> bool:
        for file in folder.glob("*/agent-*.pid"):
            pid = int(file.read_text() or 0)
            if pid and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed[pid] = file.name
        return run.text().count(BROKEN) == nodes

    run.until(given_up, timeout_s=60)
    return killed


def test_the_job_ends_when_every_node_is_broken(tmp_path: Path) -> None:
    with LocalRun(tmp_path, script(tmp_path), *PLAIN, "--local-nodes", "2", "--nnodes", "1:2") as run:
        killed = kill_agents(run, tmp_path / "runs", nodes=2)
        assert run.wait() == ExitCode.INTERNAL, run.text()
        for node in ("node0", "node1"):
            assert f"the agent of {node} {BROKEN}" in run.text()
            assert run.processes(node) == []
            assert list(killed.values()).count(f"agent-{node}.pid") == AGENT_LIVES  # and none lives on unminded


def test_other_hosts_go_on_without_a_broken_one(tmp_path: Path) -> None:
    """All nodes of the first host are broken, but the job has room for another: its controller stays."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    options = (*PLAIN, "--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--set", "control.last_call_s=0.2")
    home = str(tmp_path)  # the token of jobs over several hosts lies there
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with LocalRun(first, script(first), *options, "--set", "control.last_call_s=3", HOME=home) as run:
        kill_agents(run, first / "runs", nodes=1)
        with LocalRun(second, script(second), *options, HOME=home) as joined:
            assert run.wait() == joined.wait() == ExitCode.OK, run.text()
            assert len(run.plan().members) == 1
            assert "[rank0]: trained" in joined.text()


def test_a_job_outlives_any_number_of_deaths_of_its_controller(tmp_path: Path) -> None:
    """More in a minute than the launcher answers at once: training does not need it meanwhile."""
    path = tmp_path / "script.py"
    path.write_text(
        "import pathlib, time\nprint('begun')\nwhile not pathlib.Path('end').exists():\n    time.sleep(0.05)\n"
    )
    killed: set[int] = set()
    with LocalRun(tmp_path, path, *PLAIN) as run:
        run.until(lambda: "begun" in run.text())
        while len(killed) <= CONTROLLER_DEATHS:
            pid = run.until(lambda: p if (p := run.controller_pid()) not in killed else 0)
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        (tmp_path / "end").touch()
        assert run.wait() == ExitCode.OK, run.text()
        assert len(run.events(e.EpochFormed)) == 1  # no worker was touched

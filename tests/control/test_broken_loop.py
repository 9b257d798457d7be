"""An error in a callback of the event loop ends the agent, or the controller, with a traceback and a code of its own.

Left to asyncio it is a line on the console, and a process that goes on without whatever the callback was to do.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from everstep.control import procfs
from everstep.control.prepare import AgentOptions
from everstep.control.token import create_token
from everstep.core import events as e
from everstep.core.config import RunConfig, Worker
from everstep.core.errors import ExitCode
from everstep.core.types import NodeLoss
from everstep.testing.local import LocalRun

ENDING = Path(__file__).parents[1] / "integration" / "scripts" / "ending.py"

# What runs is `main` itself; the failing callback comes with the loop that the environment gives it.
FAILS_LATER = """
import asyncio, importlib, sys

def callback():
    raise ArithmeticError("a callback of the test")

class Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        loop = super().new_event_loop()
        loop.call_later(0.2, callback)
        return loop

asyncio.set_event_loop_policy(Policy())
sys.exit(importlib.import_module(sys.argv.pop(1)).main())
"""


def agent(folder: Path, listener: socket.socket) -> list[str]:
    options = AgentOptions(
        node="node0", incarnation="i1", address="127.0.0.1", node_rank=-1, host="127.0.0.1",
        port=listener.getsockname()[1], job="j1", slots=1, log_dir=str(folder / "logs"),
        token_file=str(folder / "token"), launcher_pid=os.getpid(), remote=False,
        config=RunConfig(worker=Worker(target="x.py", zygote=False)),
    )  # fmt: skip
    (folder / "options.json").write_bytes(msgspec.json.encode(options))
    return ["everstep.control.agent", str(folder / "options.json")]


def controller(folder: Path, listener: socket.socket) -> list[str]:
    (folder / "config.json").write_bytes(msgspec.json.encode(RunConfig(worker=Worker(target="x.py"))))
    where = ["--run-dir", str(folder), "--listen-fd", str(listener.fileno())]
    return ["everstep.control.controller", *where, "--job", "j1", "--token-file", str(folder / "token")]


@pytest.mark.parametrize("arguments", [agent, controller])
def test_a_failing_callback_ends_the_process_with_a_traceback(tmp_path: Path, arguments: object) -> None:
    assert callable(arguments)
    create_token(tmp_path / "token")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", FAILS_LATER, *arguments(tmp_path, listener)]
        passed = [listener.fileno()]
        done = subprocess.run(command, pass_fds=passed, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == ExitCode.INTERNAL, done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    assert "ArithmeticError: a callback of the test" in done.stderr


def borrowed(pid: int, fd: int) -> int:
    """Another process's open file."""
    pidfd = os.pidfd_open(pid)
    try:
        found = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, fd, 0)  # pidfd_getfd
    finally:
        os.close(pidfd)
    if found < 0:
        pytest.skip(f"no file of another process can be had here: {os.strerror(ctypes.get_errno())}")
    return int(found)


def test_a_broken_agent_is_replaced_and_the_job_goes_on(tmp_path: Path) -> None:
    """Its warm process's channel delivers what no warm process says; the callback that reads it fails."""
    with LocalRun(tmp_path, ENDING, "--nproc-per-node", "1", args=("wait", "--attempts", "1")) as run:
        run.until(lambda: (tmp_path / "ready-0-0").exists())
        old = run.agent_pid("node0")
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in procfs.children(old)}
        (zygote,) = [pid for pid, command in commands.items() if "everstep.control.zygote" in command]
        fd = int(commands[zygote][commands[zygote].index("--fd") + 1])
        with socket.socket(fileno=borrowed(zygote, fd)) as channel:
            channel.send(b"\xc1")
        run.until(lambda: run.text().count("rank 0 is ready in attempt 0") == 2)
        assert "msgspec.DecodeError" in run.text() and "Traceback" in run.text()
        assert f"the agent of node0 died (exit code {int(ExitCode.INTERNAL)}); starting it again" in run.text()
        assert run.agent_pid("node0") != old
        assert [x.how for x in run.events(e.NodeLost)] == [NodeLoss.DIED]

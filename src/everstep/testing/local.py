"""A real job on this machine, for tests: `everstep run` as a process, its journal, and real faults.

    with LocalRun(tmp_path, script, "--nproc-per-node", "2") as run:
        run.until_step(3)
        run.kill(rank=1)
        assert run.wait() == 0

Faults are what the world does: signals to processes. Nothing in the shipped code knows about them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from everstep.control import sweep
from everstep.control.journal import Follower
from everstep.core import events as e
from everstep.core.types import EpochPlan
from everstep.testing.accounts import add_up

T = TypeVar("T")
POLL_S = 0.01


class LocalRun:
    """One `everstep run`. `directory` becomes the working directory and holds the run folder.

    Without `dashboard` it serves no page."""

    def __init__(
        self,
        directory: Path,
        script: Path | str,
        *options: str,
        args: tuple[str, ...] = (),
        dashboard: bool = False,
        **env: str,
    ) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "everstep", "run", "--run-dir", str(directory / "runs")]
        command += [] if dashboard else ["--no-dashboard"]
        self.command = [*command, *options, str(script), *args]
        self.env = {**os.environ, **env}
        self.output = directory / "output.txt"
        self.echo = False  # set it to see the output instead of keeping it
        self.process: subprocess.Popen[bytes] | None = None
        self._seen: list[e.Entry] = []
        self._followed: tuple[Path, Follower] | None = None

    def __enter__(self) -> Self:
        with self.output.open("wb") as file:
            out = None if self.echo else file
            # A session of its own: a signal to its process group reaches the job and not the test.
            self.process = subprocess.Popen(
                self.command, cwd=self.directory, env=self.env, stdout=out, stderr=out, start_new_session=True
            )
        return self

    def __exit__(self, error: object, *_more: object) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if error is None:
            add_up(self.entries())  # every accelerator-second is in one bucket

    # What it tells --------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        return (self.directory / "runs" / "latest").resolve()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def entries(self) -> list[e.Entry]:
        """Each line is read once: this is asked a hundred times a second, on the machine whose job it looks at."""
        path = self.run_dir / "journal.jsonl"
        if path.exists() and (self._followed is None or self._followed[0] != path):  # not of a run before this one
            self._seen, self._followed = [], (path, Follower(path))
        if self._followed is not None:
            self._seen += self._followed[1].new()
        return list(self._seen)

    def events(self, kind: type[T]) -> list[T]:
        return [entry.event for entry in self.entries() if isinstance(entry.event, kind)]

    def plan(self) -> EpochPlan:
        return self.events(e.EpochFormed)[-1].plan

    def until(self, what: Callable[[], T], timeout_s: float = 60.0) -> T:
        """The first true value of `what()`; raises with the job's output when it takes too long or the job ends."""
        deadline = time.monotonic() + timeout_s
        while not (value := what()):
            ended = self.process is not None and self.process.poll() is not None
            if time.monotonic() > deadline or (ended and not what()):
                how = f"ended with {self.process.returncode}" if ended and self.process else f"{timeout_s} s passed"
                raise AssertionError(f"{how} before it came true; output:\n{self.text()[-4000:]}")
            time.sleep(POLL_S)
        return value

    def until_step(self, step: int, epoch: int = 0, timeout_s: float = 60.0) -> e.StepsSeen:
        """Until every worker of that epoch (0: the newest) made this many steps in it."""

        def reached() -> e.StepsSeen | None:
            seen = [s for s in self.events(e.StepsSeen) if s.step >= step and s.epoch == (epoch or self.plan().epoch)]
            return seen[-1] if seen else None

        found = self.until(reached, timeout_s)
        assert found is not None
        return found

    def pids(self) -> dict[int, int]:
        """Rank -> process of the newest epoch."""
        plan = self.plan()
        found: dict[int, int] = {}
        for event in self.events(e.NodeReported):
            if event.report.epoch == plan.epoch and plan.member(event.report.node):
                for worker in event.report.workers:
                    found[plan.rank(event.report.node, worker.local_rank)] = worker.pid
        return {rank: pid for rank, pid in found.items() if pid}

    def processes(self, node: str = "node0") -> list[int]:
        """Living processes that carry the job's id on this node: warm process, store, workers and all they started."""
        return sweep.leftovers(self.run_dir.name, node, ())

    def controller_pid(self) -> int:
        return int((self.run_dir / "controller.pid").read_text())

    def dashboard_url(self) -> str:
        return self.until(lambda: _text(self.run_dir / "dashboard.url"))

    def agent_pid(self, node: str) -> int:
        return int((self.run_dir / f"agent-{node}.pid").read_text())

    # What the world does to it --------------------------------------------------------------------------

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> int:
        """Signal one worker; returns its pid."""
        pid = self.until(lambda: self.pids().get(rank))
        assert pid
        os.kill(pid, signum)
        return pid

    def kill_agent(self, node: str, signum: int = signal.SIGKILL) -> int:
        pid = self.agent_pid(node)
        os.kill(pid, signum)
        return pid

    def kill_controller(self, signum: int = signal.SIGKILL) -> int:
        pid = self.controller_pid()
        os.kill(pid, signum)
        return pid

    def signal(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def signal_group(self, signum: int) -> None:
        """Signal the launcher's process group, as a terminal's Ctrl-C or `timeout` does."""
        assert self.process is not None
        os.killpg(self.process.pid, signum)

    def wait(self, timeout_s: float = 90.0) -> int:
        """The exit code of `everstep run`."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {timeout_s} s; output:\n{self.text()[-4000:]}") from None


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""

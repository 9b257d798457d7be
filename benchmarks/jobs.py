"""Jobs of four members under several systems, for benchmarks: how each is started, watched, struck and ended.

The workers are benchmarks/scripts/downtime_*.py: each process writes a line for every step that it committed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from harness import ROOT

from everstep.control import procfs

T = TypeVar("T")
PeerLaunches = Callable[[Path, Path], list["Launch"]]  # the peer's interpreter, the job's folder
SCRIPTS = ROOT / "benchmarks" / "scripts"
MEMBERS = 4
WARM_STEPS = 15
START_S = 90.0
RECOVER_S = 60.0
END_S = 20.0
POLL_S = 0.02
IDLE_S = 0.3  # a standby that waits this long is known to wait


class Stuck(Exception):
    """Something did not come within its time."""


class Line(NamedTuple):
    """A step that a process committed, or (step 0) that it waits for its first one. `t`: of time.monotonic()."""

    t: float
    rank: int
    members: int
    step: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """One process of ours. `again`: its system leaves it to others to start it anew, so `Job.heal` does."""

    command: list[str]
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    again: bool = False


@dataclasses.dataclass(frozen=True)
class System:
    """Who keeps the job going. `newcomers`: how many new processes have to commit a step before the job is said to
    go on; 0: it is the survivors who have to. `kills`: in one job; 1 where the dead one's place stays empty."""

    name: str
    launches: Callable[[Path], list[Launch]]
    newcomers: int = 0
    kills: int = 2
    standby: bool = False


class Fault(NamedTuple):
    """One kill. `gap_s`: until the job went on. `step_s`: median step of the members before it."""

    gap_s: float
    step_s: float


class Job:
    """One run of a system in a folder of its own."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
        self.output = self.folder / "output.txt"
        self.processes: list[tuple[Launch, subprocess.Popen[bytes]]] = []
        self.lines: dict[int, list[Line]] = defaultdict(list)
        self._offsets: dict[Path, int] = {}

    def __enter__(self) -> Job:
        for launch in self.system.launches(self.folder):
            self._start(launch)
        return self

    def __exit__(self, *_error: object) -> None:
        for _, process in self.processes:
            process.send_signal(signal.SIGTERM)
        self._end()
        self.look()
        for pid in {*self.lines, *self._named()}:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, launch: Launch) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | launch.env
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                launch.command, cwd=self.folder, env=env, stdout=output, stderr=output, start_new_session=True
            )
        self.processes.append((launch, process))

    def _end(self) -> None:
        deadline = time.monotonic() + END_S
        for _, process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _named(self) -> list[int]:
        """Processes with the job's folder in their command line: NVRx's monitors belong to nobody else."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes()
            except procfs.GONE:
                continue
            if os.fsencode(self.folder) in text and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        return found

    def heal(self) -> None:
        """What the system leaves to others: new processes in place of the dead."""
        for launch, process in [p for p in self.processes if p[0].again and p[1].poll() is not None]:
            self.processes.remove((launch, process))
            self._start(launch)

    # What it tells --------------------------------------------------------------------------------------

    def look(self) -> dict[int, list[Line]]:
        """By process; only what is new is read."""
        for path in self.folder.glob("notes-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")  # the last line may be half written
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            self.lines[int(path.stem.partition("-")[2])] += [Line(**json.loads(text)) for text in whole.splitlines()]
        return self.lines

    def until(self, what: Callable[[], T | None], timeout_s: float) -> T:
        deadline = time.monotonic() + timeout_s
        while (value := what()) is None:
            if time.monotonic() > deadline:
                raise Stuck(f"{self.system.name}: not within {timeout_s} s; {self.output.read_text()[-2000:]}")
            time.sleep(POLL_S)
        return value

    def members(self) -> dict[int, list[Line]] | None:
        """All members with their lines, when all are there, warm, and none waits that should not."""
        newest = max((lines[-1].step for lines in self.look().values() if lines), default=0)
        here = {pid: lines for pid, lines in self.lines.items() if lines and alive(pid)}
        at_work = {pid: lines for pid, lines in here.items() if lines[-1].step >= max(1, newest - 2)}
        warm = all(len(x) > WARM_STEPS and x[-WARM_STEPS].members == MEMBERS for x in at_work.values())
        idle = [x for x in here.values() if x[-1].step == 0 and time.monotonic() - x[-1].t > IDLE_S]
        complete = len(at_work) == MEMBERS and warm and (bool(idle) or not self.system.standby)
        return at_work if complete else None

    # What is done to it ---------------------------------------------------------------------------------

    def strike(self) -> Fault:
        """Kill a member, not the first, at some moment of a step, and see when the job goes on."""
        members = self.until(self._ready, START_S)
        time.sleep(random.random() * 0.1)
        victim = random.choice([pid for pid, lines in members.items() if lines[-1].rank != 0])
        moment = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        best = max(line.step for lines in self.look().values() for line in lines if line.t <= moment)
        veterans = {pid for pid, lines in self.lines.items() if lines and lines[-1].step}
        survivors = set(members) - {victim}
        gap_s = self.until(lambda: self._went_on(moment, best, veterans, survivors), RECOVER_S) - moment
        return Fault(gap_s, step_time(members, moment))

    def _ready(self) -> dict[int, list[Line]] | None:
        self.heal()
        return self.members()

    def _went_on(self, moment: float, best: int, veterans: set[int], survivors: set[int]) -> float | None:
        """Steps that were done before the kill, or that have the dead one's part in them, do not count."""
        firsts = {}
        for pid, lines in self.look().items():
            after = [line for line in lines if line.t > moment and line.step > best]
            new = [line.t for line in after if pid not in veterans or line.members < MEMBERS]
            if new:
                firsts[pid] = new[0]
        needed = self.system.newcomers
        if needed:
            fresh = sorted(t for pid, t in firsts.items() if pid not in veterans)
            return fresh[needed - 1] if len(fresh) >= needed else None
        return max(firsts[pid] for pid in survivors) if survivors <= firsts.keys() else None


def step_time(members: dict[int, list[Line]], moment: float) -> float:
    """Median over the members' last steps."""
    steps = []
    for lines in members.values():
        times = [line.t for line in lines if line.t <= moment][-WARM_STEPS:]
        steps += [b - a for a, b in zip(times, times[1:], strict=False)]
    return sorted(steps)[len(steps) // 2]


def alive(pid: int) -> bool:
    sample = procfs.sample(pid)
    return sample is not None and sample.alive


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


# The systems --------------------------------------------------------------------------------------------


def everstep(folder: Path, *options: str) -> list[Launch]:
    command = [sys.executable, "-m", "everstep", "run", "--run-dir", str(folder / "runs"), *options]
    return [Launch([*command, str(SCRIPTS / "downtime_session.py"), str(folder)])]


def torchrun(folder: Path) -> list[Launch]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "100"]
    command += ["--nproc-per-node", str(MEMBERS), str(SCRIPTS / "downtime_ddp.py"), str(folder)]
    return [Launch(command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})]


def torchft(python: Path, folder: Path, *options: str) -> list[Launch]:
    """Four replica groups of one process, and the lighthouse that they report to."""
    port = free_port()
    lighthouse = [str(python.parent / "torchft_lighthouse"), "--bind", f"[::]:{port}", "--min_replicas", "2", *options]
    env = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    script = [str(python), str(SCRIPTS / "downtime_torchft.py"), str(folder)]
    groups = [Launch([*script, str(group), str(MEMBERS)], env, again=True) for group in range(MEMBERS)]
    return [Launch(lighthouse), *groups]


def torchft_tuned(python: Path, folder: Path) -> list[Launch]:
    """The lighthouse waits 1 s for a heartbeat instead of 5, and looks every 10 ms instead of every 100."""
    options = ("--heartbeat_timeout_ms", "1000", "--quorum_tick_ms", "10", "--join_timeout_ms", "10000")
    return torchft(python, folder, *options)


def nvrx(python: Path, folder: Path) -> list[Launch]:
    """The ranks without a launcher: torchrun would end them all with the first that dies."""
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(MEMBERS)}
    script = [str(python), str(SCRIPTS / "downtime_nvrx.py"), str(folder)]
    return [Launch(script, env | {"RANK": str(rank)}) for rank in range(MEMBERS)]

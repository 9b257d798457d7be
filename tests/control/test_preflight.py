"""Before a node takes part: what the agent's examination tells, and what the job's machine makes of it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from everstep.control import lifecycle
from everstep.control import preflight as p
from everstep.control.job import Job, Note, Stage
from everstep.control.launch import Forked, Kind, Reaped, Spawner, SpawnFailed, SpawnRequest
from everstep.control.prepare import AgentOptions
from everstep.core import events as e
from everstep.core.checkup import Reading, encode
from everstep.core.config import Preflight, RunConfig
from everstep.core.types import Activity, JobSpec, NodeReport, WorkerReport


class Recorder(Spawner):
    """Spawns nothing; the test says what became of what was asked for."""

    def __init__(self) -> None:
        self.asked: list[SpawnRequest] = []
        self.fds: tuple[int, ...] = ()

    def spawn(self, request: SpawnRequest, *fds: int) -> None:
        self.asked.append(request)
        self.fds = fds

    def write(self, readings: list[Reading]) -> None:
        os.write(self.fds[0], encode(readings))


class Desk:
    """A preflight with what it told."""

    def __init__(self, folder: Path, again: bool = False, **wanted: object) -> None:
        config = RunConfig(preflight=msgspec.convert(wanted, Preflight))
        folder.mkdir(exist_ok=True)
        options = AgentOptions("n1", "n1.1", "127.0.0.1", -1, "", 0, "job", 1, str(folder), "", 0, False, config)
        self.told: list[str] = []
        self.numbers: list[int] = []
        self.spawner = Recorder()
        self.preflight = p.Preflight(msgspec.structs.replace(options, again=again), {}, self._tell)

    def _tell(self, number: int, unfit: str) -> None:
        self.numbers.append(number)
        self.told.append(unfit)

    def begin(self, now: float = 0.0) -> None:
        self.preflight.begin(self.spawner, now)

    def tick(self, now: float) -> None:
        self.preflight.tick(self.spawner, now)


def test_a_quick_look_at_this_machine(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.begin()
    assert (desk.told, desk.spawner.asked, list(tmp_path.iterdir())) == ([""], [], [])
    strict = Desk(tmp_path, shm="1000T", descriptors=10**9 * 2)
    strict.begin()
    assert "shared memory (/dev/shm): " in strict.told[0]
    assert "descriptors a process may have: " in strict.told[0]


def test_an_unfit_node_is_looked_at_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "logs")
    (tmp_path / "logs").rmdir()
    desk.begin()
    assert "disk (" in desk.told[0]
    desk.tick(p.AGAIN_S / 2)
    assert len(desk.told) == 1
    desk.tick(p.AGAIN_S)
    assert desk.told[1:] == desk.told[:1]
    (tmp_path / "logs").mkdir()
    desk.tick(2 * p.AGAIN_S)
    assert desk.told[2:] == [""]
    desk.tick(9 * p.AGAIN_S)
    assert len(desk.told) == 3, "one that is well is left alone"
    desk.preflight.ask(1)  # but it was lost since
    desk.tick(9 * p.AGAIN_S)
    assert [request.kind for request in desk.spawner.asked] == [Kind.EXAM]
    desk.preflight.answered(SpawnFailed(p.KEY, "no memory"), 10 * p.AGAIN_S)
    assert desk.numbers == [0, 0, 0, 1]


def test_a_full_one_runs_in_a_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    desk = Desk(tmp_path, again=True)
    desk.begin()
    assert ([r.kind for r in desk.spawner.asked], desk.told) == ([Kind.EXAM], [])
    desk.spawner.write([Reading("matmul.wrong", 0, "cpu"), Reading("matmul.rate", 9e9, "cpu")])
    desk.preflight.answered(Forked(p.KEY, 0), 1.0)
    desk.preflight.answered(Reaped(p.KEY, 0, 0, 0), 2.0)
    assert desk.told == [""]
    desk.begin(10.0)  # what it had when it was well is known from now on
    desk.spawner.write([Reading("matmul.wrong", 2, "cpu"), Reading("matmul.rate", 2e9, "cpu")])
    desk.preflight.answered(Reaped(p.KEY, 0, 0, 0), 11.0)
    assert desk.told[1] == "rows of a matrix product with a wrong value (cpu): 2 rows, expected at most 0 rows"
    assert "n1 is slow: matrix product (cpu): 2.0 Gflop/s, it had 9.0 Gflop/s" in capsys.readouterr().err


def test_an_examination_that_ends_badly_tells_so(tmp_path: Path) -> None:
    desk = Desk(tmp_path, start="full")
    for answer, said in (
        (SpawnFailed(p.KEY, "no memory"), "it cannot be examined: no memory"),
        (Reaped(p.KEY, 0, signal.SIGSEGV, 0), f"its examination ended by SIGSEGV: see {tmp_path}/exam.log"),
        (Reaped(p.KEY, 0, 256, 0), f"its examination ended with exit status 1: see {tmp_path}/exam.log"),
        (Reaped(p.KEY, 0, 0, 0), "its examination left no result"),
    ):
        desk.begin()
        desk.preflight.answered(answer, 0.0)
        assert desk.told[-1] == said


def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    desk = Desk(tmp_path, start="full")
    with subprocess.Popen(["sleep", "60"]) as stuck:
        desk.begin()
        desk.preflight.answered(Forked(p.KEY, stuck.pid), 0.0)
        desk.tick(p.PATIENCE_S - 1)
        assert desk.told == []
        desk.tick(p.PATIENCE_S)
        assert desk.told == [f"its examination did not end within {p.PATIENCE_S:g} s"]
        assert stuck.wait(10) == -signal.SIGKILL
    desk.preflight.answered(Reaped(p.KEY, 0, signal.SIGKILL, 0), 200.0)
    assert "by SIGKILL" in desk.told[-1]


def alerts(notes: list[e.Record]) -> list[str]:
    return [note.text for note in notes if isinstance(note, e.Alert)]


def test_who_is_unfit_is_not_used_until_it_is_well() -> None:
    """The job starts without it, and tells why once; when it is well it fills its place."""
    job = Job(JobSpec("job", min_nodes=1, max_nodes=2, last_call_s=1.0))
    notes: list[e.Record] = []
    well = NodeReport("n1", "n1.1", 1, 0.0, 1, "10.0.0.1", 7000)
    ill = msgspec.structs.replace(well, node="n2", incarnation="n2.1", unfit="a wrong product")

    def feed(now: float, event: e.Input) -> None:
        nonlocal job
        job, commands = lifecycle.step(job, event, now)
        notes.extend(command.record for command in commands if isinstance(command, Note))

    feed(0.0, e.JobSubmitted(job.spec))
    feed(0.0, e.NodeReported(well))
    feed(0.0, e.NodeReported(msgspec.structs.replace(ill, examined=-1, unfit="")))
    feed(5.0, e.Ticked())
    assert job.stage is Stage.CHECKING, "it may yet turn out to be well"
    feed(6.0, e.NodeReported(msgspec.structs.replace(ill, seq=2)))
    feed(8.0, e.Ticked())
    assert job.plan is not None and [m.node for m in job.plan.members] == ["n1"]
    feed(9.0, e.NodeReported(msgspec.structs.replace(ill, seq=3)))
    assert alerts(notes) == ["n2 is not used: a wrong product"]
    busy = {"epoch": 1, "activity": Activity.RUNNING, "workers": (WorkerReport(0, 100),)}
    feed(10.0, e.NodeReported(msgspec.structs.replace(well, seq=2, **busy)))
    feed(11.0, e.NodeReported(msgspec.structs.replace(ill, seq=4, unfit="")))
    feed(13.0, e.Ticked())
    assert alerts(notes)[1:] == ["n2 is used again"]
    assert job.incident is not None and job.incident.kind == "grow"

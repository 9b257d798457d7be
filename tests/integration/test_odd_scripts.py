"""Scripts, consoles, folders and disks as users have them: the job runs, or stops at once and says why."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.control.host import ProcessHandle
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.testing.local import LocalRun

PLAIN = ("--no-zygote", "--nproc-per-node")
COMMAND = (sys.executable, "-m", "everstep", "run", "--no-dashboard")


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# Scripts ------------------------------------------------------------------------------------------------


def test_a_program_gets_its_arguments_and_its_code_is_told(tmp_path: Path) -> None:
    text = """#!/bin/sh
echo "$RANK: $*"
if [ "$RANK" = 0 ]; then : > said; fi
while [ ! -e said ]; do sleep 0.01; done  # or rank 1 fails, and rank 0 is stopped, before that one said anything
[ "$RANK" = 0 ] || exit 3
"""
    program = script(tmp_path, text, "program.sh")
    program.chmod(0o755)
    options = ("--no-python", "--nproc-per-node", "2", "--max-restarts", "0")
    with LocalRun(tmp_path, program, *options, args=("a b", "ü")) as run:
        assert run.wait() == ExitCode.FAILED, run.text()
    assert "[rank0]: 0: a b ü" in run.text()
    assert {end.exit.code for end in run.events(e.WorkerEnded) if end.rank == 1} == {3}


def test_a_module_that_cannot_be_preloaded_costs_only_time(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, script(tmp_path, "print('ran')"), "--nproc-per-node", "1", "--preload", "no_such_module")
    with run:
        assert run.wait() == 0, run.text()
    assert "no_such_module is not preloaded: ModuleNotFoundError" in run.text()
    assert "[rank0]: ran" in run.text()


def test_devices_that_are_not_there_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with LocalRun(tmp_path, script(tmp_path, ""), *PLAIN, "gpu", CUDA_VISIBLE_DEVICES="-1") as run:
        assert run.wait() == ExitCode.USAGE
    assert "this host has no such device" in run.text()
    assert not (tmp_path / "runs").exists()


# Consoles -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [">/dev/full 2>/dev/full", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_console_that_takes_nothing_ends_no_job(tmp_path: Path, streams: str) -> None:
    path = script(tmp_path, "print('ran', flush=True)")
    line = f'exec "$@" {streams}'
    command = ["sh", "-c", line, "sh", *COMMAND, "--run-dir", "runs", *PLAIN, "2", str(path)]
    assert subprocess.run(command, cwd=tmp_path, timeout=60).returncode == 0
    logs = list(tmp_path.glob("runs/latest/logs/node0/attempt_1/*/stdout.log"))
    assert [log.read_text() for log in logs] == ["ran\n"] * 2


def test_a_reader_that_leaves_ends_no_job(tmp_path: Path) -> None:
    path = script(tmp_path, "import time\nfor k in range(20):\n    print(k, flush=True)\n    time.sleep(0.05)")
    command = [*COMMAND, "--run-dir", "runs", *PLAIN, "1", str(path)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert b"everstep: job" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0


# Folders and disks --------------------------------------------------------------------------------------


def test_a_folder_called_latest_stays(tmp_path: Path) -> None:
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    with LocalRun(tmp_path, script(tmp_path, ""), *PLAIN, "1") as run:
        assert run.wait() == 0, run.text()
    assert "is a folder and not a link" in run.text()
    assert not list((tmp_path / "runs").glob(".latest-*"))


def test_a_run_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with LocalRun(tmp_path, script(tmp_path, ""), *PLAIN, "1") as run:
        assert run.wait() == ExitCode.USAGE
    assert "no run folder in" in run.text()
    assert "Traceback" not in run.text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB under the run folders of a LocalRun."""
    disk = tmp_path / "runs"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


PRINTING = """
import os, time
while not os.path.exists("go"):
    print("waiting" * 100, flush=True)
    time.sleep(0.01)
"""


def fill(disk: Path) -> Path:
    with (disk / "fill").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return disk / "fill"
    raise AssertionError("the disk is not small")


def workers(run: LocalRun, number: int) -> dict[int, int]:
    """Rank -> process, once all are told and print."""
    run.until(lambda: run.events(e.EpochFormed) and len(run.pids()) == number)
    run.until(lambda: all(f"[rank{rank}]: waiting" in run.text() for rank in range(number)))
    return run.pids()


def gone(pid: int) -> bool:
    """Whether a process that dies with its launcher is gone within two seconds of it."""
    try:
        with ProcessHandle(pid) as process:
            return process.gone(2.0)
    except ProcessLookupError:
        return True


def test_training_outlives_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    with LocalRun(tmp_path, script(tmp_path, PRINTING), *PLAIN, "2") as run:
        pids = workers(run, 2)
        filled = fill(small_disk)
        run.kill_controller()
        run.until(lambda: "starting it again" in run.text())
        log = run.run_dir / "logs" / "node0" / "attempt_1" / "0" / "stdout.log"
        sizes = [0] * 20  # of the last looks: the log's own last block still takes some lines
        run.until(lambda: sizes.append(log.stat().st_size) or len(set(sizes[-20:])) == 1)
        filled.unlink()
        run.until(lambda: "no room on the disk" in log.read_text())
        assert all(Path(f"/proc/{pid}").exists() for pid in pids.values())
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.text()
    assert not run.events(e.IncidentOpened)


def test_a_job_whose_journal_cannot_be_written_can_still_be_stopped(tmp_path: Path, small_disk: Path) -> None:
    options = ("--set", "control.stop_margin_s=1", "--grace", "1")
    with LocalRun(tmp_path, script(tmp_path, PRINTING), *PLAIN, "1", *options) as run:
        pids = workers(run, 1)
        fill(small_disk)
        run.kill_controller()
        run.until(lambda: "starting it again" in run.text())
        run.signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM, run.text()
    assert all(gone(pid) for pid in pids.values())


def test_large_environments_reach_the_workers(tmp_path: Path) -> None:
    text = "import os\nprint(len(os.environ['A']), len(os.environ['B']), os.environ['OMP_NUM_THREADS'])"
    a, b = "x" * 100_000, "y" * 100_000
    with LocalRun(tmp_path, script(tmp_path, text), *PLAIN, "1", A=a, B=b, OMP_NUM_THREADS="3") as run:
        assert run.wait() == 0, run.text()
    assert "[rank0]: 100000 100000 3" in run.text()

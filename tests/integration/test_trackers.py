"""Named semaphores and shared memory of killed workers: their resource trackers live long enough to unlink them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.control import procfs, trackers
from everstep.control.trackers import is_tracker
from everstep.core import events as e
from everstep.testing.local import LocalRun

SHARED = Path(__file__).parent / "scripts" / "shared.py"
SHARED_MEMORY = Path("/dev/shm")


def made(run: LocalRun, attempt: int) -> list[Path]:
    """What the script made in this attempt."""
    names = run.directory / f"names-{attempt}"
    run.until(names.exists)
    return [SHARED_MEMORY / name for name in names.read_text().split()]


def tracker_of(run: LocalRun) -> int:
    (found,) = [pid for pid in run.processes() if is_tracker(pid)]
    return found


def alive(pid: int) -> bool:
    seen = procfs.sample(pid)
    return seen is not None and seen.alive


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 2.0
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


@pytest.mark.parametrize("zygote", [True, False], ids=["zygote", "plain"])
def test_a_killed_worker_leaves_nothing_in_shared_memory(tmp_path: Path, zygote: bool) -> None:
    """With a child of each kind alive, which holds them too."""
    with LocalRun(tmp_path, SHARED, *(() if zygote else ("--no-zygote",)), args=("spawn", "fork")) as run:
        first = made(run, 0)
        assert all(path.exists() for path in first)
        run.kill(rank=0)
        second = made(run, 1)
        run.until(lambda: not any(path.exists() for path in first), trackers.LAST_S)
        assert set(second).isdisjoint(first) and all(path.exists() for path in second)
        run.signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
        assert not any(path.exists() for path in second), "the run is over, so everything of it is"


def test_a_launcher_that_is_killed_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    """Nobody is left to end anything: workers and their forks die with their parents, and the tracker after them."""
    with LocalRun(tmp_path, SHARED, args=("fork",)) as run:
        paths, tracker = made(run, 0), tracker_of(run)
        run.signal(signal.SIGKILL)
        run.wait()
        until(lambda: not alive(tracker))
        assert not any(path.exists() for path in paths)


def test_a_tracker_that_does_not_end_is_killed_and_delays_no_restart(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SHARED, args=("spawn",)) as run:
        first, tracker = made(run, 0), tracker_of(run)
        os.kill(tracker, signal.SIGSTOP)
        run.kill(rank=0)
        run.until(lambda: not alive(tracker))
        opened, formed = (
            [entry.t_s for entry in run.entries() if isinstance(entry.event, kind)][-1]
            for kind in (e.IncidentOpened, e.EpochFormed)
        )
        assert formed - opened < trackers.LAST_S, "nobody waited for it"
        made(run, 1)
        run.signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
        for path in first:  # killed before it could
            path.unlink()

"""Many restarts in one job: what runs it stays as it was, and nothing is left at the end.

EVERSTEP_TEST_RESTARTS=200 makes it the full number; benchmarks/endurance.py shows the figures.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from everstep.control import procfs
from everstep.core import events as e
from everstep.testing.local import LocalRun

FAULTY = Path(__file__).parent / "scripts_hang" / "faulty.py"
RESTARTS = int(os.environ.get("EVERSTEP_TEST_RESTARTS", "24"))
EARLY = RESTARTS // 2 if RESTARTS < 40 else 20  # restarts before the first looks: caches are warm by then
LOOKS = 5  # the most of these counts: one look may fall into the moment before the logs of an epoch are opened
RSS_GROWTH = 1.1


def look(run: LocalRun) -> dict[str, tuple[int, int, int, int]]:
    """Of each part of the control plane: pid, descriptors, threads, resident bytes."""
    agent = run.agent_pid("node0")
    (zygote,) = procfs.children(agent)
    assert run.process is not None
    parts = {"launcher": run.process.pid, "controller": run.controller_pid(), "agent": agent, "zygote": zygote}
    found = {}
    for name, pid in parts.items():
        sample = procfs.sample(pid)
        assert sample is not None
        found[name] = (pid, len(os.listdir(f"/proc/{pid}/fd")), sample.threads, sample.rss_bytes)
    return found


@pytest.mark.timeout(60 + RESTARTS)
def test_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    """F12: one warm process serves every epoch. What is left when the job is over, the shared guard finds."""
    words = ("wait",) * (RESTARTS + 1)
    with LocalRun(
        tmp_path,
        FAULTY,
        "--nproc-per-node",
        "2",
        "--set",
        "restart.crash_loop=1000000",
        "--max-restarts",
        "1000000",
        args=words,
    ) as run:
        early: dict[str, tuple[int, ...]] = {}
        for number in range(1, RESTARTS + 1):
            run.until_step(1, epoch=number)
            if EARLY - LOOKS < number <= EARLY:
                for name, counts in look(run).items():
                    early[name] = tuple(map(max, counts, early.get(name, counts)))
            run.kill(number % 2)
        run.until_step(1, epoch=RESTARTS + 1)
        late = look(run)
        for name, (pid, descriptors, threads, rss_bytes) in late.items():
            before = early[name]
            print(f"{name}: {early[name]} -> {late[name]}")
            assert pid == before[0], name
            assert descriptors <= before[1], name
            assert threads <= before[2], name
            assert rss_bytes <= RSS_GROWTH * before[3], name
        closed = run.events(e.IncidentClosed)
        assert len(closed) == RESTARTS
        assert all(list(c.phases) == ["detect", "stop", "form", "first-step"] for c in closed)
        assert not list(tmp_path.glob("twice-*"))
        run.signal(signal.SIGTERM)
        run.wait()

"""A session whose gradients another library sums, with a group of its own in every epoch: gloo stands for NCCL."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from session_harness import SessionRun

from everstep.core import events as e
from everstep.core.errors import ExitCode

pytestmark = pytest.mark.timeout(150)

HANG_S = 2.0


def test_members_die_stop_and_join(tmp_path: Path) -> None:
    """Kills at once, one while the new group is made, and a sum that waits for a member which is stopped."""
    args = ("--steps", "5000", "--pause", "0.005", "--library", "gloo")
    with SessionRun(tmp_path, "--nproc-per-node", "4", "--hang-timeout", str(HANG_S), args=args) as run:
        run.until_committed(20)
        run.kill_member(2)
        run.until_dealt_to(3)
        run.kill_member(0)
        run.until_members(4)
        moment = time.time()
        stopped = run.kill_member(1, signal.SIGSTOP)
        run.until(lambda: stopped not in run.members().values() and len(run.members()) == 4)
        run.stop()
        assert HANG_S - 0.5 < (run.pause_after(moment, 100) or 0.0) < HANG_S + 2
        assert {step.members for step in run.check()} >= {3, 4}
        assert len(run.events(e.EpochFormed)) == 1  # no other process was touched


def test_a_world_of_one(tmp_path: Path) -> None:
    with SessionRun(tmp_path, "--nproc-per-node", "1", args=("--steps", "5", "--library", "gloo")) as run:
        assert run.wait() == ExitCode.OK
        run.check(5)

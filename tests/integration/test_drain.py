"""Nodes and workers of real jobs that are drained, and the journal's account of what every step consumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from session_harness import NUM_SAMPLES, SEED, SessionRun, assert_ledger

from everstep.control.journal import read
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.data.account import account
from everstep.data.sampler import Sampler
from everstep.testing.local import LocalRun

pytestmark = pytest.mark.timeout(150)

TRAIN = Path(__file__).parent / "scripts" / "train.py"
TWO_NODES = ("--nnodes", "1:2", "--local-nodes", "2", "--nproc-per-node", "2")
ENDLESS = ("--steps", "5000", "--pause", "0.02")  # no longer: steps cost the time of the two cores


def everstep(run: LocalRun, *words: str) -> str:
    """What a command about this run prints; it must succeed."""
    command = [sys.executable, "-m", "everstep", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr + run.text()[-2000:]
    return done.stdout


def drain(run: LocalRun, target: str, *options: str) -> list[str]:
    return everstep(run, "drain", target, "--run", str(run.run_dir), *options).splitlines()


def how_they_ended(run: LocalRun) -> set[str]:
    return {ended.exit.cause.value for ended in run.events(e.WorkerEnded)}


def test_a_worker_and_then_a_node_leave(tmp_path: Path) -> None:
    with SessionRun(tmp_path, *TWO_NODES, args=ENDLESS) as run:
        run.until_committed(20)
        *_, last = drain(run, "1")
        assert last.startswith("node0/1 has left after step ") and last.endswith("; 3 members go on")
        assert run.until_members(3)
        run.until_committed(run.committed() + 20)
        assert drain(run, "node0/1", "--undo") == ["node0/1 is to be filled again"]
        run.until_members(4)
        *_, last = drain(run, "node1")
        assert last.startswith("node1 has left after step ") and last.endswith("; 2 members go on")
        run.until_members(2)
        run.until_committed(run.committed() + 20)
        assert not run.events(e.IncidentOpened)
        assert how_they_ended(run) == {"ok"} and len(run.events(e.WorkerEnded)) == 3
        run.stop()
        story = run.check()
        sizes = [step.members for step in story]
        assert [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before] == [4, 3, 4, 2]
        assert_ledger(run)


def test_the_wish_outlives_the_controller(tmp_path: Path) -> None:
    """It is killed the moment that it has answered, and its successor is told nothing."""
    with SessionRun(tmp_path, *TWO_NODES, args=ENDLESS) as run:
        run.until_committed(20)
        assert drain(run, "node1", "--no-wait") == ["node1 is asked to leave"]
        run.kill_controller()
        run.until(lambda: [lost.node for lost in run.events(e.NodeLost)] == ["node1"])
        run.until_members(2)
        run.stop()
        run.check()
        assert len(run.events(e.DrainAsked)) == 1


def test_without_sessions_the_others_start_again(tmp_path: Path) -> None:
    with LocalRun(tmp_path, TRAIN, *TWO_NODES, args=("--steps", "400", "--pace", "0.02")) as run:
        run.until_step(5)
        *_, last = drain(run, "node1")
        assert last.startswith("node1 has left after step ")
        assert last.endswith("; 2 workers on node0 go on from there in epoch 2")
        run.until_step(3, epoch=2)
        assert [opened.kind for opened in run.events(e.IncidentOpened)] == ["drain"]
        run.signal(signal.SIGTERM)
        run.wait()


# The ledger ---------------------------------------------------------------------------------------------


def test_the_ledger_is_what_the_members_wrote(tmp_path: Path) -> None:
    """A kill, a drained worker, a killed controller, another kill, and nothing but the journal."""
    with SessionRun(tmp_path, "--nproc-per-node", "4", args=(*ENDLESS, "--global-batch", "25")) as run:
        run.until_committed(15)
        run.kill_member(2)
        run.until_members(4)
        drain(run, "3")
        run.kill_controller()
        run.until_committed(run.committed() + 10)
        run.kill_member(0)
        run.until_members(3)
        run.until_committed(run.committed() + 10)
        run.stop()
        run.check()
        assert_ledger(run)
        lines = everstep(run, "ledger", str(run.run_dir)).splitlines()
        assert lines[-1].endswith(" steps committed, each dealt once") and len(lines) >= 5
        shares = everstep(run, "ledger", str(run.run_dir), "--step", "7").splitlines()
        assert sorted(int(number) for line in shares for number in line.split()[2:]) == sorted(
            Sampler(NUM_SAMPLES, 25, seed=SEED).samples(range(7 * 25, 8 * 25))
        )


def test_a_job_whose_state_was_lost_has_a_ledger_of_what_counts(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--vault-memory", "0")
    with SessionRun(tmp_path, *options, args=("--steps", "50", "--pause", "0.005")) as run:
        run.until_committed(20)
        for pid in run.until_members(2).values():
            os.kill(pid, signal.SIGKILL)
        assert run.wait() == ExitCode.OK
        told = account(read(run.run_dir / "journal.jsonl"))
        assert [step.number for step in told.steps()] == list(range(50))
        assert told.spans()[0].dealing.epoch > 1

"""State outlives the workers: all are killed, a node is lost with the only copy of a shard, the job is stopped.

`check` compares the bits of every step that was done again with those of the first time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from session_harness import SessionRun

from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.state.disk import Checkpoints

pytestmark = pytest.mark.timeout(150)

STEPS = ("--steps", "60", "--norm", "--pause", "0.005")


class ShardedRun(SessionRun):
    """One replica of two shards."""

    script = Path(__file__).parent / "scripts" / "session_fsdp.py"
    shards = 2


def restored(run: SessionRun) -> e.StateRestored:
    (found,) = run.events(e.StateRestored)
    return found


def test_all_workers_killed_at_once_go_on_from_the_nodes_memory(tmp_path: Path) -> None:
    with SessionRun(tmp_path, "--nproc-per-node", "3", args=STEPS) as run:
        run.until_committed(20)
        for pid in run.until_members(3).values():
            os.kill(pid, signal.SIGKILL)
        assert run.wait() == ExitCode.OK
    run.check(60, restarts=1)
    back = restored(run)
    assert back.lost == back.before - back.step <= 2  # the newest image is that of the step before, or being taken
    whys = [opened.why for opened in run.events(e.IncidentOpened) if opened.kind == "rolled-back"]
    assert len(whys) == (back.lost > 0)  # the controller may not have heard of the steps that are done again
    assert all(f"all went back to step {back.step}" in why for why in whys)
    assert not run.events(e.SaveRequested)


def test_a_lost_node_with_the_only_copy_of_a_shard_comes_back_from_a_peers_memory(tmp_path: Path) -> None:
    two = ("--local-nodes", "2", "--nnodes", "1:2", "--nproc-per-node", "1", "--preload", "torch.distributed.fsdp")
    with ShardedRun(tmp_path, *two, args=("--steps", "60", "--pause", "0.01")) as run:
        run.until_committed(20)
        survivor = run.until_members(2)[0]
        os.kill(int((run.run_dir / "vault-node1.pid").read_text()), signal.SIGKILL)
        run.kill_agent("node1")
        assert run.wait() == ExitCode.OK
    run.check(60, restarts=1)
    assert restored(run).lost <= 3
    assert len(run.commits()[survivor]) == 60 + restored(run).lost, "the survivor's process did not live on"


def test_saved_on_demand_and_before_a_stop_and_a_later_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    args = ("--steps", "200", "--norm", "--pause", "0.005", "--checkpoints", str(folder))
    with SessionRun(tmp_path, "--nproc-per-node", "2", args=args) as run:
        run.until_committed(5)
        command = [sys.executable, "-m", "everstep", "save", "--run", str(run.run_dir)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        asked = run.events(e.SaveDurable)[0].step
        assert said == f"saving step {asked}\nstep {asked} is on disk\n"
        run.until_step(2)  # so much is heard where the step to stop at is chosen
        run.signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
        stopped = run.committed()
        assert [event.step for event in run.events(e.SaveDurable)] == [asked, stopped]
    assert Checkpoints(folder).found() == [stopped, asked]
    with SessionRun(tmp_path, "--nproc-per-node", "2", args=args) as later:
        assert later.wait() == ExitCode.OK
    later.check(200)
    assert restored(later) == e.StateRestored(1, stopped, 0, 0)
    assert Checkpoints(folder).found() == [200, stopped, asked]

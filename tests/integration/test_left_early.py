"""A worker that ends well while the others still communicate breaks their connections: it is the first cause."""

from __future__ import annotations

from pathlib import Path

from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.testing.local import LocalRun

# An interpreter's end takes its time: rank 1 outlives rank 0, or its failure has rank 0 stopped in the midst of it.
LEAVES = """
import os, select, torch, torch.distributed as dist
dist.init_process_group("gloo")
pid = torch.tensor(0 if dist.get_rank() else os.getpid())
dist.all_reduce(pid)
first = os.pidfd_open(int(pid))
dist.all_reduce(pid)
if dist.get_rank():
    try:
        dist.all_reduce(pid)
    finally:
        select.select([first], [], [])
"""


def test_who_ended_first_is_named(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LEAVES)
    with LocalRun(tmp_path, "script.py", "--nproc-per-node", "2", "--max-restarts", "0") as run:
        assert run.wait() == ExitCode.FAILED
        (update,) = run.events(e.IncidentUpdated)
        assert [b.rank for b in update.culprits] == [0]
        assert [b.rank for b in update.collateral] == [1]
        assert "rank 0 on node0 ended (exit 0) at step 0 while the others still communicate" in run.text()

"""A process that does not end when its script has ended holds the job for a while, not for ever."""

from __future__ import annotations

from pathlib import Path

from everstep.core import events as e
from everstep.core.types import ExitCause
from everstep.testing.local import LocalRun

# Rank 0's script ends at once while its thread trains on for longer than the limit; rank 1 blocks in an exit handler.
SCRIPT = """
import atexit, os, threading, time
import torch

def train():
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    end = time.monotonic() + 1.5 * LIMIT
    while time.monotonic() < end:
        weight.sum().backward()
        optimizer.step()
        time.sleep(0.1)
    open("trained", "x").close()

if os.environ["RANK"] == "0":
    threading.Thread(target=train).start()
else:
    atexit.register(threading.Event().wait)
"""
LIMIT_S = 2.0  # the end of an interpreter takes a while, too


def test_blocked_in_an_exit_handler(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("LIMIT", str(LIMIT_S)))
    with LocalRun(tmp_path, script, "--nproc-per-node", "2", "--set", f"hang.exit_s={LIMIT_S}") as run:
        assert run.wait(40) == 0, run.text()
    assert (tmp_path / "trained").exists(), "a thread that trains on is no lingering"
    ends = {end.rank: end.exit for end in run.events(e.WorkerEnded)}
    assert ends[0].cause is ExitCause.OK and not ends[0].message
    assert ends[1].cause is ExitCause.OK and ends[1].message.startswith("its script ended; killed because")
    assert not run.events(e.IncidentOpened)
    assert "rank 1 on node0: its script ended; killed" in run.text()

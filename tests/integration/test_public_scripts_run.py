"""Unmodified public scripts under `everstep run`: a killed rank changes nothing of how they end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstep.core import events as e
from everstep.testing.local import LocalRun

PUBLIC = Path(__file__).parents[2] / "examples" / "public"

# script -> arguments, what rank 0 prints at the moment of the kill, what tells that it resumed
CASES = {
    "ddp_tutorial.py": (("8", "1"), "Epoch 4 | Steps", "Resuming training from snapshot at Epoch"),
    "fsdp2.py": (("--steps", "24", "--save-every", "8"), "step 13 ", "resumes at step 8"),
}


def run_script(folder: Path, script: str, kill: bool) -> str:
    """The job's output, after a good end."""
    args, middle, resumed = CASES[script]
    folder.mkdir()
    options = ("--nproc-per-node", "2", "--max-restarts", "1")
    with LocalRun(folder, PUBLIC / script, *options, args=args) as run:
        if kill:
            run.until(lambda: middle in run.text())
            run.kill(rank=1)
        assert run.wait() == 0, run.text()
    assert len(run.events(e.EpochFormed)) == 1 + kill
    assert (resumed in run.text()) == kill
    return run.text()


@pytest.mark.parametrize("script", CASES)
def test_killed_and_resumed_ends_as_undisturbed(script: str, tmp_path: Path) -> None:
    straight, killed = (
        re.findall(r"final loss [\d.]+", run_script(tmp_path / name, script, kill))
        for name, kill in (("straight", False), ("killed", True))
    )
    assert len(straight) == 1
    assert killed == straight

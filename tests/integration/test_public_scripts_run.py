"""Unmodified public scripts under `everstep run`: a killed rank changes nothing of how they end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import warm

from everstep.core import events as e
from everstep.testing.local import LocalRun

PUBLIC = Path(__file__).parents[2] / "examples" / "public"

# script -> arguments, what rank 0 prints at the moment of the kill, what tells that it resumed
CASES = {
    "ddp_tutorial.py": (("8", "1"), "Epoch 4 | Steps", "Resuming training from snapshot at Epoch"),
    "fsdp2.py": (("--steps", "24", "--save-every", "8"), "step 13 ", "resumes at step 8"),
}


def killed(folder: Path, script: str) -> str:
    """The job's output, after a good end."""
    args, middle, resumed = CASES[script]
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--preload", "torch.distributed.fsdp")
    with LocalRun(folder, PUBLIC / script, *options, args=args) as run:
        run.until(lambda: middle in run.text())
        run.kill(rank=1)
        assert run.wait() == 0, run.text()
    assert len(run.events(e.EpochFormed)) == 2
    assert resumed in run.text()
    return run.text()


@pytest.mark.parametrize("script", CASES)
def test_killed_and_resumed_ends_as_undisturbed(script: str, tmp_path: Path) -> None:
    """Undisturbed: two processes with torchrun's variables, and without us."""
    folders = [tmp_path / "calm", tmp_path / "hurt"]
    for folder in folders:
        folder.mkdir()
    with warm.Ranks(folders[0], PUBLIC / script, *CASES[script][0]) as ranks:
        texts = [killed(folders[1], script), ranks.wait()]
    hurt, calm = (re.findall(r"final loss [\d.]+", text) for text in texts)
    assert len(calm) == 1
    assert hurt == calm

"""The public scripts that need nothing but torch: a short run, and the same end after stopping half-way."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_ranks import run

# script, arguments for the whole run, arguments for its first part
CASES = {
    "ddp_tutorial": (["4", "1"], ["2", "1"]),
    "nanogpt_style": (["--max_iters=3", "--eval_interval=1", "--batch_size=2"], None),
    "fsdp2": (["--steps", "5"], ["--steps", "3"]),
}


def arguments(name: str, args: list[str], folder: Path) -> list[str]:
    where = {
        "ddp_tutorial": ["--snapshot_path", str(folder / "snapshot.pt")],
        "nanogpt_style": [f"--out_dir={folder / 'out'}"],
        "fsdp2": ["--folder", str(folder / "checkpoints")],
    }
    return [*args, *where[name]]


def final_loss(text: str) -> float:
    last = text.splitlines()[-1]
    assert last.startswith("final loss "), text
    return float(last.removeprefix("final loss "))


@pytest.mark.parametrize("name", CASES)
def test_runs_and_resumes(name: str, tmp_path: Path) -> None:
    whole, part = CASES[name]
    script = f"public/{name}.py"
    straight = final_loss(run(tmp_path / "a", script, arguments(name, whole, tmp_path / "a")))
    if part is not None:
        run(tmp_path / "b", script, arguments(name, part, tmp_path / "b"))
        text = run(tmp_path / "b2", script, arguments(name, whole, tmp_path / "b"))
        assert "resum" in text.lower()
        assert final_loss(text) == straight
    again = run(tmp_path / "a2", script, arguments(name, whole, tmp_path / "a"))
    assert "resum" in again.lower()
    assert final_loss(again) == straight

"""`everstep stacks` and `everstep profile` where there is no job to look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.cli import looking
from everstep.cli.asking import LATEST
from everstep.cli.main import main
from everstep.control.journal import Journal
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.types import JobSpec


def test_the_run_folder_is_told_from_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Journal.open(tmp_path / "journal.jsonl", "j1").close()
    (tmp_path / "node0").mkdir()  # a folder, and no run folder
    assert looking.split((str(tmp_path), "3"), None) == (tmp_path, ("3",))
    assert looking.split(("node0", "3"), None) == (LATEST, ("node0", "3"))
    assert looking.split(("3",), tmp_path) == (tmp_path, ("3",))
    assert looking.split((), None) == (LATEST, ())


@pytest.mark.parametrize("words", [("stacks",), ("profile", "0")])
def test_no_job_or_one_that_is_over(words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--run", str(tmp_path)]) == ExitCode.USAGE
    assert f"no journal in {tmp_path}" in capsys.readouterr().err
    with Journal.open(tmp_path / "journal.jsonl", "j1") as journal:
        journal.append(e.JobSubmitted(JobSpec("j1")), 1.0, 1e9, 0)
        journal.append(e.JobEnded(0, "all done"), 2.0, 1e9, 0)
    assert main([*words, "--run", str(tmp_path)]) == ExitCode.USAGE
    assert "has ended (exit code 0)" in capsys.readouterr().err


def test_a_profile_is_of_one_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile"]) == ExitCode.USAGE
    assert "profile takes one worker" in capsys.readouterr().err

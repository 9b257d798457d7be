"""What the console says of an incident: each thing once."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.cli.narrate import Narrator
from everstep.control.journal import Journal
from everstep.core import events as e
from everstep.core.types import JobSpec


def test_an_update_that_tells_nothing_new_is_not_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = e.IncidentOpened("I001", "crash", (), "rank 1 died")
    known = e.IncidentUpdated("I001", (), why="rank 1 was killed")
    with Journal.open(tmp_path / "journal.jsonl", "job") as journal:
        for event in (opened, e.IncidentUpdated("I001", (), why="rank 1 died"), known, known):
            journal.append(event, 1.0, 1.0, 1)
    Narrator(tmp_path, "job").catch_up()
    said = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == ["incident I001 (crash): rank 1 died", "incident I001: rank 1 was killed"]


def test_a_slow_worker_is_said_and_that_it_is_well_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal.open(tmp_path / "journal.jsonl", "job") as journal:
        journal.append(e.IncidentOpened("S001", "slow", (), "rank 1 is slow"), 1.0, 1.0, 1)
        journal.append(e.IncidentClosed("S001", "well again since step 9"), 2.0, 2.0, 1)
    Narrator(tmp_path, "job").catch_up()
    said = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == ["incident S001 (slow): rank 1 is slow", "incident S001: well again since step 9"]


def test_a_damaged_journal_costs_lines_and_not_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrator = Narrator(tmp_path, "job")
    with Journal.open(tmp_path / "journal.jsonl", "job") as journal:
        journal.append(e.JobSubmitted(JobSpec("job")), 1.0, 1e9, 0)
        with journal.path.open("ab") as disk:
            disk.write(b"\x00\x00\n")
        journal.append(e.Alert("jitter", "after it"), 2.0, 1e9, 0)
        narrator.catch_up()
        narrator.catch_up()
        said = capsys.readouterr().err
        assert said.count("line 2 is damaged") == 1 and "jitter: after it" in said
    journal.path.unlink()
    journal.path.mkdir()
    narrator.end(3)
    said = capsys.readouterr().err
    assert "cannot be read: Is a directory" in said and "no summary: no journal" in said and "exit code 3" in said

"""Where views come from: a journal that is not there yet, one that is damaged, and a launcher that is gone."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from serving import JOB, writing

from everstep.core import events as e
from everstep.dashboard import source
from everstep.dashboard.source import Source


def test_a_journal_that_begins_later(tmp_path: Path) -> None:
    newest = Source(tmp_path, lambda: True)
    assert newest.follow() == 0 and newest.facts().job == ""
    with writing(tmp_path) as write:
        assert newest.follow() == 2 and newest.follow() == 0
        write(e.Alert("note", "one"))
        assert newest.view().alerts[-1].text == "one" and newest.facts().job == JOB


def test_the_journal_is_measured_over_its_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "LOOK_S", 0.0)
    with writing(tmp_path) as write:
        newest = Source(tmp_path, lambda: True)
        write(e.Alert("note", "one"))
        (tmp_path / "journal-000001.jsonl.gz").write_bytes(gzip.compress(b""))
        size = sum(path.stat().st_size for path in tmp_path.glob("journal*"))
        assert f'everstep_journal_bytes{{training_job="{JOB}"}} {float(size)}' in newest.metrics().decode()


def test_events_of_a_later_version_are_told(tmp_path: Path) -> None:
    with writing(tmp_path) as write:
        newest = Source(tmp_path, lambda: True)
        write(e.Alert("note", "one"))
        path = tmp_path / "journal.jsonl"
        path.write_bytes(path.read_bytes().replace(b'"Alert"', b'"Alart"'))
        assert "1 of its events are of types" in newest.facts().trouble


def test_damage_is_told_and_what_follows_is_shown(tmp_path: Path) -> None:
    with writing(tmp_path) as write:
        newest = Source(tmp_path, lambda: True)
        write(e.Alert("note", "one"), e.Alert("note", "two"))
        path = tmp_path / "journal.jsonl"
        text = bytearray(path.read_bytes())
        text[text.index(b'"one"') + 3] ^= 0x80
        path.write_bytes(text)
        assert [alert.text for alert in newest.view().alerts] == ["two"]
        assert "line 3 is damaged" in newest.facts().trouble


def test_time_passes_only_while_the_job_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "LOOK_S", 0.0)
    with writing(tmp_path) as write:
        lives: list[bool | None] = [True]
        newest = Source(tmp_path, lambda: lives[0])
        first = newest.view().now_s
        assert newest.view().now_s > first and newest.facts().mode == "live"
        lives[0] = None  # nobody can tell from here
        assert newest.facts().mode == "live"
        lives[0] = False
        assert newest.facts().mode == "recorded" and newest.frame().over
        assert newest.facts().span_s == newest.facts().span_s
        lives[0] = True
        write(e.JobEnded(0, "done"))
        assert newest.frame().over and newest.view().exit_code == 0

"""What the dashboard's process says: a line a second at most, and nothing that a stranger could forge."""

from __future__ import annotations

import logging

import pytest

from everstep.dashboard.notes import OFTEN, Notes


def test_few_lines_however_many_requests(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    notes = Notes(lambda: now[0])
    for tick in range(1000 * 10):
        now[0] = tick / 10
        notes.say("refused")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["everstep: dashboard: refused", "everstep: dashboard: refused (and 9 more)"]
    assert OFTEN <= len(lines) <= OFTEN + 900 / 60 + 1


def test_a_line_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    notes = Notes()
    notes.say("refused\neverstep: all is well\x1b[2J" + "x" * 10_000)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "\x1b" not in said and len(said) < 1000
    record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "a defect", (), None)
    Notes().handle(record)
    assert capsys.readouterr().err == "everstep: dashboard: a defect\n"

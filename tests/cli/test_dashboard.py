"""`everstep dashboard` and `everstep replay` of a record, and what `run` says where there can be no dashboard."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import writing

from everstep.cli import showing
from everstep.cli.main import main
from everstep.control import transport
from everstep.core import events as e
from everstep.core.config import Dashboard, RunConfig
from everstep.core.errors import ExitCode


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with writing(tmp_path) as write:
        write(e.StepsSeen(1, 5, 5, 1.0), e.JobEnded(0, "done"))
    return tmp_path


def _interruptible() -> None:
    """Whoever runs the tests in the background of a shell ignores SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def served(*arguments: str) -> Iterator[tuple[int, str, subprocess.Popen[str]]]:
    """Its port, what it said, and its process."""
    command = [sys.executable, "-m", "everstep", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_interruptible)
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        found = re.search(r"dashboard at http://[\w.-]+:(\d+)/", said)
        assert found, said + process.stderr.read()
        yield int(found[1]), said, process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def got(port: int, path: str, **headers: str) -> tuple[int, Any]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    link.request("GET", path, headers=headers)
    answer = link.getresponse()
    found = answer.status, json.loads(answer.read())
    link.close()
    return found


def test_a_record_is_shown_until_interrupted(run: Path) -> None:
    with served("dashboard", str(run), "--name", "a.example", "--name", "b.example") as (port, _, process):
        assert not (run / "dashboard.token").exists()
        status, info = got(port, "/api/info")
        assert (status, info["mode"], info["controls"], info["play"]) == (200, "recorded", False, False)
        assert got(port, "/api/view")[1]["exit_code"] == 0
        hosts = ("a.example", "b.example:80", "c.example")
        assert [got(port, "/api/info", host=host)[0] for host in hosts] == [200, 200, 421]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 128 + signal.SIGINT


def test_a_journal_alone_is_played_and_away_from_loopback_the_token_is_needed(run: Path) -> None:
    with served("replay", str(run / "journal.jsonl"), "--host", "0.0.0.0") as (port, said, _):
        assert got(port, "/api/info")[0] == 401
        assert str(run / "dashboard.token") in said and (run / "dashboard.token").stat().st_mode & 0o777 == 0o600
        token = (run / "dashboard.token").read_text().strip()
        status, info = got(port, "/api/info", authorization=f"Bearer {token}")
        assert (status, info["mode"], info["play"], info["needs_token"]) == (200, "recorded", True, True)


def test_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(tmp_path)]) == ExitCode.USAGE
    assert "no journal in" in capsys.readouterr().err


def test_a_job_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(**settings: Any) -> showing.Showing | None:
        return showing.Showing.open(RunConfig(dashboard=Dashboard(**settings)), tmp_path, lambda: None)

    assert opened(enabled=False) is None and capsys.readouterr().err == ""
    assert opened(host="192.0.2.1") is None
    assert "everstep: no dashboard: cannot listen on 192.0.2.1" in capsys.readouterr().err
    with transport.listen("127.0.0.1", 0) as taken, showing.listen_near("127.0.0.1", taken.getsockname()[1]) as other:
        assert other.getsockname()[1] != taken.getsockname()[1]
    monkeypatch.setattr(showing, "NEEDED", ("json", "no_such_package"))
    assert opened() is None
    assert capsys.readouterr().err.endswith("it needs no_such_package: pip install 'everstep[dashboard]'\n")
